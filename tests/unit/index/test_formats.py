from __future__ import annotations

import io
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.index.formats import (
    READERS,
    Content,
    Unusable,
    decode,
    read_html,
    read_markdown,
    read_pdf,
    reader,
)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("déjà vu, café au lait, crème brûlée", "latin-1"),
        ("Über die Straße läuft ein größerer Bär. " * 5, "latin-1"),
        ("“smart” quotes – here’s one", "cp1252"),
        ("Привет, как дела сегодня?", "cp1251"),
        ("naïve 漢字 🧑‍🚀", "utf-8"),
        ("naïve 漢字", "utf-8-sig"),
        ("naïve 漢字", "utf-16"),
        ("naïve 漢字", "utf-32"),
    ],
)
def test_no_encoding_garbles_the_text(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)) == text


def test_line_ends_do_not_make_two_texts_of_one() -> None:
    assert decode(b"a\r\nb\rc\n") == "a\nb\nc\n"


@example(b"<![\xc7")
@example(b"<p>" * 20_000)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_unusable(data: bytes) -> None:
    for read in set(READERS.values()):
        with suppress(Unusable):
            read(data).text.encode()


def test_markdown_front_matter_and_code_are_kept() -> None:
    text = read_markdown(
        b"---\ntitle: Travel\n---\n# Who\n- *lead*\n\n```\ndef f():\n    return 1\n```\n"
    ).text
    for line in ("title: Travel", "# Who", "- lead", "def f():\n    return 1"):
        assert line in text
    assert "*" not in text


def test_scripts_and_navigation_of_a_page_are_dropped() -> None:
    page = b"<title>T</title><nav>menu</nav><script>x()</script><h1>Hi</h1><p>one\n two<br>three</p>"
    assert read_html(page) == Content("# T\n\n# Hi\n\none two\nthree", {"title": "T"})


def test_cells_of_a_table_do_not_run_together() -> None:
    assert "a | b" in read_html(b"<table><tr><td>a</td><td>b</td></tr></table>").text


def test_scan_without_text_is_refused() -> None:
    from pypdf import PdfWriter

    file = io.BytesIO()
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(file)
    with pytest.raises(Unusable, match="without text"):
        read_pdf(file.getvalue())


def test_misspelt_suffix_is_refused_at_registration() -> None:
    with pytest.raises(ConfigError):
        reader("TXT")(READERS[".txt"])
