"""The pages of the documentation, and the programs that build and check the site made of them."""
