"""HTML to Markdown: parser and writer are turbohtml's; what stands here keeps them from losing text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

from turbohtml import Document, Element, Markdown, Node, Text

from blendrag.index.signs import write_signs
from blendrag.index.text import Content, decode
from blendrag.index.unclosed import parse

N = TypeVar("N", bound=Node)

_DECLARED = re.compile(rb"""<(?:meta|\?xml)\b[^<>]*?\b(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)


def read_html(data: bytes) -> Content:
    """Return a page as Markdown, under its title. Scripts, styles, templates and navigation are dropped."""
    content = markdown(markup(data))
    title = str(content.metadata.get("title", ""))
    if not title or _has_words(content.text[: 2 * len(title) + 100], title):
        return content
    return Content(f"# {title}\n\n{content.text}", content.metadata)


def _has_words(text: str, words: str) -> bool:
    """Return whether these words stand in a text, not as parts of longer ones."""
    ends = pairwise(text.split(words))
    return any(not _joins(one[-1:], words[:1]) and not _joins(words[-1:], other[:1]) for one, other in ends)


def _joins(before: str, behind: str) -> bool:
    """Return whether these are letters of one word, of a script with blanks between words."""
    return all(
        sign.isalnum() and (sign.isascii() or sign.lower() != sign.upper()) for sign in (before, behind)
    )


def markup(data: bytes) -> str:
    """Return a page's source. Raises Unusable for what is not text."""
    declared = _DECLARED.search(data[:4096])
    return decode(data, declared[1].decode("ascii", "ignore") if declared else "")


def markdown(markup: str) -> Content:
    """Return what a page shows, as Markdown; its title is in the metadata."""
    page = parse(markup)
    title = _take_title(page)
    _prepare(page)
    text = page.to_markdown(_notation()).replace(_APART, "").strip()
    return Content(text, {"title": title} if title else {})


# -- before it is written ----------------------------------------------------------------------------------

_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = "center, fieldset, form, hgroup, search, legend, dialog, optgroup, option, marquee, noscript"
_BOXES = ("button", "select", "textarea", "meter", "progress", "output", "object", "canvas", "audio", "video")
_IN_DRAWINGS = ("text", "desc", "tspan", "foreignObject", "mi", "mn", "mo", "mtext", "annotation")
_IN_LINES = ("a", "b", "code", "em", "font", "i", "img", "span", "strong", "u")
_CODE = ("code", "kbd", "samp", "tt")
_NO_CODE = "pre, table, ul, ol, h1, h2, h3, h4, h5, h6"  # if it stands in some
_TICKED = ("checkbox", "radio")  # inputs
_TICKS = (" [ ] ", " [x] ")
_WITHOUT_TEXT = ("color", "file", "hidden", "image", "password", "range")
_SEEN = {0xA0: " ", 0xAD: None, 0x200B: None}  # a blank, and where a word may be parted
_UNREAD = (
    "nav, template, div[role=navigation], ul[role=navigation], .mw-editsection, .mw-cite-backlink,"
    "svg :is(symbol, defs):not(:has(text, foreignObject))"  # names of icons
)
_MARKS = frozenset("¶§↩↵↑⇧🔗\ufe0e\ufe0f")  # links that lead to where they stand, or back
_HEADING_MARKS = _MARKS | frozenset("#^")  # operators elsewhere
_WITHIN_WORD = re.compile("(?<=[{0}]) *\n[ \t\n]*(?=[{0}])".format("\u3000-\u30ff\u3400-\u9fff\uff00-\uff60"))
_UNSEEN_SIGNS = re.compile(f"[\u00a0\u00ad\u200b]|{_WITHIN_WORD.pattern}")
_LONGEST_DATA_URL = 100
# Formulas a second time, as KaTeX and MediaWiki draw them for the eye.
_DRAWN_AGAIN = (
    ".katex-mathml + .katex-html, .mwe-math-mathml-a11y + img, annotation-xml[encoding^='MathML'],"
    "[class^=MathJax] + script[type^='math/mml']"
)
_DRAWN_BEFORE = (
    "[class^=MathJax]:has(+ script[type^='math/tex'], + [class^=MathJax] + script[type^='math/tex'])"
)
# Beside or in front of each line of code, as generators of documentation write them.
_LINE_NUMBERS = (
    ":is(pre, .fragment, .line-numbers-wrapper)"
    " :is(.linenos, .lineno, .line-number, .ln, .lnt, .lineNum, .py-lineno, .source-line-no, .sourceLineNo,"
    " a[data-nosnippet]):not(:has(*)), pre:is(.linenos, .lineno), td:has(> pre.lines):has(+ td pre),"
    "tr:has(pre) > td:is(.linenos, .gutter, .linenumbers, .lntd:has(.lnt)):not(:has(td))"
)
# Doxygen's and SyntaxHighlighter's (of Confluence and WordPress) beside those of HTML.
_SAMPLES = "xmp, listing, div.fragment:has(> div.line), .syntaxhighlighter div.container:has(> div.line)"
# Of styles: a line of its own; all its blanks kept, as code; lines kept.
_LINE = re.compile(r"(?<![\w-])display\s*:\s*block(?![\w-])", re.I)
_CODE_STYLE = re.compile(r"(?<![\w-])white-space\s*:\s*pre\b(?!-)", re.I)
_WRAPPED_STYLE = re.compile(r"(?<![\w-])white-space\s*:\s*(?:pre-wrap|break-spaces)", re.I)
_CODE_FONT = re.compile(r"monospace|consolas|menlo|courier", re.I)
_INDENTED = re.compile(r"^[ \xa0]{2,}\S", re.M)
_KEEPING = re.compile(r"(?<![\w-])white-space\s*:\s*(?:pre|break)", re.I)
_TEX = "math annotation[encoding='application/x-tex']"
# No character of any text. It stands around code in a line, which would become HTML beside another backtick.
_APART = "\ufdd0"


