"""blendrag in a stock ``vllm serve``: the plugin that vLLM loads, and the command that starts it.

vLLM is met only through what it hands to plugins (``vllm.plugins.endpoint_plugins``): the app with its
routes, and its state."""

MOST_MIB = 64
"""Of a request's body, unless the server is told otherwise: some 20,000 pages of text."""
