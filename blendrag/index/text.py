"""Text from bytes: what a reader of a file's format gives back, and the decoding that several share."""

from __future__ import annotations

import codecs
import contextlib
import re
from dataclasses import dataclass, field
from unicodedata import category

from blendrag.errors import needs


class Unusable(Exception):
    """A file cannot be used; the message says why. It becomes ``Skipped`` or ``SourceError``."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content that a reader found: the text, and what it knows about the file (JSON-able)."""

    text: str
    metadata: dict[str, str | int] = field(default_factory=dict)


# The UTF-32 marks come first: the UTF-16 mark is a prefix of the little-endian one.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 1 << 16
_BROKEN = "\ufffd"
# A broken letter directly beside another one that is not ASCII, as in text of another encoding.
_AMONG_OTHERS = re.compile(rf"{_BROKEN}[^\0-\x7f]|[^\0-\x7f]{_BROKEN}")
# In XML, in the first two lines of source code, in the heading of gettext's catalogues.
_DECLARED = re.compile(
    rb"""\s*<\?xml\b[^<>]*?\bencoding\s*=\s*["']([\w.:-]+)"""
    rb"""|(?:[^\n]*\n)?[ \t]*(?:#|%|;|/\*|//|\*|--)[^\n]{0,100}?\b(?:file)?(?:en)?coding[:=]\s*([\w.-]+)"""
    rb"""(?=[ \t]*(?:[;:*\r\n]|-\*-|$))"""
    rb"""|[\s\S]{0,4000}?"Content-Type:[^\n]{0,100}?\bcharset=([\w.:-]+)\\n\""""
)
# Declared of what is none. What ISO 2022 and HZ write is ASCII.
_NOT_TAKEN = re.compile(
    r"utf|unicode|(us-)?ascii|x-user|(cs)?iso.?2022|hz|replacement|undefined", re.IGNORECASE
)
CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b")) + b"\x7f"


def decode(data: bytes, declared: str = "") -> str:
    """Decode by byte-order mark, else as 16-bit text, ISO-2022-JP or UTF-8, else as declared, else as a
    sample looks.

    Line ends become ``\\n``. Raises Unusable for what is not text.
    """
    return re.sub(r"\r\n?", "\n", _decode(data, declared))


def _decode(data: bytes, declared: str) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    used = data.rstrip(b"\0")  # zeros at the end may fill a block
    if b"\0" in used or 2 * len(used) < len(data) or (used != data and not _is_utf_8(used)):
        return _decode_16_bit(data)
    data = _UNSEEN.sub(b"", used) if b"\b" in used or b"\x1b[" in used else used
    if len(data.translate(None, CONTROL)) < 0.95 * len(data):
        raise Unusable("binary file")
    if b"\x1b$" in data:
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode("iso2022_jp_2")
    text = _HALVES.sub(_joined, data).decode("utf-8", errors="replace")
    broken = text.count(_BROKEN) - data.count(_BROKEN.encode())
    whole = len(text) - len(text.encode("ascii", "ignore")) - broken
    if broken < whole or (broken == whole and not _AMONG_OTHERS.search(text)):
        return text  # cut, or put together with another: what is broken costs no other word
    if not declared and (found := _DECLARED.match(data)):
        declared = str(found[found.lastindex or 0], "ascii")
    if declared and not _NOT_TAKEN.match(declared):
        with contextlib.suppress(LookupError, UnicodeError):
            return data.decode(_encoding(declared), errors="replace")
    return data.decode(_detected(_ASCII.sub(b"\n", data)[:_SAMPLE]), errors="replace")


# A letter under itself or above a line, as "man" writes bold and underlined ones; colours of a terminal.
_UNSEEN = re.compile(rb"([!-~]|[\xc2-\xf4][\x80-\xbf]{1,3})\x08(?=\1)|_\x08|\x1b\[[\d;:]*[mK]")


def _is_utf_8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# Of a letter beyond 16 bits, as Java and MySQL may write it (CESU-8), or one alone where it is cut.
_HALVES = re.compile(rb"(?:\xed[\xa0-\xbf][\x80-\xbf])+")


def _joined(halves: re.Match[bytes]) -> bytes:
    pairs = halves[0].decode("utf-8", "surrogatepass").encode("utf-16-le", "surrogatepass")
    return pairs.decode("utf-16-le", "replace").encode()


def _encoding(declared: str) -> str:
    """Return the encoding that browsers take this name for, which is often a larger one, or the name that
    Python has for it; else Python's."""
    with needs("blendrag[index]"):
        import turbohtml.detect  # registers these encodings
    for name_of in (str, lambda name: codecs.lookup(name).name):
        with contextlib.suppress(LookupError):
            return f"whatwg-{turbohtml.parse(b'', encoding=name_of(declared)).encoding}"
    return declared


