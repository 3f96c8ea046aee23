"""What a file is, its content says; whatever is in it, it ends in text or in a reason."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import re
import site
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.index.formats import HEAD_BYTES, READERS, find_reader, read, read_text
from blendrag.index.text import Content, Unusable
from office_files import archive, docx, epub, pdf, png, pptx, xlsx

READ = sorted(set(READERS.values()), key=lambda reader: reader.__name__)


def content(data: bytes, suffix: str) -> Content:
    reader = find_reader(suffix, data[:HEAD_BYTES])
    assert reader is not None
    return read(reader, data)


# -- Markdown and text -------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\b"), min_size=1))
@example("---\ntitle: Travel\n---\n1. close\n2. drain\n")
@example("Put <script> first, <!-- and List<String> next: [form](forms/b7.pdf) ![crane, 40 t](c.png)\n")
@example("```diff\n-a \n+ b\n\n one\n```\n" + "> " * 30 + "deep\n")
def test_markdown_is_its_source(source: str) -> None:
    assert content(source.encode("utf-8-sig"), ".md").text == source


def test_picture_in_letters_is_left_out_of_markdown_and_json() -> None:
    letters = b"data:image/png;base64," + b"iVBORw0KGgo+/" * 100
    data = b"![][image1] ![crane](%s)\n\n[image1]: <%s>\n" % (letters, letters)
    assert content(data, ".md").text == "![][image1] ![crane]()\n\n[image1]: <>\n"
    for before, behind in ((b'<img src="', b'" alt="x">'), (b"[a]: ", b"\n\nNext"), (b"![a](<", b">)")):
        for picture in (letters, b"DATA:image/png;charset=x;base64," + b"A" * 76 + b"\n" + b"A" * 76):
            kept = content(before + picture + behind, ".md").text
            assert kept == (before + behind).decode()
    for behind in ("\n" + "=" * 70, "\n" + "\u9577" * 70):
        assert content(b"[a]: " + letters + behind.encode(), ".md").text == f"[a]: {behind}"
    said = content(rb'{"url":"%s","at":"\/"}' % letters.replace(b"/", rb"\/"), ".json").text
    assert json.loads(said) == {"url": "", "at": "/"}
    style = b"```css\ncrane { background: url(%s) }\n```" % letters
    assert content(style, ".md").text == style.decode()


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".properties"])
def test_letters_that_are_written_as_numbers_are_found(suffix: str) -> None:
    assert content(rb'"\ud8zz\u0041"', suffix).text == r'"\ud8zzA"', "half a letter is left as it is"
    data = rb'{"city": "M\u00fcnchen \u4e2d\u6587 \ud83d\ude00", "rest": "\\u00fc \u0022 \ud83d"}'
    text = content(data, suffix).text
    assert text == r'{"city": "München 中文 😀", "rest": "\\u00fc \u0022 \ud83d"}'
    assert json.loads(text) == json.loads(data)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_signs_that_json_writes_in_other_ways_are_found(suffix: str) -> None:
    data = rb'{"at": "https:\/\/a.test\/b", "who": "AT\u0026T\u0027s \u003cb\u003e", "rest": "\\/ \u0022"}'
    text = content(data, suffix).text
    assert text == r"""{"at": "https://a.test/b", "who": "AT&T's <b>", "rest": "\\/ \u0022"}"""
    assert json.loads(text) == json.loads(data)


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_word_that_yaml_escapes_and_folds_is_whole(suffix: str) -> None:
    data = rb"""city: "M\xFCnchen \u4e2d\U0001F600 Gr\xF6\
  \xDFe\
  \ 20\_EUR: \"\xE4\"\n"
