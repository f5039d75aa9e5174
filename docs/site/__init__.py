"""The site of the documentation: how it is built from the pages, and what is checked of it."""
