"""Every visible word of a page is kept, in order, whatever stands around it."""

from __future__ import annotations

import html
import itertools
import resource
import time

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from blendrag.index.html import markdown, read_html
from blendrag.index.text import Content


def words_in(text: str, *words: str) -> None:
    at = 0
    for word in words:
        found = text.find(word, at)
        assert found >= 0, f"{word!r} is not in {text[at : at + 500]!r}"
        at = found + len(word)


# -- generated pages ---------------------------------------------------------------------------------------

WORDS = st.text("abXé漢*_`<>&#[]()~\\-.!", min_size=1, max_size=6)
TWICE = "<math><semantics><msup><mi>x</mi><mn>2</mn></msup>"
TWICE += "<annotation encoding='application/x-tex'>x^2</annotation></semantics></math>"
INLINE = ("b", "i", "em", "strong", "span", "code", "a href='u'", "sub", "small", "label", "kbd", "u", "font",
          "span style=white-space:pre-wrap", "span style=display:block")  # fmt: skip
BLOCK = (
    "p", "div", "h1", "h3", "blockquote", "pre", "section", "article", "header", "footer", "aside", "main",
    "form", "details", "figure", "figcaption", "noscript", "center", "fieldset", "dialog", "button",
    "textarea", "object", "div style=white-space:pre",
)  # fmt: skip
GROUPS = {"ul": "li", "ol": "li", "ol start=7": "li", "dl": "dd", "select": "option"}
UNREAD = ("script", "style", "nav", "template", "iframe")
STRAY = (
    "<br>", "<hr>", "<br><br><br><br>", "<!-- note -->", "<img src=x>", "\n", "  ", "&nbsp;", "<wbr>",
    "<nav></nav>",
)  # fmt: skip

Piece = tuple[str, tuple[str, ...]]  # markup, and the words of it that are seen


def joined(pieces: list[Piece]) -> Piece:
    return "".join(piece[0] for piece in pieces), tuple(itertools.chain(*(piece[1] for piece in pieces)))


def wrapped(tag: str, inside: Piece) -> Piece:
    return f"<{tag}>{inside[0]}</{tag.split()[0]}>", inside[1]


def row(cells: list[Piece]) -> Piece:
    return wrapped("tr", joined([wrapped("td", cell) for cell in cells]))


texts = WORDS.map(lambda word: (f" {html.escape(word)} ", (word,)))
unread = st.tuples(st.sampled_from(UNREAD), WORDS).map(
    lambda each: (f"<{each[0]}>{html.escape(each[1])}</{each[0]}>", ())
)
leaves = texts | texts | unread | st.sampled_from(STRAY).map(lambda markup: (markup, ()))


def around(inside: st.SearchStrategy[Piece]) -> st.SearchStrategy[Piece]:
    several = st.lists(inside, max_size=4)
    table = st.lists(several.map(row), max_size=3).map(lambda rows: wrapped("table", joined(rows)))
    group = st.tuples(st.sampled_from(sorted(GROUPS)), several).map(
        lambda each: wrapped(each[0], joined([wrapped(GROUPS[each[0]], item) for item in each[1]]))
    )
    plain = st.tuples(st.sampled_from(INLINE + BLOCK), several).map(
        lambda each: wrapped(each[0], joined(each[1]))
    )
    return plain | plain | group | table


pages = st.lists(st.recursive(leaves, around, max_leaves=25), max_size=5).map(joined)


@given(pages)
def test_every_visible_word_of_any_page_is_kept_in_order(page: Piece) -> None:
    markup, words = page
    assume_readable(markup)
    text = markdown(markup).text
    words_in(text, *words)
    assert "<table" not in text and "<code" not in text


def assume_readable(markup: str) -> None:
    """A textarea holds text, not elements: what is in it is shown as it is written."""
    for part in markup.split("<textarea>")[1:]:
        assume("<" not in part.partition("</textarea>")[0])


