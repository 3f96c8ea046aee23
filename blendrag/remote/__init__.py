"""A server of blendrag in place of an engine of this process's own. Imports neither torch nor vLLM, nor
transformers."""

API_KEY = "BLENDRAG__API_KEY"
"""In the environment of a client: the key, where none is given."""
