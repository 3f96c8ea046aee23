"""What vLLM imports of torchvision for models that read images: names, and nothing behind them.

For tests on machines where torchvision's build for CPUs is not to be had. They send texts alone.
"""

from typing import Any

__version__ = "0.28.0"


class Missing:
    """Raises where it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"torchvision is not here: {self._name} was called")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)
