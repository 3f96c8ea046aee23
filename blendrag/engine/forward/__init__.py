"""A model as our own forward runs it: its layers, the paged cache, pieces of work, and ranks."""