def _take_title(page: Document) -> str:
    titles = [each for each in page.find_all("title") if each.namespace.value == "html"]
    for other in titles[1:]:
        other.tag = "p"
    if (body := page.find("body")) and (late := page.select("head > p")):  # the writer leaves the head out
        body.insert(0, apart := Element("div"))
        for other in late:
            apart.append(other.extract())
    return " ".join(titles[0].extract().text.split()) if titles else ""


def _prepare(page: Document) -> None:
    """Drop what is not read, and give the writer only what it writes whole."""
    for menu in page.select(_UNREAD):
        place = menu.source_location
        menu.decompose() if place and place.end_tag else menu.unwrap()
    page.remove("iframe, body > input:has(+ label:empty, + input + label:empty)")  # these open menus
    for sample in page.select(_SAMPLES):
        sample.tag = "pre"
    _drop_marks(page)
    _take_from_confluence(page)
    for struck in page.select("span[style*='line-through' i]"):
        struck.tag = "s"
    for box in page.select("[role=checkbox][aria-checked]:not(input), .checkbox-on, .checkbox-off"):
        ticked = box.attr("aria-checked") == "true" or "checkbox-on" in (box.attr("class") or "").split()
        box.tag = "span"
        box.insert(0, Text(_TICKS[ticked]))
    for line in page.select("pre.fragment > div.line"):
        if isinstance(end := line.next_sibling, Text) and end.data.isspace():
            end.extract()
    _keep_lines(page)
    for label in page.select("label + label:not(pre *)"):  # they stand apart, as tabs
        label.insert_before(Text(" "))
    for group in page.select("optgroup[label], option[label]:empty"):
        group.insert(0, Text(f" {group.attr('label')} "))
    for block in page.select(_BLOCKS):
        block.tag = "div"
    _keep_one_form(page)
    for formula in page.select("script[type^='math/']"):
        formula.tag = "span"
    for gap, heading in _nearest(page.select("br"), *_HEADINGS):
        if heading is not None:
            gap.replace_with(Text(" "))
    for button in page.select("pre > button:last-child"):  # "Copy" is no code
        if button.next_sibling is None and (code := button.closest("pre")):
            code.insert_after(button.extract())
    for picture in page.select("[src^='data:'], [href^='data:']"):
        for name in ("src", "href"):
            if len(picture.attr(name) or "") > _LONGEST_DATA_URL:
                picture.attrs[name] = ""  # the picture itself, in letters
    for named in page.select("[alt], [title]"):
        for name in ("alt", "title"):
            if said := named.attr(name):
                named.attrs[name] = " ".join(said.translate(_SEEN).split())
    for spot in page.select("area[alt], input[type=image i][alt]"):
        spot.insert_after(Text(f" {spot.attr('alt')} "))
    for picture in page.select(r"img[alt*='\\']"):  # of a formula: the writer would double these signs
        picture.replace_with(Text(f"![{picture.attr('alt')}](<{picture.attr('src') or ''}>)"))
    for field in page.select("input"):
        kind = (field.attr("type") or "").lower()
        if kind in _TICKED:
            field.insert_after(Text(_TICKS["checked" in field.attrs]))
        elif kind not in _WITHOUT_TEXT and (value := field.attr("value")):
            field.insert_after(Text(f" {value} "))
    for numbered in page.select("ol[reversed]"):
        _count_down(numbered)
    write_signs(page)
    texts = (each for each in page.descendants if isinstance(each, Text))
    for text, code in _nearest([text for text in texts if _UNSEEN_SIGNS.search(text.data)], "pre"):
        if code is None:
            seen = text.data.translate(_SEEN)
            text.data = seen if getattr(text.parent, "tag", "") == "textarea" else _WITHIN_WORD.sub("", seen)
    _block_code(page)
    for sample, code in _nearest(page.select(", ".join(_CODE)), "pre"):
        if code is None:
            sample.insert_before(Text(_APART))
            sample.insert_after(Text(_APART))
    for foot in page.select("table > tfoot"):
        if around := foot.closest("table"):
            around.append(foot.extract())
    tables = page.find_all("table")
    layout = set(_all_nearest(page.select("pre, table") if tables else [], "table"))
    whole = set(_all_nearest(page.select(_OF_PAGES) if tables else [], "table"))
    for table in tables:
        _unfold(table) if table in layout or _lays_out(table, table in whole) else _complete(table)


