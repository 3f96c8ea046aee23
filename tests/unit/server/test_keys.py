"""The file of a server's keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendrag.errors import ConfigError
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
