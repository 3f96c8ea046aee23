"""A server's keys and address, which are read before it starts."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.server.address import check_address
from blendrag.server.keys import RIGHTS, read_keys

DIGEST = hashlib.sha256(b"a key").hexdigest()


def written(folder: Path, text: str) -> Path:
    file = folder / "keys"
    file.write_text(text, encoding="utf-8")
    return file


def test_key_is_found_by_all_of_it_only(tmp_path: Path) -> None:
    other = hashlib.sha256("schlüssel".encode()).hexdigest().upper()
    keys = read_keys(written(tmp_path, f"# who\n\n{DIGEST}  acme\task,ingest # ours\n{other} globex ask\n"))
    found = keys.find(b"a key")
    assert found is not None
    assert (found.namespace, found.rights) == ("acme", {"ask", "ingest"})
    assert keys.namespaces == ["acme", "globex"]
    assert keys.find("schlüssel".encode()) is not None
    for wrong in (b"", b"a ke", b"a key\n", DIGEST.encode()):
        assert keys.find(wrong) is None


def test_mark_that_windows_puts_before_a_file_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read_keys(written(tmp_path, f"\ufeff{DIGEST} acme ask")).find(b"a key") is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "nobody could ask"),
        ("# only this", "nobody could ask"),
        (f"{DIGEST} acme aks", "line 1: unknown right 'aks'; did you mean ask"),
        (f"{DIGEST} acme ask,", "line 1: unknown right ''"),
        (f"{DIGEST} acme ask, ingest", "line 1: needs .* 4 words"),
        (f"{DIGEST} acme", "line 1: needs .* 2 words"),
        (f"{DIGEST[:-1]} acme ask", "line 1: the first word is no SHA-256"),
        (f"{DIGEST} .. ask", "line 1: '..' is no namespace"),
        (f"{DIGEST} a/b ask", "line 1: 'a/b' is no namespace"),
        (f"{DIGEST} {'a' * 65} ask", "line 1: .* is no namespace"),
        (f"{DIGEST} acme ask\n\n{DIGEST} globex ask", "line 3: this key is in an earlier line"),
    ],
)
def test_wrong_line_is_refused(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_keys(written(tmp_path, line))


def test_key_itself_is_not_shown(tmp_path: Path) -> None:
    """It stands where its hash should."""
    with pytest.raises(ConfigError) as caught:
        read_keys(written(tmp_path, "my-secret-key acme ask"))
    assert "my-secret-key" not in str(caught.value)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_keys(tmp_path / "keys")


WORD = st.sampled_from([DIGEST, "0" * 64, "acme", "ask,ingest", "admin", "#", "\x85", "\u2028"]) | st.text(
    max_size=5
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(WORD, max_size=4).map(" ".join), max_size=4).map("\n".join))
def test_file_of_any_lines_gives_no_rights_but_those_that_there_are(tmp_path: Path, text: str) -> None:
    try:
        keys = read_keys(written(tmp_path, text))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert keys.namespaces
        found = keys.find(b"a key")
        assert found is None or found.rights <= RIGHTS


# -- where a server is to listen, before it starts ------------------------------------------------------

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
