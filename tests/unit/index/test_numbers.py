"""Numbers as documents of Office show them."""

from __future__ import annotations

import pytest

from blendrag.index.numbers import formatted, in_format, written


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("chineseCountingThousand", "一 十 十二 二十 一百零五 一百一十 一千零五十"),
        ("japaneseCounting", "一 十 十二 二十 百五 百十 千五十"),
        ("russianLower", "а к м ф тттт чччч еееееееее"),
        ("decimalEnclosedCircle", "① ⑩ ⑫ ⑳ 105 110 1050"),
        ("decimalFullWidth", "１ １０ １２ ２０ １０５ １１０ １０５０"),
        ("upperRoman", "I X XII XX CV CX ML"),
        ("aiueoFullWidth", "ア コ シ ト ススス ツツツ ヨヨヨヨヨヨヨヨヨ"),
        ("ganada", "가 차 타 바바 사사사사사사사사 타타타타타타타타 하하하하하하하하하"),
        ("hebrew1", "א י יב כ 105 110 1050"),
        ("of no kind", "1 10 12 20 105 110 1050"),
    ],
)
def test_number_of_a_list_is_in_its_script(kind: str, shown: str) -> None:
    written = (formatted(number, kind) for number in (1, 10, 12, 20, 105, 110, 1050))
    assert " ".join(written) == shown


@pytest.mark.parametrize("format", ["aaa", "[$-804]aaaa;@", '[$-411]ggge"年";@', '[$-404]e"年"', "yyyy"])
def test_date_of_which_a_format_shows_a_part_is_a_date(format: str) -> None:
    assert in_format(45363, format, since_1904=False) == "2024-03-12"
    assert in_format(45363, "General", since_1904=False) == "45363"


@pytest.mark.parametrize(
    ("number", "format", "shown"),
    [
        (12345, '"a lot"', "12345"),
        (12345, '"a lot";@', "12345"),
        (-1, '"on";;"off"', "-1"),
        (0, '"on";;"off"', "off"),
        (1, '"on";;"off"', "on"),
        (-1, '"Yes";"Yes";"No"', "Yes"),
        (0, '"up";"down"', "up"),
    ],
)
def test_words_of_a_format_stand_for_the_numbers_that_it_has_them_for(
    number: float, format: str, shown: str
) -> None:
    assert written(number, format) == shown


@pytest.mark.parametrize(
    ("number", "format", "shown"),
    [
        (1234567, "# ##0", "1234567"),
        (-1234567, "#\\ ###\\ ##0;-#\\ ###\\ ##0", "-1234567"),
        (1234567, "#'###'##0", "1234567"),
        (1234567.5, '# ##0.00 "€"', "1234567.5 €"),
        (61234, '0#" "##" "##', "06 12 34"),
        (123456, "000 000", "123 456"),
    ],
)
def test_number_is_whole_however_its_format_parts_thousands(number: float, format: str, shown: str) -> None:
    assert written(number, format) == shown
