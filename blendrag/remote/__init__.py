"""A chat model and collections on a server of blendrag, in place of an engine of this process's own. Imports
neither torch nor vLLM, nor transformers."""

API_KEY = "BLENDRAG__API_KEY"
"""The variable of a client's environment that holds the key, where none is given."""
