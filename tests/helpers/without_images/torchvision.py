"""What vLLM imports of torchvision for models that read images: names, and nothing behind them.

For tests on machines where torchvision's build for CPUs is not to be had. They send texts alone.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []  # so that it may have modules in it


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(ModuleType):
    """A module that has any name, and raises where it is called."""

    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Module(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"torchvision is not here: {self.__name__} was called")


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _made = _Module(f"{__name__}.{_name}")
    _made.__path__ = []
    sys.modules[_made.__name__] = _made
    _parent, _, _own = _made.__name__.rpartition(".")
    setattr(sys.modules[_parent], _own, _made)
