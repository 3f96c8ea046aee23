from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.index.text import Unusable, decode


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
        ("naïve: without a mark", "utf-16-le"),
        ("naïve: without a mark", "utf-16-be"),
        ("最大荷重は四十トンです。", "iso2022_jp"),
        ("最大荷重は四十トンです。受付時間は午前九時から午後五時までです。" * 3, "shift_jis"),
        ("最大荷重は四十トンです。受付時間は午前九時から午後五時までです。" * 3, "euc_jp"),
        ("起重机的最大载荷为四十吨。联通公司的办公室在北京。" * 5, "gb18030"),
        ("你好世界", "gb18030"),
        ("Élève", "cp1252"),
        ("Procédure d’accès : l’employé présente sa carte. Coût : 30 €.", "cp1252"),
        ("The “renewal” fee is £30 – it’s due in May.", "cp1252"),
        ("Temperature: 20 °C ± 2 µm", "cp1252"),
        ("Biuro jest nieczynne w każdą środę, również w święta.", "iso8859-2"),
        ("Плата за продление составляет 30 евро.", "koi8-r"),
        ("Işık ığdır çağrı öğrenci şişe", "cp1254"),
        ("Name;Straße\nMüller;Hauptstraße\nJäger;Größenweg\n", "mac_roman"),
        ("L’employé présente sa carte à l’entrée : être à l’hôtel, ça va.", "mac_roman"),
        ("Verzeichnis von C:\\Büro: Rechnung für Müller.txt, Größe verfügbar", "cp850"),
        ("Zawartość katalogu: ważne, święto, źródło, później", "cp852"),
        ("The café’s menu… and so on… “naïve”", "mac_roman"),
        ("La información está en el año próximo, según José", "cp850"),
        ("TotalÉnergies pays the café’s menu", "cp1252"),
        ("TotalÉnergies and CentraleÉlectrique", "cp1252"),
        ("getMúsica() setMenúDia()", "cp1252"),
        ("letzteÄnderung; datumÄnderung", "cp1252"),
        ("antallØre, sumØre", "cp1252"),
        ("totalÓrdenes;fechaÓrdenes", "cp1252"),
        ("Annual report (in €m). Net debt €bn 3.", "cp1252"),
        ("Revenue was 5 M€ and the cost 20 k€", "cp1252"),
        ("A matrix of N×M, a box of L×W×H in mm.", "cp1252"),
        ("Authors: Smith†, Jones‡, Miller† and Brown", "cp1252"),
        ("abs§2 §a C§ ¶a ¶b", "cp1252"),
        ("Capacitors: 10 µF, 22 µF; 2½h, 3¼h, ¼lb", "cp1252"),
        ("2 W/m²K, 3 kg/m³K; Windows®XP, Office®Pro; it´s, don´t; 1ºC", "cp1252"),
        ("he said “yes”—then left; “no”—then came", "cp1252"),
        ("naïve café résumé: it’s “fine”. £30 at 20 °C. © 2024 Acme® Inc. Zoë’s piñata", "cp1252"),
        ("Names what a page declares: <meta charset=big5>, a café", "cp1252"),
        ("A belső tömböknek egyforma hosszúaknak kell lenniük. Jelszó módosítása: űrlap. " * 9, "cp1250"),
        ("Een belangrijk bericht: de dienst is geïnstalleerd. " * 9, "cp1252"),
        ("Slaptažodžio patvirtinimas. Jūsų įvestas skaičius yra per didelis.", "cp1257"),
        ("Name;Straße\nMüller;Hauptstraße\n", "cp850"),
        ("Les voyages de plus de 500 € sont approuvés.", "iso8859-15"),
        (f"{'It is reported by the committee. ' * 9}François was naïve. {'It ends here. ' * 9}", "cp1252"),
        ("Командировки утверждает начальник.\nЧеки сдаются в срок.", "utf-16-le"),
        ("出差由部门主管批准。\n员工应在十日内提交发票, 2024 年。\n", "utf-16-be"),
    ],
)
def test_no_encoding_garbles_the_text(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)) == text


def test_declared_encoding_is_taken_before_a_guess() -> None:
    assert decode("Zażółć gęślą jaźń".encode("iso8859-2"), "iso-8859-2") == "Zażółć gęślą jaźń"
    assert decode("it’s".encode("cp1252"), "iso-8859-1") == "it’s", "as browsers have it"
    xml = '<?xml version="1.0" encoding="iso-8859-2"?>\n<a>gęś</a>'
    assert decode(xml.encode("iso8859-2")) == xml
    code = "#!/usr/bin/env python\n# -*- coding: iso-8859-15 -*-\nfee = '30 €'\n"
    assert decode(code.encode("iso8859-15")) == code
    catalogue = r"""msgid ""
msgstr "Language: pl\n"
"Content-Type: text/plain; charset=ISO-8859-2\n"
msgid "open"
msgstr "otwórz gęś"
"""
    assert decode(catalogue.encode("iso8859-2")) == catalogue
    for form in (
        "/*\n * -*- coding: {} -*-",
        "# vim: set fileencoding={} :",
        "% encoding: {}",
        "-- coding: {}",
    ):
        code = form.format("iso8859-2") + "\nfee = gęś\n"
        assert decode(code.encode("iso8859-2")) == code
    for line in ("- Decoding: mac notes", "- Vocoding: big5 for", "# encoding: big5 notes"):
        prose = f"{line}, für alle Bücher der Straße\n"
        assert decode(prose.encode("cp1252")) == prose, "it is no declaration"
    about = 'A café has # coding: big5 in its menu.\n"Content-Type" is charset=big5\n'
    assert decode(about.encode("cp1252")) == about, "it is mentioned"


