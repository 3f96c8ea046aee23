"""Formulas of Office as lines of text."""

from __future__ import annotations

from typing import Any

MATH = "/math}"  # the end of both namespaces of formulas

_SIGNS = {"num": "", "den": "/", "sup": "^", "sub": "_", "lim": "_"}
_BETWEEN = {"eqArr": "; ", "func": " ", "m": "; ", "mr": ", ", "oMathPara": "; "}  # the parts of a formula
_HAT, _BRACE, _OVER, _UNDER = "\u0302", "\u23df", "\u0305", "\u0332"


def formula(element: Any) -> str:
    """Return a part of a formula of Office's as a line of text."""
    name = local(element)
    if name in ("t", "br"):
        return "; " if name == "br" else element.text or ""
    kinds = {local(sign): next(iter(sign.attrib.values()), "") for about in element[:1] for sign in about}
    there = (part for part in element if local(part) not in ("del", "moveFrom"))
    parts = [text for part in there if (text := formula(part))]
    inner = (kinds.get("sepChr", "|") if name == "d" else _BETWEEN.get(name, "")).join(parts)
    match name:
        case "acc":
            return f"{inner}{kinds.get('chr', _HAT)}"
        case "bar":
            return f"{inner}{_OVER if kinds.get('pos') == 'top' else _UNDER}"
        case "groupChr":  # an arrow, perhaps
            return kinds.get("chr", _BRACE) + (f"({inner})" if inner else "")
        case "d":
            return f"{kinds.get('begChr', '(')}{inner}{kinds.get('endChr', ')')}"
        case "nary":
            limits, summed = "".join(parts[:-1]), "".join(parts[-1:])
            return f"{kinds.get('chr', '∫')}{limits}{' ' if limits else ''}{summed}"
        case "rad":
            degree = "".join(f"[{part}]" for part in parts[:-1])
            return f"√{degree}({''.join(parts[-1:])})"
        case "num" | "den" | "sup" | "sub" | "lim":
            return _SIGNS[name] + (f"({inner})" if len(inner) > 1 else inner)
    return inner


def local(element: Any) -> str:
    """Return an element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]