@example("a\n\n\n b  \n```\n\t c \u00a0|\n````")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\f\ufdd0")))
def test_code_is_kept_byte_for_byte(code: str) -> None:
    text = markdown(f"<p>x</p><pre>\n<code class=language-sh>{html.escape(code)}</code></pre><p>y</p>").text
    if code.strip():
        before, _, rest = text.partition("sh\n")
        fence = before.removeprefix("x\n\n")
        assert set(fence) == {"`"} and rest == f"{code.removesuffix(chr(10))}\n{fence}\n\ny"


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    markdown(text).text.encode("utf-8", "surrogatepass")


# -- what is never closed ----------------------------------------------------------------------------------

SWALLOWING = (
    "<!--", "<![CDATA[", "<title>", "<script>", "<style>", "<textarea>", "<template>", "<nav>", "<svg>",
    "<math>", "<iframe>", "<xmp>", "<noscript>", "<plaintext>", "<noembed>", "<noframes>", "<frameset>",
    "<select>", "<object>", "<datalist>", "<rp>", "<head>", "<table>", "<pre>", "<p title=\"", "<a href='",
    "<p ", "<", "</", "<!", "<?", "<script/>", "<title/>", "<SCRIPT>", "<nav><nav></nav>",
    "<template><template></template>", "<!-- a --><!--",
)  # fmt: skip


@pytest.mark.parametrize("opening", SWALLOWING)
def test_opening_that_is_never_closed_takes_no_text(opening: str) -> None:
    text = markdown(
        f"<html><body><p>Hello</p>{opening} <p>The fee is 30 EUR.</p><p>Turku</p></body></html>"
    ).text
    words_in(text, "Hello", "fee is 30 EUR.", "Turku")


def test_closed_openings_are_not_shown() -> None:
    page = "<!-- a --><script>b</script><style>c</style><nav>d</nav><template>e</template><p>seen<nav>f</nav>"
    assert markdown(page).text == "seen"


def test_xhtml_is_read() -> None:
    page = (
        b"<?xml version='1.0' encoding='iso-8859-2'?><html xmlns='http://www.w3.org/1999/xhtml'><head><title/>"
        b"<script src='a'/></head><body><p>za\xbf\xf3\xb3\xe6</p><![CDATA[a < b]]></body></html>"
    )
    words_in(read_html(page).text, "zażółć", "a < b")


