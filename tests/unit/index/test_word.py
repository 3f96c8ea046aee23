"""Word documents: what they show, once and in order."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from blendrag.index import fields, word
from blendrag.index.office import read_archive
from office_files import BOX, CHOICE, FORMS, MATH, OLD_SHAPE, SHAPE, M, V, W, docx, paragraph


def test_word_document_keeps_its_structure() -> None:
    text = read_archive(docx()).text
    assert text.startswith(
        "# Handbook\n\n# Cranes\n\n1. close\n2. drain\n\n| Part | Load |\n| --- | --- |\n| crane | 40 t |"
    )
    for part in ("[form](forms/b7.pdf)", "![crane, 40 t](", "noted", "below", "asked"):
        assert part in text  # fmt: skip


def run(text: str) -> str:
    return f"<w:r><w:t>{text}</w:t></w:r>"


BEGIN, SEPARATE, END = (
    f"<w:r><w:fldChar w:fldCharType='{kind}'/></w:r>" for kind in ("begin", "separate", "end")
)
OTHER = f"<mc:AlternateContent {FORMS}><mc:Choice Requires='w16se'/><mc:Fallback>{{}}</mc:Fallback>"
OTHER += "</mc:AlternateContent>"


@pytest.mark.parametrize(
    "inside",
    [
        f"<w:fldSimple>{run('boxed')}</w:fldSimple>",
        f"<w:dir><w:bdo>{run('boxed')}</w:bdo></w:dir>",
        f"<w:r><w:ruby><w:rubyBase>{run('boxed')}</w:rubyBase></w:ruby></w:r>",
        f"<w:fldSimple w:instr=' HYPERLINK \"u\" '>{run('boxed')}</w:fldSimple>",
        f"<w:r>{SHAPE}</w:r>",
        f"<w:r>{OLD_SHAPE}</w:r>",
        f"<w:r><mc:AlternateContent {FORMS}>{CHOICE}</mc:AlternateContent></w:r>",
        f"<w:r><mc:AlternateContent {FORMS}>{CHOICE}<mc:Fallback/></mc:AlternateContent></w:r>",
        f"<w:r><mc:AlternateContent {FORMS}>{CHOICE}<mc:Fallback>{OLD_SHAPE}</mc:Fallback>"
        "</mc:AlternateContent></w:r>",
        f"<w:r>{OTHER.format('<w:t>boxed</w:t>')}</w:r>",
        OTHER.format(run("bo") + run("xed")),
    ],
)
@pytest.mark.parametrize("part", ["document", "footnotes"])
def test_text_of_word_is_kept_once_whatever_is_around_it(inside: str, part: str) -> None:
    whole = f"<w:p>{run('before ')}{inside}{run(' behind')}</w:p>"
    if part == "footnotes":
        note = f"<w:footnotes {W}><w:footnote w:id='2'>{whole}</w:footnote></w:footnotes>"
        text = read_archive(docx(**{"word/footnotes.xml": note})).text
    else:
        text = read_archive(docx(whole)).text
    assert text.count("boxed") == text.count("before") == text.count("behind") == 1


@pytest.mark.parametrize("mark", ["del", "moveFrom"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{first}{second}", "firstsecond"),
        ("{first}<w:bookmarkStart w:id='1' w:name='m'/>{second}", "firstsecond"),
        ("{first}{first}{second}", "firstfirstsecond"),
        ("{second}{first}", "second\n\nfirst"),
        ("{first}<w:tbl><w:tr><w:tc>{second}</w:tc></w:tr></w:tbl>", "first\n\n| second |\n| --- |"),
        (
            "<w:tbl><w:tr><w:tc>{first}</w:tc><w:tc>{second}</w:tc></w:tr></w:tbl>",
            "| first | second |\n| --- | --- |",
        ),
        ("{listed}{listed}{second}", "1. c\n2. c\n\nsecond"),
        ("{listed}{gone}{listed}", "1. c\n2. c"),
        ("{listed}{gone}<w:tbl/>{listed}", "1. c\n\n2) c"),
    ],
)
def test_paragraph_whose_end_is_deleted_goes_on_in_the_next_if_one_is_there(
    body: str, text: str, mark: str
) -> None:
    def ended(paragraph: str) -> str:
        return paragraph.replace("</w:pPr>", f"<w:rPr><w:{mark} w:id='5'/></w:rPr></w:pPr>")

    moved = f"<w:moveFrom w:id='6'>{run('moved')}</w:moveFrom>"
    listed = paragraph("c", number=1)
    shown = body.format(
        first=ended(paragraph("first")),
        second=paragraph("second"),
        listed=listed,
        gone=ended(listed).replace(run("c"), moved),
    )
    assert read_archive(docx(shown)).text == text


def test_note_whose_sign_stands_alone_in_a_direction_or_field_is_kept() -> None:
    sign = "<w:r><w:footnoteReference w:id='2'/></w:r>"
    for around in (f"<w:bdo>{sign}</w:bdo>", f"<w:fldSimple w:instr='x'>{sign}</w:fldSimple>"):
        assert read_archive(docx(f"<w:p>{run('kept')}{around}</w:p>")).text.endswith("1. below")


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (r'HYPERLINK "http://x.test/a" \o "Tip" \t "_blank"', "[form](http://x.test/a)"),
        (r'HYPERLINK \m \o "Tip" "http://x.test/a" \l "s2"', "[form](http://x.test/a#s2)"),
        (r"HYPERLINK http://x.test/a \h", "[form](http://x.test/a)"),
        (r'HYPERLINK "\\\\host\\b7.pdf"', r"[form](\\\\host\\b7.pdf)"),  # as Markdown writes it
        (r"HYPERLINK \\server\share\x", r"[form](\\\\server\\share\\x)"),
        (r'HYPERLINK \l "s2" \o "Tip"', "[form](#s2)"),
        ("HYPERLINK ", "form"),
        (r"HYPERLINK  \* MERGEFORMAT", "form"),
        (r'HYPERLINK \o "Tip"', "form"),
    ],
)
def test_link_of_a_field_leads_where_its_switches_say(code: str, shown: str) -> None:
    begun = f"{BEGIN}<w:r><w:instrText>{code[:9]}</w:instrText><w:instrText>{code[9:]}</w:instrText></w:r>"
    simple = f"<w:fldSimple w:instr='{code}'>{run('form')}</w:fldSimple>"
    for written in (simple, f"{begun}{SEPARATE}{run('form')}{END}"):
        assert read_archive(docx(f"<w:p>{written}</w:p>")).text == shown


@pytest.mark.parametrize("rest", [END, SEPARATE + END])
def test_field_shows_results_in_its_code_where_they_stand(rest: str) -> None:
    def code(text: str) -> str:
        return f"<w:r><w:instrText>{text}</w:instrText></w:r>"

    inner = f"{BEGIN}{code('REF n')}{SEPARATE}{run('40')}{END}"
    outer = f"{BEGIN}{code(' EQ &#92;f(')}{inner}{code(',2)')}{rest}"
    assert read_archive(docx(f"<w:p>{run('so ')}{outer}{run(' t')}</w:p>")).text == "so 40/2 t"


def test_parts_of_a_field_s_code_are_each_written_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = fields._write
    monkeypatch.setattr(fields, "_write", lambda *of: written.append(len(of[-1])) or write(*of))
    part = "<w:r><w:instrText>x</w:instrText></w:r>" + SEPARATE
    root = ElementTree.fromstring(f"<w:p {W}>{BEGIN}{part * 1_000}{END}</w:p>")
    fields.leave_codes(root)
    assert sum(written) < 10_000


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (r"EQ \f(1,2)", "1/2"),
        (r"EQ \r(3,x)", "√[3](x)"),
        (r"EQ \r(x)", "√(x)"),
        (r"EQ \f(1\,5;2)", "1,5/2"),
        (r'EQ \* jc2 \* "Font:MS Mincho" \o\ad(\s\up 9(かん),漢)', "漢(かん)"),
        ("MACROBUTTON NoMacro [Click here]", "[Click here]"),
        ('XE "cranes"', ""),
    ],
)
def test_field_without_a_result_shows_its_equation_or_button(code: str, text: str) -> None:
    written = f"{run('so ')}{BEGIN}<w:r><w:instrText> {code} </w:instrText></w:r>"
    simple = f"{run('so ')}<w:fldSimple w:instr='{code}'/>"
    for field in (written + END, written + SEPARATE + END, simple):
        assert read_archive(docx(f"<w:p>{field}</w:p>")).text == f"so {text}".strip()
    assert read_archive(docx(f"<w:p>{written}{SEPARATE}{run('x')}{END}</w:p>")).text == "so x"


def said(kind: str, of: str, inside: str = "") -> str:
    return f"<x:{kind} xmlns:x='x' descr='{of}'/>{inside}"


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (said("docPr", "site", said("cNvPr", "pump") + said("cNvPr", "site")), "![site](<>) ![pump](<>)"),
        (said("docPr", "site", f"<wpg>{BOX}</wpg>"), "![site](<>)\n\nboxed"),
        (said("docPr", "[a]\n b"), r"![\[a\] b](<>)"),
        (
            "<w:txbxContent><w:p><w:r><w:drawing>" + said("docPr", "pump") + "</w:drawing></w:r></w:p>"
            "</w:txbxContent>",
            "![pump](<>)",
        ),
    ],
)
def test_descriptions_of_groups_and_in_boxes_are_kept_once(inside: str, text: str) -> None:
    drawing = f"<w:drawing><wp:anchor xmlns:wp='wp'>{inside}</wp:anchor></w:drawing>"
    forms = f"<mc:AlternateContent {FORMS}><mc:Choice Requires='wpg'>{drawing}</mc:Choice>"
    forms += f"<mc:Fallback><w:pict><v:shape {V} alt='x'/></w:pict></mc:Fallback></mc:AlternateContent>"
    for written in (drawing, forms):
        assert read_archive(docx(f"<w:p><w:r>{written}</w:r></w:p>")).text == text


def test_broken_part_that_nobody_needs_costs_no_text() -> None:
    assert read_archive(docx(**{"word/webSettings.xml": "<w:broken"})).text == read_archive(docx()).text


RUBY = f"<w:ruby><w:rt>{run('かん')}</w:rt><w:rubyBase>{run('漢')}</w:rubyBase></w:ruby>"
RAISED = "<w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr><w:t>-3</w:t></w:r>"
TICKED = (
    "<w:sdt><w:sdtPr><w14:checkbox xmlns:w14='http://schemas.microsoft.com/office/word/2010/wordml'>"
    f"<w14:checked w14:val='1'/></w14:checkbox></w:sdtPr><w:sdtContent>{run('☒')}</w:sdtContent></w:sdt>"
)
LISTED = (
    "<w:r><w:fldChar w:fldCharType='begin'><w:ffData><w:ddList><w:result w:val='1'/>"
    "<w:listEntry w:val='Red'/><w:listEntry w:val='Blue'/></w:ddList></w:ffData></w:fldChar></w:r>"
)
GREEK = "<w:r><w:rPr><w:rFonts w:ascii='Symbol' w:hAnsi='Symbol'/></w:rPr><w:t>\uf06d</w:t></w:r>"
DELETED = (
    f"<w:moveFrom w:id='1'>{run('moved')}</w:moveFrom>"
    "<w:del w:id='2'><w:r><w:delText>gone</w:delText></w:r></w:del>"
)
SIGNS = ("tab", "ptab", "br", "cr", "br w:type='page'", "br w:type='column'")
APART = "".join(f"<w:{sign}/><w:t>{place}</w:t>" for place, sign in enumerate(SIGNS))


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (f"{run('kept')}{DELETED}", "kept"),
        (f"<w:r>{RUBY}</w:r>{run('字')}", "漢(かん)字"),
        (f"{run('10')}{RAISED}", "10^-3"),
        (f"{TICKED}{run(' agreed')}", "[x] agreed"),
        ("<w:r><w:drawing><wp:docPr xmlns:wp='wp' id='1' descr='Sales\nby month'/></w:drawing></w:r>",
         "![Sales by month](<>)"),
        (f"<w:r><w:pict><v:shape {V} alt='crane'><v:imagedata/></v:shape></w:pict></w:r>", "![crane](<>)"),
        (f"<w:r><w:pict><v:shape {V}><v:textpath string='DRAFT'/></v:shape></w:pict></w:r>", "DRAFT"),
        (f"{LISTED}{END}{run(' rope')}", "Blue rope"),
        (f"{LISTED}{SEPARATE}{run('Blue')}{END}{run(' rope')}", "Blue rope"),
        ("<w:r><w:rPr><w:dstrike/></w:rPr><w:t>not</w:t></w:r>", "~~not~~"),
        (f"{run('5 ')}{GREEK}{run('m')}", "5 μm"),
        ("<w:r><w:sym w:font='Symbol' w:char='f061'/></w:r>", "α"),
        ("<w:r><w:sym w:font='MS Gothic' w:char='2612'/></w:r>", "☒"),
        *((f"<w:r><w:sym w:font='House Signs'{place}/></w:r>{run('kept')}", "kept")
          for place in (" w:char='F061'", " w:char=''", " w:char='FFFFFFFF'", "")),
        *((f"{run('kept')}<w:r><w:{kind}Reference w:id='77'/></w:r>", "kept")
          for kind in ("footnote", "endnote", "comment")),
        (f"{run('So ')}{MATH}", "So (a+b)/2(x)^2∑√(y)"),
    ],
)  # fmt: skip
def test_paragraph_of_word_shows_what_word_does(inside: str, text: str) -> None:
    assert read_archive(docx(f"<w:p>{inside}</w:p>")).text == text


def test_row_of_a_table_that_begins_behind_columns_keeps_its_place() -> None:
    first = "".join(f"<w:tc>{paragraph(name)}</w:tc>" for name in "ABC")
    second = f"<w:trPr><w:gridBefore w:val='2'/></w:trPr><w:tc>{paragraph('c')}</w:tc>"
    text = read_archive(docx(f"<w:tbl><w:tr>{first}</w:tr><w:tr>{second}</w:tr></w:tbl>")).text
    assert text == "| A | B | C |\n| --- | --- | --- |\n|  |  | c |"


def test_words_apart_stay_apart() -> None:
    assert read_archive(docx(f"<w:p><w:r><w:t>x</w:t>{APART}</w:r></w:p>")).text.split() == [*"x012345"]


def test_code_of_a_field_in_word_is_not_read_for_its_result() -> None:
    def field(code: str, result: str) -> str:
        return f"{BEGIN}{code}{SEPARATE}{result}{END}"

    code = "<w:r><w:instrText> MERGEFIELD sex </w:instrText></w:r>"
    choice = field(field(code, run("m")) + run(' = "m" "Mr" "Ms"'), run("Mr"))
    assert read_archive(docx(f"<w:p>{choice}{run(' Bo')}</w:p>")).text == "Mr Bo"
    listed = field("", field("", run("Intro")) + run(" 3"))
    assert read_archive(docx(f"<w:p>{listed}</w:p>")).text == "Intro 3"
    for broken in (f"{BEGIN}{run('kept')}", f"{BEGIN}{run('kept')}{END}", f"{END}{SEPARATE}{run('kept')}"):
        assert read_archive(docx(f"<w:p>{broken}</w:p>")).text == "kept"


def test_elements_without_text_deep_in_one_another_are_each_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []
    local = word.local
    monkeypatch.setattr(word, "local", lambda element: looked_at.append(element.tag) or local(element))
    tree = ElementTree.fromstring("<x>" * 100 + "<y/>" * 1_000 + "</x>" * 100)
    assert not word._read_whole(tree)
    assert len(looked_at) < 10_000


def test_capital_that_is_let_into_a_paragraph_begins_its_word() -> None:
    frame = '<w:framePr w:dropCap="drop" w:lines="3"/>'
    let_in = paragraph("T").replace("<w:pPr>", f"<w:pPr>{frame}")
    assert (
        read_archive(docx(let_in + paragraph("he crane.") + paragraph("Next."))).text == "The crane.\n\nNext."
    )


def test_code_of_word_keeps_its_lines_and_blanks() -> None:
    def line(text: str) -> str:
        return paragraph(text, "Code").replace("<w:t>", '<w:t xml:space="preserve">')

    def text(body: str) -> str:
        return read_archive(docx(body, **{"word/styles.xml": f"<w:styles {W}>{style}</w:styles>"})).text

    style = '<w:style w:type="paragraph" w:styleId="Code"><w:name w:val="Source Code"/></w:style>'
    empty = line("").replace('<w:r><w:t xml:space="preserve"></w:t></w:r>', "")
    lines = line("if x:") + line("    y = *1*") + empty + line("") + line("z")
    shown = "```\nif x:\n    y = *1*\n\n\nz\n```"
    assert text(paragraph("So:") + lines) == f"So:\n\n{shown}"
    assert text(f"<w:tbl><w:tr><w:tc>{lines}</w:tc></w:tr></w:tbl>") == shown
    row = f"<w:tr><w:tc>{paragraph('Run')}</w:tc><w:tc>{line('z')}</w:tc></w:tr>"
    assert text(f"<w:tbl>{row * 2}</w:tbl>") == "| Run | z |\n| --- | --- |\n| Run | z |"


def in_font(text: str, font: str) -> str:
    fonts = f'<w:rPr><w:rFonts w:ascii="{font}" w:hAnsi="{font}"/></w:rPr>'
    return f'<w:r>{fonts}<w:t xml:space="preserve">{text}</w:t></w:r>'


def test_paragraphs_whose_font_is_one_of_code_are_code_other_than_headings_and_items() -> None:
    lines = "".join(f"<w:p>{in_font(line, 'Consolas')}</w:p>" for line in ("if x:", "    y  = 1"))
    for body in (lines, f"<w:tbl><w:tr><w:tc>{lines}</w:tc></w:tr></w:tbl>"):
        assert read_archive(docx(body)).text == "```\nif x:\n    y  = 1\n```"
    named = in_font("pip", "Roboto Mono")
    for before, shown in ((paragraph("", "Heading1"), "# pip"), (paragraph("", number=1), "1. pip")):
        assert read_archive(docx(before.replace(run(""), named))).text == shown
    assert read_archive(docx(f"<w:p>{run('Call ')}{named}</w:p>")).text == "Call pip"


@pytest.mark.parametrize("font", ["Courier New", "Courier", "Code 39"])
def test_prose_in_a_font_of_typewriters_is_no_code(font: str) -> None:
    line = f"<w:p>{in_font('The crane is **closed**.', font)}</w:p>"
    assert read_archive(docx(line + line)).text == "The crane is **closed**.\n\nThe crane is **closed**."


def test_paragraph_in_a_font_of_code_keeps_its_links_notes_and_strikes() -> None:
    whole = in_font("form", "Consolas")
    related = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    link = f'<w:hyperlink xmlns:r="{related}" r:id="rId2">{whole}</w:hyperlink>'
    note = f'{whole}<w:r><w:footnoteReference w:id="2"/></w:r>'
    struck = whole.replace("</w:rPr>", "{}</w:rPr>")
    for inside, shown in (
        (link, "[form](forms/b7.pdf)"),
        (note, "form[[1]](#footnote-2)\n\n1. below"),
        (struck.format("<w:strike/>"), "~~form~~"),
        (struck.format("<w:strike w:val='false'/>"), "```\nform\n```"),
    ):
        assert read_archive(docx(f"<w:p>{inside}</w:p>")).text == shown


def test_empty_paragraph_is_a_line_of_code_only_behind_code() -> None:
    empty = '<w:p><w:pPr><w:rPr><w:rFonts w:ascii="Consolas"/></w:rPr></w:pPr></w:p>'
    line, item = f"<w:p>{in_font('x', 'Consolas')}</w:p>", paragraph("item", number=1)
    assert read_archive(docx(paragraph("a") + empty + paragraph("b"))).text == "a\n\nb"
    assert read_archive(docx(item + empty + item + line + empty + line + empty)).text == (
        "1. item\n2. item\n\n```\nx\n\nx\n```"
    )


@pytest.mark.parametrize(
    ("style", "kind", "shown"),
    [
        ("HTML Code", "bullet", "- a\n- b"),
        ("HTML Code", "decimal", "```\n1. a\n2. b\n```"),
        ("Plain Text", "bullet", "- a\n- b"),
    ],
)
def test_items_of_signs_are_no_code_whatever_their_style_is(style: str, kind: str, shown: str) -> None:
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:numFmt w:val="{kind}"/>'
        '</w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>'
    )
    named = f'<w:style w:type="paragraph" w:styleId="S"><w:name w:val="{style}"/></w:style>'
    parts = {"word/styles.xml": f"<w:styles {W}>{named}</w:styles>", "word/numbering.xml": numbering}
    assert read_archive(docx(paragraph("a", "S", 1) + paragraph("b", "S", 1), **parts)).text == shown


def test_style_of_a_run_says_its_height_and_its_font() -> None:
    styles = "".join(
        f'<w:style w:type="character" w:styleId="{id}"><w:name w:val="{id}"/>{about}</w:style>'
        for id, about in (
            ("Up", '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>'),
            ("Upper", '<w:basedOn w:val="Up"/>'),
            ("Greek", '<w:rPr><w:rFonts w:ascii="Symbol"/></w:rPr>'),
        )
    )
    of_style = "<w:r><w:rPr><w:rStyle w:val='{}'/></w:rPr><w:t>{}</w:t></w:r>"
    body = f"<w:p>{run('10')}{of_style.format('Upper', 6)}{of_style.format('Greek', 'm')}</w:p>"
    assert (
        read_archive(docx(body, **{"word/styles.xml": f"<w:styles {W}>{styles}</w:styles>"})).text == "10^6μ"
    )


def test_letters_in_a_font_of_signs_are_its_signs() -> None:
    parts = in_font("5 m", "Symbol"), in_font("ü", "Wingdings"), in_font("mü", "Arial")
    assert read_archive(docx(f"<w:p>{''.join(parts)}</w:p>")).text == "5 μ✓mü"


@pytest.mark.parametrize(
    ("ascii", "other", "shown"),
    [("Arial", "Symbol", "5 m ×"), ("Symbol", "Arial", "5 μ ´"), ("", "Symbol", "5 m ×")],
)
def test_letters_of_ascii_and_other_signs_have_fonts_of_their_own(ascii: str, other: str, shown: str) -> None:
    fonts = f'w:ascii="{ascii}" w:hAnsi="{other}"'.removeprefix('w:ascii="" ')
    letters = f"<w:r><w:rPr><w:rFonts {fonts}/></w:rPr><w:t>5 m \xb4</w:t></w:r>"
    assert read_archive(docx(f"<w:p>{letters}</w:p>")).text == shown


def test_empty_paragraphs_of_word_change_nothing() -> None:
    for style in ("Title", "Heading1", ""):
        one, other = (paragraph(text, style) for text in "ab")
        empty = f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr></w:p>'
        assert read_archive(docx(one + empty + other)) == read_archive(docx(one + other))
    items = [paragraph(text, number=1) for text in "abc"]
    assert read_archive(docx("<w:p/>".join(items))).text == "1. a\n2. b\n3. c"


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("<m:rad><m:deg>{3}</m:deg><m:e>{x}</m:e></m:rad>", "√[3](x)"),
        ("<m:rad><m:deg/><m:e>{x}</m:e></m:rad>", "√(x)"),
        ("<m:m><m:mr><m:e>{a}</m:e><m:e>{b}</m:e></m:mr><m:mr><m:e>{c}</m:e></m:mr></m:m>", "a, b; c"),
        ("<m:eqArr><m:e>{a=1}</m:e><m:e>{b=2}</m:e></m:eqArr>", "a=1; b=2"),
        ("<m:d><m:e>{a}</m:e><m:e>{b}</m:e></m:d>", "(a|b)"),
        ("<m:func><m:fName>{sin}</m:fName><m:e>{x}</m:e></m:func>", "sin x"),
        ("<m:limLow><m:e>{lim}</m:e><m:lim>{n→∞}</m:lim></m:limLow>", "lim_(n→∞)"),
        ("{y}<w:ins>{=x}</w:ins><w:del>{=z}</w:del>", "y=x"),
        (
            "<m:oMathPara><m:oMath>{a}<m:r><w:br/></m:r>{b}</m:oMath><m:oMath>{c}</m:oMath></m:oMathPara>",
            "a; b; c",
        ),
        ("<m:nary><m:sub>{i}</m:sub><m:sup>{n}</m:sup><m:e>{i}</m:e></m:nary>", "∫_i^n i"),
        ('<m:groupChr><m:groupChrPr><m:chr m:val="→"/></m:groupChrPr><m:e>{9}</m:e></m:groupChr>', "→(9)"),
        ('<m:bar><m:barPr><m:pos m:val="top"/></m:barPr><m:e>{A}</m:e></m:bar>', "A\u0305"),
        ('<m:acc><m:accPr><m:chr m:val="\u0307"/></m:accPr><m:e>{x}</m:e></m:acc>', "x\u0307"),
    ],
)
def test_parts_of_a_formula_stay_apart(inside: str, text: str) -> None:
    inside = inside.replace("{", "<m:r><m:t>").replace("}", "</m:t></m:r>")
    assert read_archive(docx(f"<w:p><m:oMath {M}>{inside}</m:oMath></w:p>")).text == text
