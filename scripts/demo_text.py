"""Plain text of HTML and Mallard pages, of manual pages, and of source files without their licence header."""

from __future__ import annotations

import gzip
import re
from html.parser import HTMLParser

SKIP = frozenset(
    ["script", "style", "head", "header", "nav", "aside", "footer", "button", "form", "noscript", "info", "svg"]
)
BLOCK = frozenset(
    ["p", "div", "li", "ul", "ol", "dl", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "tr", "title"]
    + ["section", "item", "note", "steps", "screen", "blockquote", "br", "body"]
)
VERBATIM = frozenset({"pre", "screen"})
FURNITURE = re.compile(r"docnav|navheader|navfooter|sphinxsidebar|related|headerlink|breadcrumb|toc|nav_|index-label")
VOID = frozenset({"br", "img", "meta", "link", "input", "hr", "col", "area", "base", "wbr", "source", "embed", "param"})


class _Page(HTMLParser):
    """Collects blocks of text; inside ``pre`` the line breaks are kept."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.inline: list[str] = []
        self.stack: list[tuple[str, bool]] = []  # (tag, whether its text is left out)
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCK:
            self.end_block()
        if tag in VOID:
            return
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id"))
        hidden = bool(self.stack and self.stack[-1][1]) or tag in SKIP or bool(FURNITURE.search(names))
        self.stack.append((tag, hidden))
        self.verbatim += tag in VERBATIM

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCK:
            self.end_block()
        if any(open_tag == tag for open_tag, _ in self.stack):
            while True:
                closed, _ = self.stack.pop()
                self.verbatim -= closed in VERBATIM
                if closed == tag:
                    return

    def handle_data(self, data: str) -> None:
        if not (self.stack and self.stack[-1][1]):
            self.inline.append(data)

    def end_block(self) -> None:
        text = "".join(self.inline)
        self.inline = []
        text = text.strip("\n").rstrip() if self.verbatim else " ".join(text.split())
        if text.strip():
            self.blocks.append(text)


def html_text(data: bytes, path: str) -> str:
    """Blocks of an HTML or Mallard page, one blank line between them."""
    page = _Page()
    page.feed(data.decode("utf-8", "replace"))
    page.close()
    page.end_block()
    return "\n\n".join(page.blocks) + "\n" if page.blocks else ""


FONT = re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[+-]?\d|\\[&|/,^:]|\\m\[[^\]]*\]")
GLYPH = {
    r"\-": "-",
    r"\(aq": "'",
    r"\(bu": "*",
    r"\(dq": '"',
    r"\(em": "--",
    r"\(en": "-",
    r"\e": "\\",
    r"\ ": " ",
    r"\~": " ",
    r"\(co": "(c)",
    r"\(lq": '"',
    r"\(rq": '"',
    r"\(cq": "'",
    r"\(oq": "'",
    r"\(ti": "~",
    r"\(ha": "^",
    r"\(rs": "\\",
    r"\(Fo": "«",
    r"\(Fc": "»",
    r"\(bv": "|",
    r"\(mu": "×",
    r"\0": " ",
}
TEXT_MACROS = frozenset({"B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SM", "SB", "SH", "SS", "IP", "TQ"})


def man_text(data: bytes, path: str) -> str:
    """Running text of a manual page in man macros; pages that only point to another give an empty text."""
    lines = []
    for raw in gzip.decompress(data).decode("utf-8", "replace").split("\n"):
        if raw.startswith(('.\\"', "'\\\"", ".so ")):
            continue
        line = _unescape(raw)
        if not raw.startswith((".", "'")):
            lines.append(line)
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
        if macro in ("SH", "SS"):
            lines += ["", " ".join(words), ""]
        elif macro in ("PP", "P", "LP", "TP", "IP", "sp", "TQ"):
            lines += ["", words[0]] if macro == "IP" and words and len(words[0]) > 1 else [""]
        elif macro in TEXT_MACROS:
            lines.append((" " if macro in ("B", "I", "SM") else "").join(words))
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(filter(None, (" ".join(p.split()) for p in paragraphs))) + "\n"


def _unescape(line: str) -> str:
    line = re.sub(r"\\\[(..)\]", r"\\(\1", FONT.sub("", line))
    line = re.sub(r"\\\(..|\\[-e ~0]", lambda m: GLYPH.get(m[0], ""), line)
    return re.sub(r"\\\".*", "", line)


def source_text(data: bytes, path: str) -> str:
    """A source file without its leading copyright comment; tables of numbers and files that are not UTF-8 give ''."""
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\f", "")
    except UnicodeDecodeError:
        return ""
    head = (
        re.match(r"(?:#!.*\n|\s*\n)*(?:/\*.*?\*/\s*|(?:(?://|#)(?! *include| *if| *define).*\n)+\s*)+", text, re.S)
        if path.endswith((".c", ".h"))
        else re.match(r"(?:#!.*\n|\s*\n)*(?:(?://|#).*\n)+\s*", text)
    )
    if head and re.search(r"copyright|licen[sc]e|author", head[0], re.I):
        text = text[head.end() :]
    digits = sum(map(text.count, "0123456789"))
    longest = max(map(len, text.split("\n")), default=0)
    return "" if digits > 0.12 * len(text) or longest > 400 or "\0" in text else text.strip("\n") + "\n"
