"""The pages of the documentation, and the programs that build its site."""
