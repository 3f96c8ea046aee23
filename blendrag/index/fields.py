"""Fields of Word as mammoth reads them: their results, what those without one show, and where links lead."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
VAL = f"{W}val"
_T, _CODE, _KIND = f"{W}t", f"{W}instrText", f"{W}fldCharType"


@dataclass
class _Field:
    begin: Element
    around: list[Element] | None
    codes: list[Element] = field(default_factory=list)
    has_begun: bool = False  # its result
    has_result: bool = False


def leave_codes(root: Element) -> None:
    """Leave out the text in fields' codes, and the lists of choices that show beside them what is chosen."""
    code: list[Element] | None = None  # with results in it, of the outermost field before its result
    fields: list[_Field] = []
    for element in root.iter():
        match element.get(_KIND):
            case "begin":
                fields.append(_Field(element, code))
                code = [] if code is None else code
            case "separate" if fields and not fields[-1].has_begun:
                begun = fields[-1]
                begun.has_begun = True
                parts = begun.codes if code is None or begun.around is not None else code
                _write(begun.codes, address(_text_of(parts)), parts)
                code = begun.around
            case "end" if fields:
                ended = fields.pop()
                parts, code = code or ended.codes, ended.around
                bare = code is None and ended.codes and not ended.has_result
                if bare and (words := shown(_text_of(parts))):
                    _write(ended.codes, words, parts)
                    ended.codes[0].tag, ended.has_result = _T, True
                if ended.has_result and fields:
                    fields[-1].has_result = True
        if not fields:
            continue
        if element.tag == _CODE:
            fields[-1].codes.append(element)
            if code is not None and fields[-1].around is None:
                code.append(element)
        elif element.tag == _T and code is not None:
            code.append(element)
        elif element.tag == _T:
            fields[-1].has_result = True
            if (begin := fields[-1].begin).find(f"{W}ffData/{W}ddList") is not None:
                begin.clear()
                begin.set(_KIND, "begin")


def field_of(code: str, result: list[Element]) -> list[Element]:
    """Return the runs of a field with this result."""
    run = Element(f"{W}r")
    ElementTree.SubElement(run, _CODE).text = address(code)
    return [_sign("begin"), run, _sign("separate"), *result, _sign("end")]


def _sign(of: str) -> Element:
    run = Element(f"{W}r")
    ElementTree.SubElement(run, f"{W}fldChar").set(_KIND, of)
    return run


def _text_of(codes: list[Element]) -> str:
    """Return what stands in a field's code, which Word may part anywhere."""
    return "".join(code.text or "" for code in codes)


def _write(codes: list[Element], text: str, instead_of: list[Element]) -> None:
    for part in instead_of:
        part.text = ""
    for code in codes[:1]:
        code.text = text


_LINK = re.compile(r"\s*HYPERLINK\b")
_WORDS = re.compile(r'\\([a-z*@#])(?=[\s"]|$)|"((?:\\.|[^"\\])*+)"?|([^\s"]\S*)', re.I)


def address(code: str) -> str:
    """Return a field's code, of a link only where it leads: mammoth reads the rest as a part of it."""
    if not (link := _LINK.match(code)):
        return code
    target = place = switch = ""
    for named, quoted, bare in _WORDS.findall(code, link.end()):
        word = re.sub(r'\\(["\\])', r"\1", quoted) or bare
        if named:
            switch = named.lower() if named in "lLoOtT*@#" else ""  # the others stand alone
        elif switch:
            place, switch = word if switch == "l" else place, ""
        else:
            target = target or word
    if not target and not place:
        return ""
    leads_to = f'"{target}#{place}"' if target and place else f'"{target}"' if target else f'\\l "{place}"'
    return f"HYPERLINK {leads_to}"


_BUTTON = re.compile(r"\s*(?:MACRO|GOTO)BUTTON\s+\S+\s+(.*)", re.S)
_EQUATION = re.compile(r"\s*EQ\s(.*)", re.S)
_FRACTION = re.compile(r"\\f\s*\(([^(),;]*)[,;]([^(),;]*)\)", re.I)
_READING = re.compile(r"\\o(?:\\a\w)?\s*\(\\s\\up\s*(?:\d+\s*)?\(([^()]*)\)[,;]([^(),;]*)\)", re.I)
_ROOT = re.compile(r"\\r\s*\((?:([^(),;]*)[,;])?([^(),;]*)\)", re.I)
_SWITCH = re.compile(r'\\\*\s*(?:"[^"]*"|\S+)|\\[a-z]+\s*\d*', re.I)
_SIGN = re.compile(r"\\([,;()])")
_MEANT = {0xF0000 + ord(sign): sign for sign in ",;()"}  # no signs of any text


def shown(code: str) -> str:
    """Return what a field shows that has no result: words, an equation."""
    if button := _BUTTON.match(code):
        return button[1].strip()
    if equation := _EQUATION.match(code):
        plain = _SIGN.sub(lambda sign: chr(0xF0000 + ord(sign[1])), equation[1])
        plain = _FRACTION.sub(r"\1/\2", _READING.sub(r"\2(\1)", plain))
        plain = _ROOT.sub(lambda root: f"√{f'[{root[1]}]' if root[1] else ''}({root[2]})", plain)
        return _SWITCH.sub("", plain).translate(_MEANT).strip()
    return ""
