"""Numbers as documents of Office show them."""

from __future__ import annotations

import pytest

from blendrag.index.numbers import formatted


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("chineseCountingThousand", "一 十 十二 二十 一百零五 一百一十 一千零五十"),
        ("japaneseCounting", "一 十 十二 二十 百五 百十 千五十"),
        ("russianLower", "а к м ф тттт чччч еееееееее"),
        ("decimalEnclosedCircle", "① ⑩ ⑫ ⑳ 105 110 1050"),
        ("decimalFullWidth", "１ １０ １２ ２０ １０５ １１０ １０５０"),
        ("upperRoman", "I X XII XX CV CX ML"),
        ("of no kind", "1 10 12 20 105 110 1050"),
    ],
)
def test_number_of_a_list_is_in_its_script(kind: str, shown: str) -> None:
    written = (formatted(number, kind) for number in (1, 10, 12, 20, 105, 110, 1050))
    assert " ".join(written) == shown
