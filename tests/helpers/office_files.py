"""Small documents of Word, PowerPoint and Excel, an EPUB and a PDF, made on the spot."""

from __future__ import annotations

import io
import zipfile
from datetime import date, datetime, time
from typing import Any

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_R = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
DRAWN = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
FORMS = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
M = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
MATH = (
    f"<m:oMath {M}><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
    "<m:sSup><m:e><m:d><m:e><m:r><m:t>x</m:t></m:r></m:e></m:d></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup>"
    '</m:sSup><m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:e><m:rad><m:e><m:r><m:t>y</m:t></m:r></m:e>'
    "</m:rad></m:e></m:nary></m:oMath>"
)


def archive(parts: dict[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for name, part in parts.items():
            written.writestr(name, part)
    return file.getvalue()


def parts_of(file: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(file)) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def saved(document: Any) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def paragraph(text: str, style: str = "", number: int = 0) -> str:
    kind = f'<w:pStyle w:val="{style}"/>' if style else ""
    level = f'<w:numPr><w:ilvl w:val="0"/><w:numId w:val="{number}"/></w:numPr>' if number else ""
    return f"<w:p><w:pPr>{kind}{level}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


BOX = f"<w:txbxContent>{paragraph('boxed')}</w:txbxContent>"
SHAPE = (
    '<w:drawing><wp:anchor xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing">'
    '<wps:wsp xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape">'
    f"<wps:txbx>{BOX}</wps:txbx></wps:wsp></wp:anchor></w:drawing>"
)
V = "xmlns:v='urn:schemas-microsoft-com:vml'"
OLD_SHAPE = f"<w:pict><v:oval {V}><v:textbox>{BOX}</v:textbox></v:oval></w:pict>"
CHOICE = f'<mc:Choice Requires="wps">{SHAPE}</mc:Choice>'


def docx(body: str = "", **parts: str) -> bytes:
    """A document of Word with headings, a numbered list, a table, a link, a picture, a note and a comment."""
    picture = (
        '<w:p><w:r><w:drawing xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing">'
        '<wp:inline><wp:docPr id="1" name="p" descr="crane, 40 t"/><a:graphic '
        'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"><a:graphicData><pic:pic '
        'xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture"><pic:blipFill><a:blip '
        f'xmlns:r="{_R}" r:embed="rId1"/></pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline>'
        "</w:drawing></w:r></w:p>"
    )
    table = "".join(
        "<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) + "</w:tr>"
        for row in (("Part", "Load"), ("crane", "40 t"))
    )
    link = f'<w:p><w:hyperlink xmlns:r="{_R}" r:id="rId2"><w:r><w:t>form</w:t></w:r></w:hyperlink></w:p>'
    notes = (
        "<w:p><w:r><w:t>noted</w:t></w:r><w:r><w:footnoteReference w:id='2'/></w:r>"
        "<w:r><w:commentReference w:id='0'/></w:r></w:p>"
    )
    whole = (
        paragraph("Handbook", "Title")
        + paragraph("Cranes", "Heading1")
        + paragraph("close", number=1)
        + paragraph("drain", number=1)
        + f"<w:tbl>{table}</w:tbl>{link}{picture}{notes}"
    )
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{id}"><w:name w:val="{name}"/></w:style>'
        for id, name in (("Title", "Title"), ("Heading1", "heading 1"))
    )
    related = "".join(
        f'<Relationship Id="{id}" Type="{_R}/{kind}" Target="{target}"{mode}/>'
        for id, kind, target, mode in (
            ("rId1", "image", "media/p.png", ""),
            ("rId2", "hyperlink", "forms/b7.pdf", ' TargetMode="External"'),
            ("rId3", "styles", "styles.xml", ""),
            ("rId4", "numbering", "numbering.xml", ""),
            ("rId5", "footnotes", "footnotes.xml", ""),
            ("rId6", "comments", "comments.xml", ""),
        )
    )
    return archive(
        {
            "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="png" '
            'ContentType="image/png"/><Default Extension="xml" ContentType="application/xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" '
            f'Type="{_R}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/_rels/document.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">{related}'
            "</Relationships>",
            "word/document.xml": f"<w:document {W}><w:body>{body or whole}</w:body></w:document>",
            "word/styles.xml": f"<w:styles {W}>{styles}</w:styles>",
            "word/numbering.xml": f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0">'
            '<w:numFmt w:val="decimal"/></w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId '
            'w:val="0"/></w:num></w:numbering>',
            "word/footnotes.xml": f"<w:footnotes {W}><w:footnote w:id='2'>{paragraph('below')}</w:footnote>"
            "</w:footnotes>",
            "word/comments.xml": f"<w:comments {W}><w:comment w:id='0' w:author='Bo' w:initials='B'>"
            f"{paragraph('asked')}</w:comment></w:comments>",
            "word/media/p.png": b"no picture",
            **parts,
        }
    )


def pptx() -> bytes:
    """A slide with a title, a text, a table, a picture, a group and notes, and one without a title."""
    from pptx import Presentation
    from pptx.util import Inches

    presentation: Any = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "Cranes"
    slide.placeholders[1].text = "close\ndrain"
    table = slide.shapes.add_table(2, 2, 0, 0, Inches(1), Inches(1)).table
    for place, text in {(0, 0): "Part", (0, 1): "Load", (1, 0): "a|b", (1, 1): "40 t"}.items():
        table.cell(*place).text = text
    picture = slide.shapes.add_picture(io.BytesIO(png()), 0, 0)
    picture._element.xpath(".//p:cNvPr")[0].set("descr", "crane, 40 t")
    slide.shapes.add_group_shape().shapes.add_textbox(0, 0, 9, 9).text_frame.text = "grouped"
    slide.notes_slide.notes_text_frame.text = "spoken"
    last = presentation.slides.add_slide(presentation.slide_layouts[6])
    last.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "last"
    return saved(presentation)


def png() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


def xlsx(far: str = "") -> bytes:
    """Two sheets: kinds of values, an empty column and an empty row; a cell that is far away."""
    from openpyxl import Workbook

    book = Workbook()
    first: Any = book.active
    first.title = "Loads"
    first.append(["Part", "Since", None, "Load", "Ready"])
    first.append([None] * 5)
    first.append(["a|b\nc", datetime(2026, 1, 2), None, 1.5, True])
    first.append(["crane", date(2026, 1, 2), None, 40, time(3, 4)])
    book.create_sheet("Empty")
    if far:
        book.create_sheet("Far")[far] = "far"
    return saved(book)


def epub(*chapters: str) -> bytes:
    """An EPUB that names its chapters against the order in which they are read."""
    chapters = chapters or ("<h1>One</h1><p>first</p>", "<h1>Two</h1><p>second</p>")
    items = "".join(
        f'<item id="c{n}" href="text/c%20{n}.xhtml" media-type="application/xhtml+xml"/>'
        for n in reversed(range(len(chapters)))
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
            '<rootfiles><rootfile full-path="book/b.opf"/></rootfiles></container>',
            "book/b.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/'
            f'elements/1.1/"><dc:title>Cranes</dc:title></metadata><manifest>{items}</manifest>'
            f"<spine>{spine}</spine></package>",
            **{
                f"book/text/c {n}.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title>Cranes</title></head>'
                f"<body>{chapter}</body></html>"
                for n, chapter in enumerate(chapters)
            },
        }
    )


def pdf(text: str = "", password: str = "", encoding: str = "StandardEncoding") -> bytes:
    """A PDF of one page, with a text layer if there is a text."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    page = writer.add_blank_page(300, 100)
    if text:
        font = DictionaryObject()
        kind = {"Type": "Font", "Subtype": "Type1", "BaseFont": "Helvetica", "Encoding": encoding}
        for name, value in kind.items():
            font[NameObject(f"/{name}")] = NameObject(f"/{value}")
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        drawn = DecodedStreamObject()
        drawn.set_data(f"BT /F1 12 Tf 10 50 Td ({text}) Tj ET".encode("latin-1"))
        page[NameObject("/Contents")] = writer._add_object(drawn)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def renamed(file: bytes, *names: tuple[bytes, bytes]) -> bytes:
    parts = parts_of(file)
    for before, now in names:
        parts = {name: part.replace(before, now) for name, part in parts.items()}
    return archive(parts)