# -- structure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<ol start=5><li>close<li>drain<ol><li>deep</ol></ol>", "5. close\n6. drain\n   1. deep"),
        ("<ol><li>a<li value=7>b<li>c</ol>", "1. a\n7. b\n8. c"),
        ("<ol reversed><li>a<li>b</ol>", "2. a\n1. b"),
        ("<ul><li><p>a</p><p>b</p><li>c</ul>", "- a\n\n  b\n\n- c"),
        ("<a href=forms/b7.pdf>form</a>", "[form](forms/b7.pdf)"),
        ("<img src=c.png alt='crane, 40 t'>", "![crane, 40 t](c.png)"),
        ("<p>one\n two<br>three", "one two\nthree"),
        ("<p>snake_case a*b 30&nbsp;EUR &lt;tag&gt;", "snake_case a*b 30 EUR <tag>"),
        ("承認を\n 得て、\r\n精算 する。\nof <b>Office\n部</b>", "承認を得て、精算 する。 of Office 部"),
        ("<pre>承認を\n得て</pre><p>姓　\n　名", "```\n承認を\n得て\n```\n\n姓　　名"),
        ("<textarea>承&shy;認を\n得て</textarea>", "```\n承認を\n得て\n```"),
        ("un&shy;be<wbr>liev&#8203;able <math><mn>1</mn><mn>2</mn></math>", "unbelievable  1  2"),
        ("un<b>believ</b>able <del>not</del>", "unbelievable ~~not~~"),
        ("<table><caption>C</caption><tr><th>a<th>b</table>", "C\n\n| a | b |\n| --- | --- |"),
        ("<table><tr><th>a<th>b<tr><td colspan=2>c</table>", "| a | b |\n| --- | --- |\n| c |  |"),
        (
            "<table><tr><th rowspan=2>A<th colspan=2>B<tr><th>b<th>c<tr><td>1<td>2<td>3</table>",
            "| A | B |  |\n| --- | --- | --- |\n|  | b | c |\n| 1 | 2 | 3 |",
        ),
        (
            "<table><tr><td>1<td rowspan=9>m<td>3<tr><td>4<td>6<tbody><tr><td colspan=99>7</table>",
            "| 1 | m | 3 |\n| --- | --- | --- |\n| 4 |  | 6 |\n| 7 |  |  |",
        ),
        ("<table><tfoot><tr><td>5<tbody><tr><td>2<tr><td>3</table>", "| 2 |\n| --- |\n| 3 |\n| 5 |"),
        ("<table><tr><td>1<td><pre>a\n b</pre></table>", "1\n\n```\na\n b\n```"),
        ("<select><option>one<option>two</select>", "one\n\ntwo"),
        ("<select><optgroup label=Kinds><option>one</optgroup></select>", "Kinds\n\none"),
        ("<li><input type=checkbox checked>done<li><input type=radio>open", "[x] done\n\n[ ] open"),
        ("<p>10<sup>2</sup> 2<sup>n</sup> 10<sup>−3</sup> note<sup>3</sup>", "10^2 2^n 10^−3 note^3"),
        ("<p>1<sup>st</sup> A<sup>TM</sup> <sup>3</sup> below H<sub>2</sub>O", "1st ATM 3 below H2O"),
        ("<p>m<math><msup><mi>c</mi><mn>2</mn></msup><mfrac><mn>1</mn><mi>x</mi></mfrac>", "m c ^ 2  1 / x"),
        ("<p>1<sup>1</sup>/<sub>2</sub> 3<sup>1</sup>⁄<sub>4</sub> 2<sup>1</sup>/x", "1 1/2 3 1⁄4 2^1/x"),
        ("<p>XIX<sup>e</sup> n<sup>o</sup> 1<sup>a</sup>", "XIXe no 1a"),
        ("<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mi>c</mi></mfrac>", "( a  +  b )/ c"),
        ("<math><msup><mi>x</mi><mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow></msup>", "x ^( n  +  1 )"),
        ("<p><math><msqrt><mi>a</mi></msqrt><mroot><mi>x</mi><mn>3</mn></mroot>", "√( a )√[ 3 ]( x )"),
        ("<m:math><m:msup><m:mi>x</m:mi><m:mn>2</m:mn></m:msup></m:math>", "x ^ 2"),
        ("<p><math><mi>f</mi><mfenced><mi>x</mi></mfenced>", "f ( x )"),
        ("<math><mfenced open='{' close=''><mi>x</mi></mfenced>", "{ x"),
        ("<p><b class=MathJax>2</b><script type='math/mml'><math><mi>x</mi></math></script>", "2"),
        ("<math><munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>", "∑ _ i ^ n"),
        (f"<p>So <i class=katex-mathml>{TWICE}</i><i class=katex-html>x2</i> holds", "So x^2 holds"),
        (f"<p>So <i class=mwe-math-mathml-a11y>{TWICE}</i><img src=x.svg alt='x^2'>.", "So x^2 ."),
        (f"<math>{TWICE}<semantics><annotation encoding='application/x-tex'>y</annotation>", "y"),
        ("<math><semantics><mi>x</mi><annotation-xml encoding=MathML-Content>x</annotation-xml>", "x"),
        ("<p>So <script type='math/tex'>m c^2</script>.", "So m c^2."),
        ("<p><b class=MathJax_Preview></b><b class=MathJax>2</b><script type='math/tex'>x^2</script>", "x^2"),
        (r"<p>So <img alt='\frac{a}{b}' src=x.svg>.", r"So ![\frac{a}{b}](<x.svg>)."),
        ("<h1>Lifting<br>gear</h1>", "# Lifting gear"),
        ("<ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp></ruby>字", "漢(かん)字"),
        ("<ruby>漢<rt>かん</rt>字<rt>じ</rt></ruby>", "漢(かん)字(じ)"),
        ("<p>to <input value='Anna'><input type=hidden value=token></p>", "to Anna"),
        (f"<img alt=dot src='data:image/png;base64,{'A' * 200}'>", "![dot](<>)"),
        ("<div role=navigation>menu</div>main", "main"),
        ("<h2>Use<a href=#use>¶</a></h2><p>a<a href=#n1>[1]</a> <a href=#top>↩</a>", "## Use\n\na[[1]](#n1)"),
        ("<p>a<a href='/run?code=1' title=Run></a><a href=u>&#8203;</a> <a href=u>→</a>", "a [→](u)"),
        ("<pre>a\n b<button>Copy</button></pre>", "```\na\n b\n```\n\n Copy"),
        ("<label>Linux</label><label>Mac</label>, <label>Na</label>me", "Linux Mac, Name"),
        ("<pre><i class=linenos> 1</i>a\n<i class=ln>2 </i> b\n</pre>", "```\na\n b\n```"),
        ("<p><b class=lineno>Line 5</b>: a <b class=line-number>42</b>", "Line 5: a 42"),
        ("<pre>x = <i class=ln>2</i> + 1</pre>", "```\nx = 2 + 1\n```"),
        ("<table><tr><th>a<th>b<tr><td class=linenos>1<td>9</table>", "| a | b |\n| --- | --- |\n| 1 | 9 |"),
        ("<p><a href=#op>+</a> and <a href=#>★★</a>", "[+](#op) and [★★](#)"),
        ("<h2>Use <a href=#use>#</a></h2>", "## Use"),
        ("<table><tr><td class=linenos><pre>1</pre><td><pre>a</pre></table>", "```\na\n```"),
        ("<table><tr><td class=lntd><pre><i class=lnt>1</i></pre><td><pre>a</pre></table>", "```\na\n```"),
        (
            "<div class=fragment><div class=line>if (x)</div>\n<div class=line>  y;</div>\n</div>",
            "```\nif (x)\n  y;\n```",
        ),
        ("<div class=syntaxhighlighter><table><tr><td class=gutter>1<td><div class=container><div class=line>"
         "<code>a:</code></div><div class=line><code>&nbsp; </code><code>b</code></div></div></table></div>",
         "```\na:\n\xa0 b\n```"),
        ("<h2>Fees</h2><b class=mw-editsection>[<a href=u>edit</a>]</b>x <b class=mw-cite-backlink>^</b>",
         "## Fees\n\nx"),
        ("<p><b style='white-space:pre-wrap'>The </b><i style='WHITE-SPACE: pre'>fee</i>", "The fee"),
        ("<p style='white-space:pre-wrap'>a\n b<a href=u>c</a>\n<img src=s alt=d>", "a\nb[c](u)\n![d](s)"),
        ("<body style='white-space:pre-wrap'><h1>A</h1>\n\n<ul>\n<li>b\n<li>c</ul>", "# A\n\n- b\n- c"),
        ("<table><td style='white-space:pre'>a\nb<td>c", "| a b | c |\n| --- | --- |"),
        ("<h2 style='white-space:pre-wrap'>a<b style='white-space:normal'>\nb</b>", "## a b"),
        ("<div style='a:b;white-space: pre;'><div>x:</div><div>  y</div></div>", "```\nx:\n  y\n```"),
        ("<div style='white-space:pre'>a <a href=u>b</a></div>", "a [b](u)"),
        ("<div style='font-family:monospace;white-space:pre-wrap'>x:\n y</div>", "```\nx:\n y\n```"),
        ("<div style='font:9px Menlo;white-space:break-spaces'><b>x:</b>\n y</div>", "```\nx:\n y\n```"),
        ("<div style='white-space:pre-wrap'>x:\n  y</div>", "```\nx:\n  y\n```"),
        ("<div style='white-space:pre-wrap'>\n  <p>a\n b</p>\n  <p>c</p></div>", "a\nb\n\nc"),
        ("<div style='white-space:pre-wrap'>  a<h2>b</h2>c</div>", "a\n\n## b\n\nc"),
        ("<pre><code>a</code><code>b\n</code><code>c</code> <code>d</code></pre>", "```\na\nb\nc d\n```"),
        ("<pre><span style='display:block'>a</span><span style='display: block'>b</span>", "```\na\nb\n```"),
        ("<p><span style='display:block'>a</span>b <span style='display:block-ruby'>c</span>", "a\n\nb c"),
        ("run <code>a:<br>&nbsp; b</code> now", "run\n\n```\na:\n  b\n```\n\nnow"),
        ("<samp><p>a\nb</p><p>c</p></samp><kbd><div>d</div></kbd>", "```\na b\nc\n```\n\n```\nd\n```"),
        ("<tt><p>a <a href=u>b</a>\n<img src=s alt=c></p><p>d</p></tt>", "a [b](u) ![c](s)\n\nd"),
        ("so <tt>x:<br>&nbsp; y</tt>", "so\n\n```\nx:\n  y\n```"),
        ("<code style='white-space:pre'>a\n  b</code>", "```\na\n  b\n```"),
        ("<code>a <pre>b\n c</pre></code><tt><ul><li>d</ul></tt>", "a\n\n```\nb\n c\n```\n\n- d"),
        ("<table><tr><td><code>a<br>b</code><td>c</table>", "| `a b` | c |\n| --- | --- |"),
        ("<a href=u>a<pre>b\n c</pre></a><h2><pre>d", "a\n\n```\nb\n c\n```\n\n[u](u)\n\n```\nd\n```"),
        ("a <textarea>b\n  c</textarea> <textarea>d</textarea>", "a\n\n```\nb\n  c\n```\n\n d"),
        ("<pre>x <img src=u alt='(1)'>\ny</pre><kbd>a <img src=u alt=b>", "```\nx (1)\ny\n```\n\n`a b`"),
        ("<pre><a href=x://b>b</a> <a href=x://y>c x://y</a> <a href=d>d", "```\n[b](x://b) c x://y d\n```"),
        ("<pre><code><a href=x://y>a</a></code> <a href=x://y>b", "```\na b\n```"),
        ("<pre><a href=x://y title=T>a</a>", "```\na\n```"),
        ("<img src=s alt='a\n b&nbsp;c'> <a href=u title='d\n\te'>f</a>", '![a b c](s) [f](u "d e")'),
        ("<p>11<sub>2</sub> log<sub>2</sub>8 x<sub>1</sub>0 <b>7</b><sub>8", "11_2 log_(2)8 x_(1)0 7_8"),
        ("<p>CO<sub>2</sub> C<sub>6</sub>H<sub>12</sub> x<sub>1</sub><sup>2</sup>", "CO2 C6H12 x1^2"),
        ("<p>10<strong><sup>-3</sup></strong> <b>11<sub>2</sub></b>4 2<b><i><sup>n</sup></i></b><b>3</b>",
         "10^-3 11_(2)4 2^(n)3"),
        ("<pre><i class=source-line-no>1</i>a\n<i class=lineNum> 2 </i>b\n<a data-nosnippet>3</a>c",
         "```\na\nb\nc\n```"),
        ("<table><tr><td class=gutter><pre>1</pre><td><pre>a</table>", "```\na\n```"),
        ("<table><tr><td><pre class=lines>1\n2</pre><td><pre>a\nb</table>", "```\na\nb\n```"),
        ("<pre><div>a</div><br><div>b</div>c</pre>", "```\na\n\nb\nc\n```"),
        ("<body><input type=checkbox><label></label><p><input type=checkbox>a", "[ ] a"),
        ("<svg><symbol><title>a</title></symbol></svg>b<svg><defs><p>c", "b\n\nc"),
        ("<ac:parameter>py</ac:parameter><ac:plain-text-body><![CDATA[a\n  <b>]]></ac:plain-text-body>c",
         "py\n\n```\na\n  <b>\n```\n\nc"),
        ("<ac:task-list><ac:task><ac:task-id>1</ac:task-id><ac:task-status>complete</ac:task-status>"
         "<ac:task-body>a</ac:task-body></ac:task><ac:task><ac:task-body>b</ac:task-body></ac:task></ac:task-list>",
         "- [x] a\n- b"),
        ("<p>See <ac:link><ri:page ri:content-title='Fees' /></ac:link> by <time datetime='2026-01-02' /> or "
         "<ac:link><ri:page ri:content-title='Fees' /><ac:link-body>here</ac:link-body></ac:link>",
         "See Fees by 2026-01-02 or here"),
        ("<ac:image ac:alt='pump'><ri:attachment ri:filename='p.png' /></ac:image>", "![pump](<>)"),
        ("<ul><li><div class='checkbox checkbox-on'></div> a<li><div class=checkbox-off></div> b</ul>",
         "- [x] a\n- [ ] b"),
        ("<p><b role=checkbox aria-checked=false></b>a <i role=checkbox aria-checked=true>b", "[ ] a [x] b"),
        ("<p>Fee <span style='text-decoration:line-through'>30</span> 40", "Fee ~~30~~ 40"),
        ("<p>2<span style='Vertical-align: super'>3</span> 11<span style='vertical-align:sub'>2", "2^3 11_2"),
        ("<p>1<sup>–6</sup> 1<sup> -6</sup> 1<sup>\u2060−6</sup> 1<sup>2</sup>3", "1^–6 1^-6 1^−6 1^(2)3"),
        ("<p>2<sup>(n+1)</sup> 2<sup>(n-1)</sup> A<sup>(R)</sup>", "2^(n+1) 2^(n-1) A(R)"),
        ("<p>m<sup><span style='vertical-align:super'>2</span></sup> 2<sup>n<sup>2</sup></sup>", "m^2 2^n^2"),
        ("<p>m<span style='vertical-align:super'><sup>2</sup></span>3", "m^(2)3"),
        ("<p>word<a href=#fn1><sup>1</sup></a> 10<b><sup>2", "word[1](#fn1) 10^2"),
        ("<svg><defs><text>a</text></defs><symbol><title>b</title><text>c</text></symbol></svg>", "a b c"),
        ("<p>A <symbol>H2O</symbol> <defs>b", "A H2O b"),
        ("<pre>10<sup>2</sup> x<sub>1</sub>", "```\n10^2 x1\n```"),
        ("<table role=presentation><tr><td>a</table><table><tr><td>b</table>", "a\n\n| b |\n| --- |"),
        ("<table><tr><td><h1>A</h1>b<tr><td><ol><li>c</ol></table>", "# A\n\nb\n\n1. c"),
        ("<table><tr><td><p>a</p><p>b</p></table><table><tr><td>1<td><p>a</p><p>b</p></table>",
         "a\n\nb\n\n| 1 | a b |\n| --- | --- |"),
        ("<table role=none><tr><td><ul><li>a</ul><td>b</table>", "- a\n\nb"),
        ("<option label=a></option><input type=image alt=b><map><area alt=c href=u></map>", "a\n\nb c"),
    ],
)  # fmt: skip
def test_structure_is_markdown(page: str, text: str) -> None:
    assert markdown(page).text == text


