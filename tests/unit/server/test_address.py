"""Where a server is to listen, before it starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blendrag.errors import ConfigError
from blendrag.server.address import check_address

HERE = ["--host", "127.0.0.1", "--port"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def port_of(server: socket.socket) -> str:
    return str(server.getsockname()[1])


def test_port_in_use_is_refused_however_it_is_named(listener: socket.socket) -> None:
    port = port_of(listener)
    for words in ([*HERE, port], ["--port", port], [f"--port={port}", "--seed", "1"]):
        with pytest.raises(ConfigError, match=rf"port {port} of .*in use.*--port"):
            check_address(words)


def test_port_of_a_server_that_is_starting_is_refused() -> None:
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="about to listen"):
            check_address([*HERE, port_of(bound)])


def test_port_of_a_server_that_has_ended_is_free(listener: socket.socket) -> None:
    """Its connections are remembered for a while."""
    port = port_of(listener)
    with socket.create_connection(listener.getsockname()) as client:
        listener.accept()[0].close()
        client.recv(1)
    listener.close()
    check_address([*HERE, port])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "0-65535"),
        (["--port", "eighty"], "eighty"),
        (["--host", "192.0.2.1", "--port", "0"], "Cannot assign requested address"),
        (["--uds", "/proc/blendrag"], "No such file"),
        (["--uds", "/" + "long" * 50], "too long"),
    ],
    ids=["too large", "no number", "another machine", "no folder", "too long"],
)
def test_address_that_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_address(words)


def test_path_of_a_socket_is_left_as_it_was(tmp_path: Path) -> None:
    check_address(["--uds", str(tmp_path / "socket")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "socket").touch()
    with pytest.raises(ConfigError, match="already"):
        check_address(["--uds", str(tmp_path / "socket")])
    assert (tmp_path / "socket").exists()
