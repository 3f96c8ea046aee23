"""import of archives that are damaged, or made to harm: refused, and nothing is written anywhere."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sqlite3
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archives import SEGMENT, around, contents, exported, filled, make_tar, with_manifest
from blendrag.errors import ArchiveError, StoreError, StoreFullError
from blendrag.store import sqlite
from blendrag.store.maintenance.archive import Header, belongs, import_archive
from stores import IDENTITY, make_chunk, register


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "index")


def refused(tmp_path: Path, file: Path, match: str | None = None) -> None:
    """The archive is called what it is, and nothing is left of it anywhere."""
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    with pytest.raises(ArchiveError, match=match):
        import_archive(file, outside / "copy")
    assert around(outside) == set()


def test_index_larger_than_the_disk_is_refused_before_it_is_written(tmp_path: Path) -> None:
    header = Header("1", IDENTITY, None, True, 1, 1 << 62)
    with pytest.raises(StoreFullError, match="MiB free"):
        import_archive(make_tar(tmp_path, [("blendrag.json", header.encode())]), tmp_path / "copy")
    assert around(tmp_path) == {"bad.tar"}


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../evil", "kv/../../evil", "kv/ab/../../../evil", "./catalogue.sqlite", "lock",
        "kv/ab/evil.safetensors", f"kv/ab/cd{'0' * 30}.safetensors", f"kv/ab/ab{'0' * 30}.safetensors/x",
        f"kv/ab/ab{'0' * 30}.safetensors\n", "catalogue.sqlite-wal", "kv/tmp/x", "kv/quarantine/x",
        "chroma/x.py", f"{SEGMENT}/../../x.bin", f"{SEGMENT}/x.so", "Catalogue.sqlite", "", "kv\\ab\\x",
    ],
)  # fmt: skip
def test_name_that_no_index_has_is_refused(tmp_path: Path, name: str) -> None:
    assert not belongs(name)
    refused(tmp_path, make_tar(tmp_path, with_manifest([(name, b"evil")])), "no index has|no regular file")


@given(st.text(alphabet="/.\\abk v0123\0\n~$", max_size=60) | st.text(max_size=20))
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    if belongs(name):
        assert os.path.normpath(name) == name and not os.path.isabs(name) and ".." not in name


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
        tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, b"Z",
    ],
)  # fmt: skip
def test_members_that_are_no_files_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, "/etc/passwd"

    header = Header("1", IDENTITY, None, True, 1, 0).encode()
    files = [("blendrag.json", header), ("catalogue.sqlite", b"")]
    refused(tmp_path, make_tar(tmp_path, files, change), "no regular file")


def test_file_twice_is_refused(tmp_path: Path) -> None:
    files = with_manifest([("ledger.sqlite", b"one"), ("ledger.sqlite", b"two")])
    refused(tmp_path, make_tar(tmp_path, files), "twice")


def test_size_that_lies_is_found_before_anything_is_allocated(tmp_path: Path) -> None:
    for files in ([("blendrag.json", b"{}")], with_manifest([("ledger.sqlite", b"x" * 2000)])[:-1]):
        path = tmp_path / "bad.tar"
        with path.open("wb") as archive:
            for number, (name, data) in enumerate(files, 1):
                info = tarfile.TarInfo(name)
                info.size = len(data) if number < len(files) else 1 << 60
                archive.write(info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512))
        refused(tmp_path, path, "cut off|no export")


def header_with(**changes: object) -> bytes:
    return json.dumps(json.loads(Header("1", IDENTITY, None, True, 0, 0).encode()) | changes).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{}", b"[]", b"null", b'"format"', b"{" * 5000, b'{"format": 2}', b'{"format": 1}', b"\xff\xfe",
        header_with(identity={}), header_with(nbytes=-1), header_with(nbytes=1e400), header_with(surprise=1),
    ],
)  # fmt: skip
def test_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    refused(tmp_path, make_tar(tmp_path, [("blendrag.json", header)]))


def test_tar_file_of_something_else_is_called_so(tmp_path: Path) -> None:
    refused(tmp_path, make_tar(tmp_path, [("holiday.jpg", b"...")]), "blendrag export makes them")
    for data in (b"", b"PK\x03\x04" + bytes(3000), os.urandom(5000), bytes(5000)):
        (tmp_path / "bad.tar").write_bytes(data)
        refused(tmp_path, tmp_path / "bad.tar")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
        archive.add(__file__, "blendrag.json")
    refused(tmp_path, tmp_path / "bad.tar.gz")
    with pytest.raises(StoreError, match="No such file"):
        import_archive(tmp_path / "none.tar", tmp_path / "copy")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    root = filled(folder / "index")
    (root / SEGMENT / "data_level0.bin").write_bytes(b"vectors" * 100)  # so that bits fall elsewhere as well
    return exported(root, folder / "index.tar")


@given(st.data())
def test_flipped_bit_anywhere_in_an_archive_is_found(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Or changes nothing: a tar header has fields that nobody reads."""
    whole = archive.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    harmed = bytearray(whole)
    harmed[at] ^= 1 << data.draw(st.integers(0, 7))
    survives_or_is_refused(tmp_path_factory.mktemp("flip"), bytes(harmed), whole)