def _drop_marks(page: Document) -> None:
    """Drop what generators of documentation add: numbers of code's lines, links to where they stand."""
    for number in page.select(_LINE_NUMBERS):
        before = number.previous_sibling
        told = before.data if isinstance(before, Text) else before.text if isinstance(before, Element) else ""
        begins = number.tag == "td" or not told.rpartition("\n")[2].strip()
        if begins and "".join(number.text.split()).isdigit():
            number.decompose()
    for link in page.select("a[href]:not(:has(img, input))"):
        shown = link.text.translate(_SEEN).strip()
        marks = _HEADING_MARKS if link.closest(", ".join(_HEADINGS)) else _MARKS
        if not shown:
            link.unwrap()
        elif (link.attr("href") or "").startswith("#") and marks.issuperset(shown):
            link.decompose()


_OF_CONFLUENCE = {"parameter": "div", "plain-text-body": "pre", "task-list": "ul", "task": "li"}


def _take_from_confluence(page: Document) -> None:
    """Give Confluence's own elements the names of HTML's, and write what it shows of their attributes."""
    for name, known in _OF_CONFLUENCE.items():
        for part in page.find_all(f"ac:{name}"):
            part.tag = known
    for number in page.find_all("ac:task-id"):
        number.decompose()
    for status in page.find_all("ac:task-status"):
        status.replace_with(Text(_TICKS[status.text.strip() == "complete"]))
    for link in page.find_all("ac:link"):
        for led_to in (*link.find_all("ri:page"), *link.find_all("ri:attachment")) if not link.text else ():
            link.append(Text(led_to.attr("ri:content-title") or led_to.attr("ri:filename") or ""))
    for picture in page.find_all("ac:image"):
        if said := picture.attr("ac:alt"):
            picture.append(Text(f"![{said}](<>)"))
    for day in page.select("time[datetime]:empty"):
        day.append(Text(day.attr("datetime") or ""))


