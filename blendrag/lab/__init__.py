"""Everything that measures, evaluates, replays, trains and draws. Serving never imports it."""

from __future__ import annotations

import importlib.util

from blendrag.errors import MissingDependencyError


def require(*modules: str) -> None:
    """Raise MissingDependencyError, naming the extra, unless these can be imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(f'{name} is not installed: pip install "blendrag[lab]"')