@given(st.data())
def test_archive_that_is_cut_off_anywhere_is_refused(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = archive.read_bytes()
    end = len(whole.rstrip(b"\0"))  # what ends a tar file may go, and blanks after the manifest
    (folder / "bad.tar").write_bytes(whole[: data.draw(st.integers(0, end - 1))])
    refused(folder, folder / "bad.tar")


def survives_or_is_refused(folder: Path, harmed: bytes, archive: bytes) -> None:
    (folder / "bad.tar").write_bytes(harmed)
    try:
        import_archive(folder / "bad.tar", folder / "copy")
    except (ArchiveError, StoreFullError):
        assert around(folder) == {"bad.tar"}
    else:
        assert contents(harmed) == contents(archive)
    finally:
        shutil.rmtree(folder / "copy", ignore_errors=True)


# -- files that would do something ----------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch evil",)


def test_pickle_that_would_run_code_is_refused(root: Path, tmp_path: Path) -> None:
    (root / SEGMENT / "index_metadata.pickle").write_bytes(pickle.dumps({"a": Evil()}))
    refused(tmp_path, exported(root, tmp_path / "bad.tar"), "run code")
    (root / SEGMENT / "index_metadata.pickle").write_bytes(b"\x80\x04garbage")
    refused(tmp_path, exported(root, tmp_path / "worse.tar"), "damaged|run code")


@pytest.mark.parametrize("name", ["catalogue.sqlite", "ledger.sqlite", "chroma/chroma.sqlite3"])
def test_database_that_would_do_something_by_itself_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    with sqlite3.connect(root / name) as db:
        table = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchone()[0]
        db.execute(f"CREATE TRIGGER evil AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END")
    db.close()
    refused(tmp_path, exported(root, tmp_path / "bad.tar"), "trigger")


def test_catalogue_of_another_identity_than_the_header_says_is_refused(root: Path, tmp_path: Path) -> None:
    files = contents(exported(root, tmp_path / "index.tar").read_bytes())
    header = Header("1", replace(IDENTITY, weights="weights-2"), "bfloat16", True, 7, 0)
    refused(tmp_path, make_tar(tmp_path, with_manifest(files[1:-1], header)), "not that of its catalogue")


def test_archive_without_a_catalogue_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, make_tar(tmp_path, with_manifest([("ledger.sqlite", b"")])), "catalogue")


def test_damaged_database_is_refused_even_if_its_checksum_is_right(root: Path, tmp_path: Path) -> None:
    register(root, [make_chunk(seed) for seed in range(100, 400)], owner="more")
    sqlite.compact(root / "catalogue.sqlite")
    data = bytearray((root / "catalogue.sqlite").read_bytes())
    data[8192:8292] = b"\xff" * 100
    refused(tmp_path, make_tar(tmp_path, with_manifest([("catalogue.sqlite", bytes(data))])), "catalogue")