def _keep_lines(page: Document) -> None:
    """Keep the lines that a page's styles make. The writer would make a block of code of each element, even
    of a word, whose style keeps its blanks."""
    for block in page.select("span[style*='display' i]"):
        if _LINE.search(block.attr("style") or ""):
            block.tag = "div"
    for more in page.select("pre > code + code"):
        before = more.previous_sibling
        if isinstance(before, Element) and not before.text.endswith("\n"):
            more.insert_before(Text("\n"))
    styles = {box: box.attr("style") or "" for box in page.select("div[style*='white-space' i]")}
    wrapped = [box for box, style in styles.items() if _WRAPPED_STYLE.search(style)]
    texts = (each for each in page.descendants if wrapped and isinstance(each, Text))
    boxes = [box for box, style in styles.items() if _CODE_STYLE.search(style)]
    boxes += [box for box in wrapped if _CODE_FONT.search(styles[box])]
    boxes += _all_nearest([text for text in texts if _INDENTED.search(text.data)], *wrapped)
    mixed = _all_nearest(page.select(f"a, img, {_NO_CODE}") if boxes else [], *boxes)
    for box in set(boxes).difference(mixed):  # code, as editors copy it
        box.tag = "pre"
    for gap, code in _nearest(page.select("div + br"), "pre"):
        if code is not None:  # an empty line, as editors copy it
            gap.replace_with(Text("\n"))
    styled = page.select("[style*='white-space' i]:not(pre)")
    kept = {part for part in styled if _KEEPING.search(part.attr("style") or "")}
    for part in styled:
        part.attrs["style"] = ""
    texts = (each for each in page.descendants if kept and isinstance(each, Text))
    for text, around in _nearest([text for text in texts if "\n" in text.data], "pre", "textarea", *styled):
        if around in kept:
            said = text.data
            begin = 0 if _runs_on(text.previous_sibling) else len(said) - len(said.lstrip())
            end = len(said) if _runs_on(text.next_sibling) else len(said.rstrip())
            first, *lines = said[begin:end].split("\n")
            text.data = said[:begin] + first
            text.insert_after(Text(said[max(begin, end) :]))
            for line in reversed(lines):
                text.insert_after(Text(line))
                text.insert_after(Element("br"))


def _runs_on(node: Node | None) -> bool:
    return isinstance(node, Text) or (isinstance(node, Element) and node.tag in _IN_LINES)


def _block_code(page: Document) -> None:
    """Make blocks of code with several lines, which would be one line within others, and write what would be
    left out of blocks: what pictures show, where links lead."""
    alone = ("pre", "table", "a", *_HEADINGS)
    for field, around in _nearest(page.select("textarea"), *alone):
        if around is None and "\n" in field.text.strip():
            field.tag = "pre"
    for around in _all_nearest(page.select("pre"), "a", *_HEADINGS):
        leads_to = around.attr("href") or "#"
        if not leads_to.startswith("#"):
            around.insert_after(below := Element("a", {"href": leads_to}))
            below.append(Text(leads_to))
        around.tag = "div"
    for around in _all_nearest(page.select(_NO_CODE), *_CODE):
        around.tag = "div"
    prose = set(_all_nearest(page.select("tt :is(a, img, p)"), "tt"))  # in letters of a typewriter
    lines = page.select("br, p, div") if page.select_one(", ".join(_CODE)) else []
    for sample, outer in _nearest(_all_nearest(lines, *_CODE), *alone):
        if outer is None:
            sample.tag = "div" if sample in prose else "pre"
            for text in [each for each in sample.descendants if isinstance(each, Text)]:
                text.data = text.data.replace("\n", " ")
    for picture, code in _nearest(page.select("img[alt]"), "pre", *_CODE):
        if code is not None:
            picture.replace_with(Text(picture.attr("alt") or ""))
    links = _nearest(page.select("a[href*='://']:not([title])"), "pre")
    far = [(link, code) for link, code in links if code is not None]
    marked_up = {code for _, code in _nearest(page.select("code, span") if far else [], "pre")}
    for link, code in far:
        address = link.attr("href") or ""
        if code not in marked_up and address.rstrip("/") not in link.text:
            link.insert(0, Text("["))
            link.append(Text(f"]({address})"))


def _keep_one_form(page: Document) -> None:
    """Keep one form of each formula, TeX where it stands beside another."""
    for again in page.select(f"{_DRAWN_AGAIN}, {_DRAWN_BEFORE}"):
        again.decompose()
    formulas = {formula: tex.text.strip() for tex, formula in _nearest(page.select(_TEX), "math")}
    for drawn, written in formulas.items():
        if drawn is not None and written:
            drawn.replace_with(Text(f" {written} "))


def _count_down(numbered: Element) -> None:
    """Give each item its number, counting down; the writer would count up."""
    items = [item for item in numbered.children if isinstance(item, Element) and item.tag == "li"]
    number = _number(numbered.attr("start"), len(items))
    for item in items:
        number = _number(item.attr("value"), number)
        item.attrs["value"] = str(number)
        number -= 1


def _number(written: str | None, default: int) -> int:
    return int(written) if written and re.fullmatch(r"\d{1,9}", written) else default


def _nearest(nodes: Iterable[N], *around: str | Element) -> Iterator[tuple[N, Element | None]]:
    """Yield each of these with the nearest element around it that is one of those, or has such a name. No
    node is looked at twice."""
    sought = frozenset(around)
    known: dict[Node | None, Element | None] = {None: None}  # what is found from a node outwards
    for inner in nodes:
        path, node = list[Node](), inner.parent
        while node not in known:
            if isinstance(node, Element) and (node.tag in sought or node in sought):
                known[node] = node
            elif node is not None:
                path.append(node)
                node = node.parent
        known.update(dict.fromkeys(path, known[node]))
        yield inner, known[node]