XHTML = ("<?xml version='1.0'?><html>", '<html xmlns="http://www.w3.org/1999/xhtml">')


@pytest.mark.parametrize(
    ("tag", "written"),
    [("pre", "\n\n\n```\n```\n\n"), ("h2", "\n\n\n## \n\n"), ("code", "\n"), ("sup class='a'", "\n"),
     ("nav", "\n\n\n"), ("title", "\n"), ("m:mi", "\n  "), ("TEXTAREA", "\n  "), ("BR", "\n\n")],
)  # fmt: skip
def test_element_of_xhtml_that_is_closed_at_once_takes_no_text(tag: str, written: str) -> None:
    for head in XHTML:
        assert markdown(f"{head}<p>1<br/><{tag}/>b</p><p>c").text == f"1{written}b\n\nc"


def test_text_of_xhtml_that_is_read_as_it_is_stays_so() -> None:
    for head in XHTML:
        for tag, written in (("xmp", "```\n<a b='c'/>\n```\n\nd"), ("TEXTAREA", "<a b='c'/> d")):
            page = f"{head}<title>t</title><{tag} id='x'><a b='c'/></{tag}><i/>d"
            assert markdown(page).text == written


def test_title_stands_first_and_once() -> None:
    assert read_html(b"<title>T\n x</title><p>y") == Content("# T x\n\ny", {"title": "T x"})
    assert read_html(b"<title>T</title><h1>T</h1><p>y").text == "# T\n\ny"
    for title, text in (("日本", "日本語の"), ("한국", "한국의"), ("C", "C言語"), ("(T)", "a(T)b")):
        page = read_html(f"<title>{title}</title><p>{text}".encode())
        assert page == Content(text, {"title": title})
    assert read_html("<title>Дом</title><p>Дома".encode()).text == "# Дом\n\nДома"
    assert read_html(b"<title>API</title><h1>RAPID</h1>").text == "# API\n\n# RAPID"
    several = b"<head><title>T</title><title>U</title><title>V</title></head>y"
    assert read_html(several).text == "# T\n\nU\n\nV\n\ny"