@pytest.mark.parametrize(
    ("declared", "text", "encoding"),
    [
        ("gb2312", "起重机镕", "gbk"),
        ("x-sjis", "東京①", "cp932"),
        ("ks_c_5601-1987", "서울 똠", "cp949"),
        ("windows-874", "กรุงเทพ", "cp874"),
        ("ISO-8859-8-I", "שלום", "iso8859_8"),
        ("cp850", "Jürgen", "cp850"),
        ("latin-1", "für Bücher 30 €", "cp1252"),
        ("iso8859_9", "Işık 30 €", "cp1254"),
    ],
)
def test_declared_encoding_is_what_browsers_take_it_for(declared: str, text: str, encoding: str) -> None:
    assert decode(text.encode(encoding), declared) == text


@pytest.mark.parametrize("declared", ["utf-16", "klingon", "utf-8", "hex"])
def test_wrong_declaration_costs_no_text(declared: str) -> None:
    assert decode("Größe".encode(), declared) == "Größe"


@pytest.mark.parametrize(
    "declared", ["iso-2022-kr", "hz-gb-2312", "replacement", "undefined", "idna", "punycode"]
)
def test_declaration_that_cannot_be_followed_costs_no_text(declared: str) -> None:
    code = f"# coding: {declared}\nfür alle Bücher\n"
    assert decode(code.encode("cp1252")) == code


@pytest.mark.parametrize("damage", [b"\xff", b"\xc3", "é".encode("latin-1")])
def test_broken_byte_in_utf_8_costs_no_other_letter(damage: bytes) -> None:
    fees = "Gebühr für Anträge: fünf. "
    assert decode(fees.encode() + damage) == f"{fees}\ufffd"
    assert decode(damage + fees.encode(), "utf-8") == f"\ufffd{fees}"
    assert decode("Zürich, Genève ".encode() + damage) == "Zürich, Genève \ufffd"
    assert decode("José pays 30 ".encode() + damage) == "José pays 30 \ufffd"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("José \ud83d\ude00".encode("utf-8", "surrogatepass"), "José 😀"),  # a letter in two halves
        ("José \ud83d\ude00 \ud83d".encode("utf-8", "surrogatepass"), "José 😀 \ufffd"),
        ("30 €\n".encode() + bytes(5), "30 €\n"),  # zeros that fill a block
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        ("N\bNA\bAM\bM\u00c9\b\u00c9 _\bf_\bi_\bl_\be\n".encode(), "NAM\u00c9 file\n"),  # by "man"
        (b"\x1b[1;31mERROR\x1b[0m\x1b[K [1m] disk\n", "ERROR [1m] disk\n"),  # by a terminal
    ],
)
def test_text_is_the_same_whatever_has_written_it(data: bytes, text: str) -> None:
    assert decode(data) == text


@pytest.mark.parametrize("plain", ["a line of the log\n", "a column;"])
def test_letters_are_read_however_far_behind_the_beginning_they_stand(plain: str) -> None:
    text = 10_000 * plain + 20 * "Привет мир, как дела сегодня.\n"
    assert decode(text.encode("cp1251")) == text


@pytest.mark.parametrize(("text", "encoding"), [("コンピュータ", "cp932"), ("成功的案例功", "big5")])
def test_letter_before_much_plain_text_is_whole(text: str, encoding: str) -> None:
    """The second byte of the last one is a letter of ASCII's."""
    page = f"{text}{'A' * 100}\n" * 8
    assert decode(page.encode(encoding)) == page


@pytest.mark.parametrize("data", [bytes(range(256)) * 2, b"a" * 70_000 + b"\0" + b"a", b"text" + b"\1" * 9,
                                  "日本語\n".encode("utf-16-le"), b"\x89PNG\xff\xd8" + bytes(3)])  # fmt: skip
def test_binary_file_is_refused_wherever_it_shows(data: bytes) -> None:
    with pytest.raises(Unusable, match="binary file"):
        decode(data)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\b"), min_size=1))
def test_any_text_in_utf_8_comes_back(text: str) -> None:
    assert decode(text.encode("utf-8-sig")) == text