rest: ["\\\\xFC \x41\x22\x85\L\u2028", 5" \xFC, \d+\xFC]
"k\xE9y": !!str "\xE9"
""".replace(rb"\\\\", rb"\\")
    text = content(data, suffix).text
    assert text == (
        'city: "M\u00fcnchen \u4e2d\U0001f600 Gr\u00f6\u00dfe 20\xa0EUR: \\"\u00e4\\"\\n"\n'
        r'rest: ["\\xFC A\x22\x85\L\u2028", 5" \xFC, \d+\xFC]'
        '\n"k\u00e9y": !!str "\u00e9"\n'
    )


@pytest.mark.parametrize(
    "data",
    [
        b'sep: ", "\npath: ^\\/api\\/v1\\_x\nname: "b"\n',
        b'doc: |\n  Use "snake\\_case" or "C:\\x86\\_new" here\n',
        b'# say "a\\_b"\nx: 1\n',
        b"re: 'match \"a\\/b\\_c\\ d\"'\nsep: ', \" '\nat: '\\x41'\n",
    ],
)
def test_yaml_outside_double_quotes_is_its_source(data: bytes) -> None:
    assert content(data, ".yaml").text == data.decode()


def test_yaml_in_which_no_letter_is_escaped_takes_no_time() -> None:
    begin = time.process_time()
    assert content(b"[" * 50_000, ".yaml").text == "[" * 50_000
    assert time.process_time() - begin < 1


@given(st.recursive(st.text(), lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=6))
def test_yaml_means_what_it_meant(value: object) -> None:
    assert yaml.safe_load(content(yaml.safe_dump(value).encode(), ".yaml").text) == value


PROLOG = b"<?xml version='1.0'?>"


@pytest.mark.parametrize(
    ("suffix", "prolog"), [(".xml", b""), (".txt", PROLOG), (".xls", PROLOG), (".tla", PROLOG)]
)
def test_letters_that_xml_writes_as_numbers_are_found(suffix: str, prolog: bytes) -> None:
    data = prolog + b"<city code='&#38;&#x3c;'>M&#252;nchen &#x4E2D; &#55296;</city>"
    text = "<city code='&#38;&#x3c;'>M\u00fcnchen \u4e2d &#55296;</city>"
    assert content(data, suffix).text == prolog.decode() + text


@pytest.mark.parametrize("suffix", [".ics", ".vcs", ".vcf"])
def test_word_and_letter_that_a_folded_line_parts_are_whole(suffix: str) -> None:
    data = b"SUMMARY:Quarterly meet\r\n ing in the caf\xc3\r\n\t\xa9\r\nLOCATION:Bergen\r\n"
    assert content(data, suffix).text == "SUMMARY:Quarterly meeting in the caf\u00e9\nLOCATION:Bergen\n"


def test_blank_at_which_a_vcalendar_is_folded_stays() -> None:
    data = b"BEGIN:VCALENDAR\r\nVERSION:1.0\r\nSUMMARY:Quarterly\r\n meeting\r\n"
    assert content(data, ".vcs").text.splitlines()[-1] == "SUMMARY:Quarterly meeting"


def test_contact_of_old_programs_is_read_without_its_photo() -> None:
    data = b"N;ENCODING=QUOTED-PRINTABLE:M=C3=BCller\r\n"
    data += b"NOTE;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:one =\r\n two\r\n"
    data += b"PHOTO;ENCODING=b;TYPE=JPEG:" + b"\r\n ".join([b"A" * 70] * 50) + b"\r\nEND:VCARD\r\n"
    said = content(data, ".vcf").text.split("\n")
    assert [line.partition(":")[2] for line in said] == ["M\u00fcller", "one  two", "", "VCARD", ""]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"CHARSET=ISO-8859-1;ENCODING=QUOTED-PRINTABLE:M=FCller", "M\u00fcller"),
        (b"QUOTED-PRINTABLE;CHARSET=Shift_JIS:=93=FA=96{", "\u65e5\u672c"),
        (b"ENCODING=QUOTED-PRINTABLE:first line=0D=0A second line", "first line\n second line"),
        (b"ENCODING=QUOTED-PRINTABLE:caf=C\r\n 3=\r\n=A9 =3D=\n x", "caf\u00e9 = x"),
        (b"CHARSET=none;ENCODING=QUOTED-PRINTABLE:M=C3=BC=00ller=01", "M\u00fcller"),
        (b"VALUE=URI:https://a.test/?x=\r\n 3", "https://a.test/?x=3"),
    ],
)
def test_value_of_a_contact_is_decoded_as_it_declares_and_keeps_its_lines(written: bytes, text: str) -> None:
    name = "FN:J\u00f6rg\r\n".encode()
    said = content(name + b"NOTE;" + written + b"\r\n" + name, ".vcf").text
    assert said.partition(";")[2].partition(":")[2] == f"{text}\nFN:J\u00f6rg\n"


@given(st.text())
def test_json_means_the_same_with_its_letters(text: str) -> None:
    assert json.loads(content(json.dumps([text]).encode(), ".json").text) == [text]


FENCE = re.compile(r"^(```+|~~~+)[^\n]*\n.*?^\1[ ]*$", re.MULTILINE | re.DOTALL)


def markdown_of_installed_packages() -> Iterator[bytes]:
    for folder in site.getsitepackages():
        yield from (path.read_bytes() for path in Path(folder).rglob("*.md"))
    for package in distributions():
        if "markdown" in package.metadata.get("Description-Content-Type", ""):
            yield str(package.metadata.get_payload() or package.metadata["Description"]).encode()


def test_markdown_of_installed_packages_is_kept_with_its_code_byte_for_byte() -> None:
    files = [data for data in markdown_of_installed_packages() if data]
    fences = 0
    for data in files:
        source = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        text = content(data, ".md").text
        assert text == source
        fences += len(FENCE.findall(text))
    assert len(files) > 200 and fences > 500


# -- which reader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".txt", ".md", ".pdf", ".html", ".docx", ".png", ".PDF", ".bak"])
def test_content_and_not_the_suffix_decides(suffix: str) -> None:
    assert content(pdf("The crane lifts 40 t."), suffix).text == "The crane lifts 40 t."
    assert "drain" in content(docx(), suffix).text
    assert "drain" in content(pptx(), suffix).text
    assert "crane" in content(xlsx(), suffix).text
    assert "second" in content(epub(), suffix).text


def test_text_that_mentions_or_holds_another_format_is_text() -> None:
    page = b"<!doctype html><p>x</p>"
    for suffix in (".txt", ".md", ".xml", ".py"):
        assert content(page, suffix).text == page.decode()
    for suffix in ("", ".html", ".shtml", ".xls", ".jsp", ".j2", ".http"):  # other programs save tables so
        assert content(page, suffix).text == "x"
    table = b"<table><tr><td>x</table>\n\n- a\n- b\n"
    assert content(table, "").text == table.decode(), "a README, perhaps"
    assert content(b"<table><tr><td>x</table>", ".xls").text == "| x |\n| --- |"
    for before in (b"<?xml version='1.0'?>\n", b"<!-- saved from url -->\r\n<!-- x -->"):
        assert content(before + page, ".aspx").text == "x"
    about = b"A PDF begins with %PDF-1.7, a ZIP archive with PK.\n"
    assert content(about, ".md").text == about.decode()


@pytest.mark.parametrize("suffix", [".1", ".2026-05-01", ". May", ".2 and later", ".xls", ".doc"])
def test_text_whose_name_does_not_say_what_it_is_is_text(suffix: str) -> None:
    assert content(b"Crane;t\nA;40\n", suffix).text == "Crane;t\nA;40\n"


def test_unknown_suffix_without_a_known_beginning_has_no_reader() -> None:
    assert find_reader(".svg", b"<?xml version='1.0'?><svg>") is None, "a picture"
    assert find_reader(".png", b"\x89PNG") is None
    assert find_reader(".tla", b"text") is None
    assert find_reader(".7z", b"7z") is None
    assert find_reader(".tla", b"text", read_text) is read_text


@pytest.mark.parametrize(
    ("data", "suffix", "reason"),
    [
        (b"Subject: x\nContent-Transfer-Encoding: quoted-printable\n\ncaf=C3=A9", ".eml", "mail"),
        (b'{"cells": [{"cell_type": "markdown", "source": ["# Fees"]}]}', ".ipynb", "nbconvert"),
        *((b"no such thing", suffix, "broken") for suffix in (".docx", ".pptx", ".xlsx", ".epub", ".pdf")),
    ],
)
def test_what_a_suffix_says_and_nobody_reads_is_refused_with_a_reason(
    data: bytes, suffix: str, reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        content(data, suffix)


HEADERS = b"From: <Saved by Blink>\r\nReceived: from a\r\n\tby b\r\n" + 200 * b"X-A: b\r\n"
HEADERS += b"%s\r\nMIME-Version: 1.0\r\n%s\r\n\r\n<p>caf=C3=A9"


@pytest.mark.parametrize("suffix", ["", ".txt", ".html", ".doc"])
@pytest.mark.parametrize(
    "encoded",
    [
        b"Content-Type: multipart/related;\r\n\tboundary=x",
        b"content-type:\r\n multipart/mixed",
        b"Content-Transfer-Encoding: quoted-printable",
        b"Content-Transfer-Encoding: BASE64",
    ],
)
def test_mail_in_parts_or_encoded_is_refused_under_any_name(encoded: bytes, suffix: str) -> None:
    for mail in (HEADERS % (encoded, b"X-B: c"), HEADERS % (b"X-B: c", encoded)):
        with pytest.raises(Unusable, match="mail"):
            content(mail, suffix)


@pytest.mark.parametrize("suffix", ["", ".txt", ".md", ".patch", ".diff"])
def test_mail_or_patch_that_is_text_as_it_is_is_read(suffix: str) -> None:
    mail = b"From: Anna\nSubject: [PATCH] Crane\nMIME-Version: 1.0\nContent-Type: text/plain\n\nIt lifts.\n"
    commit = b"From %s Mon Sep 17 00:00:00 2001\n" % (b"0a" * 20)
    attached = commit + mail.replace(b"text/plain", b"multipart/mixed")
    for text in (mail, commit + mail, attached):
        assert content(text, suffix).text == text.decode()


def test_text_about_mail_is_text() -> None:
    for about in (b"Headers:\n\nMIME-Version: 1.0\n", b"A mail has\nMIME-Version: 1.0\n"):
        assert content(about, ".txt").text == about.decode()


@pytest.mark.parametrize("suffix", [".txt", ".md", ".doc", ".docx", ".html", ""])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "save it without a password in a newer format"),
        (rb"{\rtf1\ansi text}", "RTF"),
        (archive({"a.txt": "text"}), "ZIP archive that is neither"),
        (gzip.compress(b"text"), "binary|broken"),
        (bz2.compress(b"text" * 100), "binary|broken"),
        (lzma.compress(b"text"), "binary|broken"),
        (png(), "binary|broken"),
        (b"SQLite format 3\0" + bytes(100), "binary|broken"),
        (pickle.dumps({"text": "text"}), "binary|broken"),
    ],
    ids=["OLE", "RTF", "ZIP", "gzip", "bzip2", "xz", "PNG", "SQLite", "pickle"],  # some hold the time
)
def test_what_is_no_text_is_refused_with_a_reason_under_any_suffix(
    data: bytes, reason: str, suffix: str
) -> None:
    reader = find_reader(suffix, data, read_text)
    assert reader is not None
    with pytest.raises(Unusable, match=reason):
        read(reader, data)


# -- any bytes ---------------------------------------------------------------------------------------------


@example(b"<![\xc7")
@example(b"<p>" * 20_000)
@example(b"%PDF-1.4 and then nothing")
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_unusable(data: bytes) -> None:
    for reader in READ:
        with suppress(Unusable):
            read(reader, data).text.encode("utf-8", "surrogatepass")


SAMPLES = {
    ".docx": docx(),
    ".pptx": pptx(),
    ".xlsx": xlsx(),
    ".epub": epub(),
    ".pdf": pdf("The crane lifts."),
}


@pytest.mark.parametrize("suffix", SAMPLES)
@given(st.data())
def test_no_damage_to_a_document_raises_anything_but_unusable(suffix: str, data: st.DataObject) -> None:
    damaged = bytearray(SAMPLES[suffix])
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=5)):
        damaged[place] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    with suppress(Unusable):
        content(bytes(damaged), suffix)