@pytest.mark.parametrize(
    "page",
    [
        "<meta charset=windows-1251><p>Привет",
        "<meta http-equiv=content-type content='text/html; charset=windows-1251'><p>Привет",
    ],
)
def test_declared_encoding_is_used(page: str) -> None:
    assert read_html(page.encode("cp1251")).text == "Привет"


# -- size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    ["div", "b", "ul><li", "ol><li", "blockquote", "table><tr><td", "pre", "span", "a href=x", "font", "svg"],
)
def test_page_nested_10000_deep_keeps_every_word(tag: str) -> None:
    words = [f"w{depth}." for depth in range(10_000)]
    words_in(markdown("".join(f"<{tag}>{word} " for word in words)).text, *words)


REPEATED = (
    "<br>", "<br><b></b>", "<p>", "<div>", "<b>x</b>", "<td>x", "<tr><td>x", "<li>x", "&", "<", "<!--",
    "<![CDATA[", "<p a=\"", "<title>", "<script ", "<nav>", "<a b='", "`", "|", "[", "&nbsp;",
    "<pre>\u00a0", "<table><td>", "]]>", "<option>", "<meta ", "\n", "<caption>",
    "<mroot><mi>x</mi><mi>y</mi>", "<b class=MathJax>x</b>", "<h1><div><br>",
    "<b class=lineno>1", "<a href=#x>", "<label>x", "<div class=fragment><div class=line>",
    "<pre><button>", "<table><tfoot>", "<sup>", "<b></b><sup>", "<b><sub>1", "<code><br>", "<code><pre>",
    "<pre><a href=x://y>z", "<pre><code>x</code>", "<b><img alt=x>", "<div style='white-space:pre'>x<a>",
    "<div style='white-space:pre-wrap'>\n  x", "<tt><br><a>x", "<tt><p>",
    "<p style='white-space:pre'>\nx\n", "<span style='display:block'>", "<table><tr><td><ul>",
    "<title>x</title>", "<u>1<sup>2</sup>", "<b><sup>1", "<?xml <b a ", "<pre><div></div><br>",
    "<div></div><br><div>", "<input type=radio>", "<td><pre class=lines></pre>", "<svg><defs>",
    "<svg><symbol>", "<sup><span style=vertical-align:sub>", "<?xml ><xmp><a/>",
)  # fmt: skip


@pytest.mark.parametrize("piece", REPEATED)
def test_time_for_a_hostile_page_grows_no_faster_than_the_page(piece: str) -> None:
    def took(size: int) -> float:
        page = (piece * (size // len(piece)) + "END").encode()
        begin = time.process_time()
        assert "END" in read_html(page).text
        return time.process_time() - begin

    small, large = took(25_000), took(400_000)
    assert large < 60 * small + 1, "sixteen times the page, and quadratic were 256 times the time"


def test_ordinary_page_of_ten_megabytes_takes_seconds_and_less_than_a_gigabyte() -> None:
    part = (
        "<div><h2>Rule</h2><p>Some <b>bold</b> text, a <a href=x/y.html>link</a>.<ul><li>a<li>b</ul></div>\n"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    assert markdown(part * (10_000_000 // len(part))).text.count("## Rule") == 10_000_000 // len(part)
    assert time.monotonic() - begin < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000
