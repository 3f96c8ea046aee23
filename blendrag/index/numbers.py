"""Numbers, dates and spans of time as documents of Office show them."""

from __future__ import annotations

import functools
import re
from datetime import datetime, timedelta
from decimal import Decimal
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

_LONGEST_FORMAT = 255  # that Excel takes
# A day of the week, a year of an era.
_OF_EAST_ASIA = re.compile(r"(?:\[[^\]]*\])*(?:aaa|g{0,3}ee?(?![a-z]))")
_CYRILLIC = "абвгдежзиклмнопрстуфхцчшщыэюя"
_KANA = "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン"
_IROHA = "イロハニホヘトチリヌルヲワカヨタレソツネナラムウヰノオクヤマケフコエテアサキユメミシヱヒモセスン"
_LETTERS = {
    "lowerLetter": ascii_lowercase, "upperLetter": ascii_uppercase, "russianLower": _CYRILLIC,
    "russianUpper": _CYRILLIC.upper(), "aiueo": _KANA, "aiueoFullWidth": _KANA, "iroha": _IROHA,
    "irohaFullWidth": _IROHA, "ganada": "가나다라마바사아자차카타파하",
    "chosung": "ㄱㄴㄷㄹㅁㅂㅅㅇㅈㅊㅋㅌㅍㅎ", "ideographTraditional": "甲乙丙丁戊己庚辛壬癸",
    "ideographZodiac": "子丑寅卯辰巳午未申酉戌亥", "arabicAlpha": "أبتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "arabicAbjad": "أبجدهوزحطيكلمنسعفصقرشتثخذضظغ",
    "hebrew2": "אבגדהוזחטיכלמנסעפצקרשת", "thaiLetters": "กขคงจฉชซฌญฎฏฐฑฒณดตถทธนบปผฝพฟภมยรลวศษสหฬอฮ",
}  # fmt: skip
_TENS, _UNITS = " יכלמנסעפצ", " אבגדהוזחט"  # of Hebrew, which writes 15 and 16 in another way
_HAN = "零一二三四五六七八九"
_COUNTED = ("chineseCounting", "chineseCountingThousand", "japaneseCounting", "taiwaneseCounting",
            "taiwaneseCountingThousand")  # fmt: skip
_DIGITS = {"decimalFullWidth": "０１２３４５６７８９", "ideographDigital": "〇一二三四五六七八九",
           "thaiNumbers": "๐๑๒๓๔๕๖๗๘๙", "hindiNumbers": "०१२३४५६७८९"}  # fmt: skip
_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix",
          5: "v", 4: "iv", 1: "i"}  # fmt: skip


def in_format(number: float, format: str, *, since_1904: bool) -> str:
    """Return a number as a format of Excel's shows it, which may make a date of it."""
    if not _is_of_dates(format):
        return written(number, format)
    from openpyxl.styles.numbers import is_timedelta_format
    from openpyxl.utils.datetime import MAC_EPOCH, WINDOWS_EPOCH, from_excel

    begin = MAC_EPOCH if since_1904 else WINDOWS_EPOCH
    try:
        return written(from_excel(number, begin, timedelta=is_timedelta_format(format)), format)
    except (OverflowError, ValueError):  # no date
        return written(number, "General")


@functools.lru_cache
def _is_of_dates(format: str) -> bool:
    from openpyxl.styles.numbers import is_date_format

    return bool(is_date_format(format) or _OF_EAST_ASIA.match(format))


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
        case str(value) if "@" in format:
            texts = [part.texts for part in _parts_of(format[:_LONGEST_FORMAT]) if part.places == _TEXT]
            return value.join(texts[0]) if texts else value
        case value:
            return str(value)


