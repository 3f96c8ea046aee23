"""blendrag in a stock ``vllm serve``: the plugin that vLLM loads, and the command that starts it.

vLLM is met only through what it hands to plugins (``vllm.plugins.endpoint_plugins``): the app with its
routes, and its state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of what is kept of requests, unless the server is told otherwise: an option
    of ``serve`` each.

    body_mib: of its body; 64 are some 20,000 pages. items: messages of a chat, and documents that it names;
    of a body's JSON, 16 values each, or 256 where documents are put. text_mib: of texts that are tokenised to
    be answered, that a request names, or of one that is kept. repeats_gib: of the KV of texts that come again
    in prompts; 0: none is kept.
    """

    body_mib: int = 64
    items: int = 4096
    text_mib: int = 2
    repeats_gib: float = 0

    def values(self, method: str) -> int:
        """Return how many values the body of a request with this method may hold."""
        return self.items * (256 if method == "PUT" else 16)


LIMITS = Limits()
