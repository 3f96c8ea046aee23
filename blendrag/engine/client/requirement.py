"""The check of the installed vLLM, if any: can blendrag use it?"""

from __future__ import annotations

import importlib.util
import warnings
from importlib.metadata import entry_points

from packaging.specifiers import SpecifierSet

from blendrag.errors import BlendragWarning, MissingDependencyError
from blendrag.machine import installed_vllm

TESTED = SpecifierSet(">=0.27,<0.34")
"""The versions of vLLM that blendrag is tested with (docs/models.md says how), and that its extras ask
for."""

_WITH_PLUGINS = SpecifierSet(">=0.32")  # versions where a plugin's routes stand in for vLLM's own

_PLUGINS = ("vllm.endpoint_plugins", "vllm.general_plugins")  # entry point groups of our plugins

_INSTALL = 'pip install "blendrag[cpu]" (or "blendrag[cuda]" on an NVIDIA machine)'


def require_vllm() -> None:
    """Raise MissingDependencyError, naming the extra, if no vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(f"vLLM is not installed: {_INSTALL}")


def require_server() -> None:
    """Raise MissingDependencyError if the installed vLLM takes no plugins into its server, or does not know
    of blendrag's."""
    require_vllm()
    version = installed_vllm()
    if version and not _WITH_PLUGINS.contains(version, prereleases=True):
        raise MissingDependencyError(f"a server needs vLLM {_WITH_PLUGINS}, not {version}: {_INSTALL}")
    if not all(entry_points(group=group, name="blendrag") for group in _PLUGINS):
        raise MissingDependencyError(
            "vLLM does not know of blendrag's plugins: install blendrag again (in a checkout: make setup)"
        )


def check_vllm() -> None:
    """Raise MissingDependencyError, with the name, if vLLM lacks something that blendrag uses. Gives one
    BlendragWarning for a version that blendrag was not tested with. Imports vLLM, which takes seconds."""
    version = installed_vllm()
    try:
        from blendrag.engine.compat.required import missing

        lacking = missing()
    except ImportError as error:
        lacking = [str(error)]
    if lacking:
        raise MissingDependencyError(
            f"vLLM {version} lacks what blendrag uses ({', '.join(lacking)}): it needs {TESTED}, {_INSTALL}"
        )
    if version and not TESTED.contains(version, prereleases=True):
        warnings.warn(
            f"blendrag is tested with vLLM {TESTED}, not {version}: `blendrag doctor` checks how it blends",
            BlendragWarning,
            stacklevel=2,
        )