def _shown(number: float, format: str) -> str:
    """Return a number with the digits that Excel keeps, and the signs, units and zeros that it shows."""
    shown = _part_for(number, [part for part in _parts_of(format) if part.places != _TEXT])
    if not shown.places:
        return shown.texts[0].strip()
    if shown.scale != 1:
        number *= shown.scale
    digits = f"{abs(number):.15g}" if isinstance(number, float) else str(abs(number))
    if "e" in digits and 1e-9 <= abs(number) < 1e21:
        digits = f"{Decimal(digits):f}"
    if len(shown.places) > 1 and not digits.isdecimal():
        shown = _Shown()
    digits, (before, *between, text) = digits.zfill(shown.zeros), shown.texts
    for ahead, places in zip(reversed(between), reversed(shown.places), strict=False):
        digits, last = digits[: -len(places)], digits[-len(places) :]
        text = f"{ahead}{last}{text}"
    return f"{'-' * (number < 0)}{before}{digits}{text}"


class _Shown(NamedTuple):
    """A section of a number's format: texts around and between places of digits."""

    texts: tuple[str, ...] = ("", "")
    places: tuple[str, ...] = ("",)
    scale: float = 1
    zeros: int = 0


_TEXT = ("@",)


def _part_for(number: float, parts: list[_Shown]) -> _Shown:
    """Return the section for a number; the first one's digits, where its own hides it or has a dash for zero.
    Words that a format has for all numbers are about them, and tell none."""
    own = parts[2:3] if number == 0 else parts[1:2] if number < 0 else []
    of_words = (own or parts[:1]) if len(parts) > 1 else []
    for part in own + parts[:1]:
        says = part in of_words and _SAYS.fullmatch(part.texts[0])
        if part.zeros or (part.places and (number or part is parts[0])) or says:
            return part
    return _Shown()


# Text in quotes, a sign, a currency; what shows nothing; digits, or a cell's text; anything else.
_OF_FORMATS = re.compile(
    r'"([^"]*)"|\\(.)|\[\$([^\]-]*+)[^\]]*+\]|(\[[^\]]*\]|[_*].)'
    r"|(General|@|[.,]*[0#?][0#?.,]*(?:E[+-]0+)?)|(.)",
    re.S,
)
_THOUSANDS = re.compile(r"[\s'\u2019]*")
_SAYS = re.compile(r"(?!.*(?:\B[-\u2012-\u2014]|[-\u2012-\u2014]\B)).*\S.*", re.S)


@functools.lru_cache
def _parts_of(format: str) -> list[_Shown]:
    """Return what each section of a format of Excel's writes around a number."""
    texts, digits, known, scale = [""], list[str](), True, 1.0
    sections: list[_Shown] = []
    for quoted, sign, currency, _, places, other in [*_OF_FORMATS.findall(format), ("",) * 5 + (";",)]:
        if other == ";":
            if sections and digits:  # of a negative number, which gets its sign
                texts[0], texts[-1] = (text.strip("()+-") for text in (texts[0], texts[-1]))
            joined = "".join(digits)
            if digits and _THOUSANDS.fullmatch("".join(texts[1:-1])) and re.match("##0(?![0#?])", digits[-1]):
                texts[1:-1], digits = [], [joined]  # which other signs than a comma part
            scale /= 1000.0 ** len(re.findall(r",(?=,*(?:\.|$))", joined))
            whole = not joined.strip("0#?")
            known = known and (len(digits) < 2 or (whole and scale == 1))
            zeros = len(joined.lstrip("#?")) if whole else 0
            sections.append(_Shown(tuple(texts), tuple(digits), scale, zeros) if known else _Shown())
            texts, digits, known, scale = [""], [], True, 1.0
        elif places:
            digits.append(places)
            texts.append("")
        else:
            scale *= 100 if other == "%" else 1
            texts[-1] += quoted or sign or currency or other
            known = known and not other.isalpha() and other != "/"
    return [_Shown()] if re.search(r"\[[<>=]", format) else sections  # which it is, a condition says


def formatted(number: int, kind: str) -> str:
    """Return a number in one of the forms that lists have for it."""
    if (letters := _LETTERS.get(kind)) and number:
        times, letter = divmod(number - 1, len(letters))
        return letters[letter] * min(times + 1, 9)
    if kind == "hebrew1" and number < 100:
        written = "".join(f"{_TENS[number // 10]}{_UNITS[number % 10]}".split())
        return written.replace("יה", "טו").replace("יו", "טז")
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
