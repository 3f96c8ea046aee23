"""Numbers, dates and spans of time as documents of Office show them."""

from __future__ import annotations

import functools
import re
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

_LONGEST_FORMAT = 255  # that Excel takes
_LATIN, _CYRILLIC = "abcdefghijklmnopqrstuvwxyz", "абвгдежзиклмнопрстуфхцчшщыэюя"
_LETTERS = {"lowerLetter": _LATIN, "upperLetter": _LATIN.upper(), "russianLower": _CYRILLIC,
            "russianUpper": _CYRILLIC.upper()}  # fmt: skip
_HAN = "零一二三四五六七八九"
_COUNTED = ("chineseCounting", "chineseCountingThousand", "japaneseCounting", "taiwaneseCountingThousand")
_DIGITS = {"decimalFullWidth": "０１２３４５６７８９", "ideographDigital": "〇一二三四五六七八九",
           "thaiNumbers": "๐๑๒๓๔๕๖๗๘๙", "hindiNumbers": "०१२३४५६७८९"}  # fmt: skip
_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix",
          5: "v", 4: "iv", 1: "i"}  # fmt: skip


def in_format(number: float, format: str, *, since_1904: bool) -> str:
    """Return a number as a format of Excel's shows it, which may make a date of it."""
    from openpyxl.styles.numbers import is_date_format, is_timedelta_format
    from openpyxl.utils.datetime import MAC_EPOCH, WINDOWS_EPOCH, from_excel

    if not is_date_format(format):
        return written(number, format)
    begin = MAC_EPOCH if since_1904 else WINDOWS_EPOCH
    return written(from_excel(number, begin, timedelta=is_timedelta_format(format)), format)


def written(value: Any, format: str) -> str:
    """Return a value as text, a number with the signs, units and zeros that its format shows."""
    match value:
        case bool(value):
            return str(value).upper()
        case datetime() as value if value.time() == datetime.min.time():
            return str(value.date())
        case timedelta() as value:
            seconds, thousandths = divmod(round(abs(value.total_seconds()) * 1000), 1000)
            whole = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            return f"{'-' * (value < timedelta())}{whole}" + f".{thousandths:03}".rstrip("0.")
        case int() | float() as value:
            return _shown(value, format[:_LONGEST_FORMAT])
        case value:
            return str(value)


def _shown(number: float, format: str) -> str:
    """Return a number with the digits that Excel keeps, and the signs, units and zeros that it shows."""
    sections = _parts_of(format)
    shown = sections[min(number < 0, len(sections) - 1)]
    if shown.scale != 1:
        number *= shown.scale
    digits = f"{abs(number):.15g}" if isinstance(number, float) else str(abs(number))
    if "e" in digits and 1e-9 <= abs(number) < 1e21:
        digits = f"{Decimal(digits):f}"
    return f"{'-' * (number < 0)}{shown.before}{digits.zfill(shown.digits)}{shown.behind}"


class _Shown(NamedTuple):
    before: str = ""
    behind: str = ""
    scale: float = 1
    digits: int = 0


# Text in quotes, a sign, a currency; what shows nothing; digits; anything else.
_OF_FORMATS = re.compile(
    r'"([^"]*)"|\\(.)|\[\$([^\]-]*+)[^\]]*+\]|(\[[^\]]*\]|[_*].)'
    r"|(General|[.,]*[0#?][0#?.,]*(?:E[+-]0+)?)|(.)",
    re.S,
)


@functools.lru_cache
def _parts_of(format: str) -> list[_Shown]:
    """Return what each section of a format of Excel's writes around a number."""
    texts, digits, known, scale = ["", ""], "", True, 1.0
    sections: list[_Shown] = []
    for quoted, sign, currency, _, places, other in [*_OF_FORMATS.findall(format), ("",) * 5 + (";",)]:
        if other == ";":
            before, behind = (text.strip("()+-" if sections else "") for text in texts)
            scale /= 1000.0 ** len(re.findall(r",(?=,*(?:\.|$))", digits))
            zeros = len(digits) if digits.strip("0") == "" else 0
            sections.append(_Shown(before, behind, scale, zeros) if digits and known else _Shown())
            texts, digits, known, scale = ["", ""], "", True, 1.0
        elif places:
            known, digits = known and not digits, places
        else:
            scale *= 100 if other == "%" else 1
            texts[bool(digits)] += quoted or sign or currency or other
            known = known and not (other.isalpha() or other == "@")
    return [_Shown()] if re.search(r"\[[<>=]", format) else sections  # which it is, a condition says


def formatted(number: int, kind: str) -> str:
    """Return a number in one of the forms that lists have for it."""
    if (letters := _LETTERS.get(kind)) and number:
        times, letter = divmod(number - 1, len(letters))
        return letters[letter] * min(times + 1, 9)
    if kind in ("lowerRoman", "upperRoman") and number < 10_000:
        written = ""
        for value, sign in _ROMAN.items():
            times, number = divmod(number, value)
            written += sign * times
        return written.upper() if kind == "upperRoman" else written
    if kind in _COUNTED and 0 < number < 10_000:
        units = zip(f"{number:04}", ("千", "百", "十", ""), strict=True)
        words = "".join(_HAN[int(digit)] + unit * (digit != "0") for digit, unit in units)
        if kind.startswith("japanese"):
            return re.sub("零|一(?=[千百十])", "", words)
        return re.sub("^一十", "十", re.sub("零+", "零", words).strip("零"))
    if kind == "decimalEnclosedCircle" and 0 < number <= 20:
        return chr(ord("①") + number - 1)
    if kind in _DIGITS:
        return "".join(_DIGITS[kind][int(digit)] for digit in str(number))
    return "" if kind in ("none", "bullet") else f"{number:02}" if kind == "decimalZero" else str(number)