def _decode_16_bit(data: bytes) -> str:
    """Decode text of two bytes a character without a mark. In most characters of western text the one is
    zero, and in no text the other; other texts have letters and signs only."""
    for encoding, high in (("utf-16-le", 1), ("utf-16-be", 0)):
        if data[1 - high :: 2].count(0) == 0:
            with contextlib.suppress(UnicodeDecodeError):
                text = data.decode(encoding)
                if 2 * data[high::2].count(0) > len(data) // 2:
                    plain = text.encode("latin-1", "ignore").translate(None, CONTROL)
                    if len(plain) > 0.95 * len(text) / 2:
                        return text
                if len(text) > _CERTAIN and not _PLAIN.fullmatch(data) and all(map(_is_of_text, set(text))):
                    return text
    raise Unusable(f"binary file (a zero byte at {data.index(0):,})")


_CERTAIN = 15  # so many characters are no letters by chance
_PLAIN = re.compile(rb"[\t\n\r\0 -~]*")  # every two of them, but zeros, are a Chinese letter, too


def _is_of_text(sign: str) -> bool:
    return sign in "\t\n\f\r" or category(sign) not in ("Cc", "Cn", "Co", "Cs")


def _detected(sample: bytes) -> str:
    """Return the encoding that the letters look like: the likeliest, or another that is not much less likely
    and the usual one of the language. What a page declares is left to the caller, and signs apart from
    letters (£30, 20 °C) tell nothing."""
    with needs("blendrag[index]"):
        from turbohtml.detect import detect_all, detect_language
    ranked = detect_all(_LONE_SIGN.sub(b" ", sample.replace(b"<", b" ")))
    language = detect_language(sample.decode(ranked[0].codec or "cp1252", "replace")).language or "?"
    least = _CLOSE * ranked[0].confidence
    usual = (one for one in ranked if language in _USUAL.get(one.encoding or "", ""))
    found = next((one for one in usual if one.confidence > least), ranked[0])
    western = found.codec or "cp1252"
    if found.encoding not in ("windows-1252", None):
        return western
    if _EURO.search(sample) and not _BEYOND_LATIN.search(sample):
        return "iso8859_15"
    words = {word for word in _WORD.findall(sample) if not word.isascii() and word.translate(None, _HIGH)}
    odd = {
        encoding: sum(_is_odd(word.decode(encoding, "replace"), between) for word in words)
        for encoding, between in {western: _BETWEEN, **dict.fromkeys(_OTHERS, _BETWEEN_OTHERS)}.items()
    }
    certain = _UNUSED.search(sample) or odd[western] > max(1, len(words) // 2)
    return min(odd, key=odd.__getitem__) if certain else western


def _is_odd(word: str, between: re.Pattern[str]) -> bool:
    """Return whether signs or capitals stand within a word, as those of another encoding do."""
    return not all(
        part.isascii() or (part.isalpha() and (part.islower() or part.isupper() or part.istitle()))
        for part in (part.lstrip(_BEFORE).rstrip(_BEHIND) for part in between.split(word))
    )


_CENTRAL = "ces hrv hun pol ron slk slv"
_USUAL = {  # languages by encoding
    "windows-1250": _CENTRAL,
    "ISO-8859-2": _CENTRAL,
    "windows-1252": "afr cat dan deu est fin fra isl ita nld nob por spa swe",
    "windows-1254": "aze tur",
    "windows-1257": "est lav lit",
    "windows-1258": "vie",
}
_CLOSE = 0.5  # of the likeliest one's confidence
_EURO = re.compile(rb"\d ?\xa4|\xa4 ?\d")
_BEYOND_LATIN, _UNUSED = re.compile(rb"[\x80-\x9f]"), re.compile(rb"[\x81\x8d\x8f\x90\x9d]")  # in cp1252
_OTHERS = ("mac_roman", "cp850", "cp852")  # Excel on a Mac, DOS
_HIGH = bytes(range(128, 256))
_WORD = re.compile(rb"[A-Za-z\x80-\xff]+")
# Signs that part words, and capitals that begin one within a name. Where the others have them, most of these
# are letters of western text.
_BETWEEN = re.compile("[‘’“”–—…·×÷±²³¹´®\xa0\xad]|(?=[ÀÁÂÄÅÇÈÉÊËÍÖØÙÚÜ][a-zß-ÿ])")
_BETWEEN_OTHERS = re.compile("[’–—]")
_BEFORE = "‘“„‚«»‹›¿¡©°ºª•µ€£¢¤¥§¶†‡¼½¾"
_BEHIND = "’”…«»‹›®™©°²³¹ªº€£¢¤¥§¶†‡¼½¾"
# It says nothing, however much of it stands between letters, but for the words that these are in.
_ASCII = re.compile(rb"(?<=[\0-\x7f]{32})[\0-\x7f]{64,}(?=[\0-\x7f]{32})")
_LONE_SIGN = re.compile(rb"(?<![A-Za-z\x80-\xff])[\xa1-\xbf](?![\x80-\xff])")