def _all_nearest(nodes: Iterable[Node], *around: str | Element) -> list[Element]:
    """Return the elements of such names that are the nearest ones around any of these, each once."""
    return list(dict.fromkeys(found for _, found in _nearest(nodes, *around) if found is not None))


_ROWS = ("thead", "tbody", "tfoot", "tr")
_CELLS = ("td", "th")
_MOST_SPANNED = 1000
_OF_PAGES = "h1, h2, h3, h4, h5, h6, ul, ol, blockquote, p + p"
_SPARSE = 100  # times as many cells as there are: then rows are not filled up


def _parts(table: Element) -> Iterator[Element]:
    """Yield the sections, rows and cells of this table, not of those inside it."""
    waiting = list(table.children)
    for part in waiting:
        if isinstance(part, Element) and part.tag in (*_ROWS, *_CELLS, "caption"):
            yield part
            if part.tag in _ROWS:
                waiting += part.children


def _unfold(table: Element) -> None:
    """Make paragraphs of a table's cells if they hold what no row of one line does: code, tables, pages."""
    for part in (table, *_parts(table)):
        part.tag = "div"


def _lays_out(table: Element, holds_blocks: bool) -> bool:
    """Return whether a table is no table of values: of it being one column, said to be none, and holding a
    page's blocks, two are true."""
    tags = [part.tag for part in _parts(table)]
    column = sum(tag in _CELLS for tag in tags) <= tags.count("tr")
    return column + (table.attr("role") in ("presentation", "none")) + holds_blocks >= 2


def _complete(table: Element) -> None:
    """Give each cell its column, and every row as many cells as the longest: only then it is written as a
    table. Where a cell spans others, they are empty."""
    rows: dict[Element, list[Element]] = {}
    for part in list(_parts(table)):
        if part.tag == "caption":
            part.tag = "p"
            table.insert_before(part.extract())
        elif part.tag == "tr":
            rows[part] = [cell for cell in part.children if isinstance(cell, Element) and cell.tag in _CELLS]
    most = _SPARSE * sum(map(len, rows.values()))
    gaps: list[tuple[Element, int]] = []  # how many cells are missing before one
    filled: dict[Element, int] = {}
    section: Node | None = None
    taken: dict[int, int] = {}  # the last row that a cell above reaches into, by column
    width = steps = 0
    for number, (row, cells) in enumerate(rows.items()):
        if row.parent is not section:
            section, taken = row.parent, {}
        column = filled[row] = 0
        for cell in cells:
            while taken.get(column, -1) >= number and steps <= most:
                column, steps = column + 1, steps + 1
            gaps.append((cell, column - filled[row]))
            filled[row] = column + 1
            across, down = _spanned(cell, "colspan"), _spanned(cell, "rowspan")
            if down > 1:
                taken |= dict.fromkeys(range(column, column + across), number + down - 1)
            column, steps = column + across, steps + across
            width = max(width, filled[row])
            if max(steps, width * len(rows)) > most:
                return _unfold(table)
    for cell, count in gaps:
        for _ in range(count):
            cell.insert_before(Element("td"))
    for row, count in filled.items():
        for _ in range(width - count):
            row.append(Element("td"))


def _spanned(cell: Element, name: str) -> int:
    """Return over how many columns or rows a cell reaches, and take that from it."""
    reaches = max(1, min(_number(cell.attr(name), 1), _MOST_SPANNED))
    if name in cell.attrs:
        del cell.attrs[name]
    return reaches


def _notation() -> Markdown:
    return Markdown(
        # Not escaped: a word with a sign of Markdown before or in it would no longer be found.
        inline=Markdown.Inline(ignore_emphasis=True),
        escaping=Markdown.Escaping(mode="none", asterisks=False, underscores=False),
        tables=Markdown.Tables(cell_blocks="text"),
        converters={
            "br": lambda _, text: "\n",  # the writer's own takes quadratic time where many follow each other
            **{name: lambda _, text: f"~~{text}~~" for name in ("del", "s", "strike")},
            **{name: lambda _, text: f" {text} " for name in (*_BOXES, *_IN_DRAWINGS)},
        },
    )
