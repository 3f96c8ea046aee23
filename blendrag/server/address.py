"""A check that a server can listen where it is told to, before it takes minutes to start."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from blendrag.errors import ConfigError


def check_address(options: Sequence[str]) -> None:
    """Bind the address of these options as vLLM's server will, and let go. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    try:
        asked, _ = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if asked.uds:
        return _check_path(Path(asked.uds))
    try:
        _check_port(asked.host, asked.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen at port {asked.port} of {asked.host or 'this machine'}: {reason}: name another"
            " (--port, --host)"
        ) from None


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else family
    with socket.socket(family) as alone, contextlib.suppress(OSError):
        return alone.bind((host, port))
    with socket.socket(family) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.bind((host, port))
        shared.listen()
    # What is left of the connections of a server that has ended holds the port, too, and does no harm.
    ports = {one.laddr.port for one in psutil.net_connections("tcp") if one.laddr}
    if port not in ports:
        raise OSError(0, "another program is about to listen there")


def _check_path(path: Path) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as free:
            free.bind(str(path))
        path.unlink()
    except OSError as error:
        reason = "there is a file of that name already" if path.exists() else error.strerror or str(error)
        raise ConfigError(f"cannot listen at {str(path)!r}: {reason}: name another (--uds)") from None
