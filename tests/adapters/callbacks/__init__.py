"""The adapters of Keras, Lightning, Ignite and Hugging Face's Trainer, with these; run by .ci/frameworks, which has them."""
