"""Writes Markdown and code as HTML that needs nothing from elsewhere.

| in the prose                            | on the page                                                     |
|-----------------------------------------|-----------------------------------------------------------------|
| `02_ring.py`, or a link to it           | a link to that chapter's page                                   |
| a link to another file here             | its text, and the file's name if the text has it not            |
| `![a ring](pictures/ring.svg)`          | the picture itself; its text is what a screen reader says       |
| a heading                               | a heading with an address of its own                            |

Pictures share the page with each other, so what they name (ids, styles) is made theirs alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, takewhile
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from ddp.errors import ConfigError

MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
SVG = "{http://www.w3.org/2000/svg}"
COLOURS = [
    (Comment, "comment"),
    (String, "string"),
    (Number, "number"),
    (Keyword.Constant, "number"),
    (Keyword, "keyword"),
    (Operator.Word, "keyword"),
    (Name.Decorator, "name"),
    (Name.Function, "name"),
    (Name.Class, "name"),
]
"""Kinds of tokens and their classes in page.css; the first that fits counts."""


class Prose(RendererHTML):
    """Writes the Markdown of one page.

    Args:
        source: the file that holds it, which links and pictures start from.
        pages: the page of each file that has one, by the name of the file.
    """

    def __init__(self, source: Path, pages: Mapping[str, str]) -> None:
        super().__init__()
        self._source, self._pages = source, pages
        self._ids = set[str]()
        self._closing = list[str]()  # what ends each link that is open
        self._num_pictures = 0

    def write(self, tokens: Sequence[Token]) -> str:
        """Returns the HTML of what `parse` has returned, or a part of it."""
        return self.render(tokens, MARKDOWN.options, {})

    # Rules: each writes the token at `idx`, whose type is the method's name.

    def heading_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Begins a heading, and gives it an id that no other part of the page has."""
        base = re.sub(r"\W+", "-", plain(tokens[idx + 1].content).lower()).strip("-") or "section"
        name, number = base, 1
        while name in self._ids:
            number += 1
            name = f"{base}-{number}"
        self._ids.add(name)
        tokens[idx].attrSet("id", name)
        return self.renderToken(tokens, idx, options, env)

    def heading_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Ends a heading with its own address. The tokens of a heading are three: open, text, close."""
        address = tokens[idx - 2].attrs["id"]
        return f' <a class="address" href="#{address}" aria-label="Address of this section">#</a></{tokens[idx].tag}>\n'

    def code_inline(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Writes code; the name of a chapter becomes a link, unless it stands in one."""
        text = tokens[idx].content
        code = f"<code>{escape(text, quote=False)}</code>"
        if text in self._pages and not self._closing:
            return f'<a href="{self._pages[text]}">{code}</a>'
        return code

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Begins a link to a page; of a link to a file that has none, only the text and the file's name remain."""
        href = str(tokens[idx].attrs["href"])
        url = urlsplit(href)
        target = posixpath.normpath(unquote(url.path))
        if url.scheme or not url.path:
            opening, closing = f'<a href="{escape(href)}">', "</a>"
        elif target in self._pages:
            fragment = f"#{url.fragment}" if url.fragment else ""
            opening, closing = f'<a href="{escape(self._pages[target] + fragment)}">', "</a>"
        elif (self._source.parent / target).exists():
            inside = list(takewhile(lambda token: token.type != "link_close", tokens[idx + 1 :]))
            text = self.renderInlineAsText(inside, options, env)
            name = target.removeprefix("../../")  # from recipes/tutorial to the top
            if text in (name, Path(name).name) and inside[0].type == "text":
                opening, closing = "<code>", "</code>"
            else:
                opening, closing = "", "" if Path(name).name in text else f" (<code>{escape(name, quote=False)}</code>)"
        else:
            raise ConfigError(f"{self._source} links to {href}, which is not there: correct the link")
        self._closing.append(closing)
        return opening

    def link_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Ends a link."""
        return self._closing.pop()

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Writes the picture that a file holds."""
        token = tokens[idx]
        src = unquote(str(token.attrs["src"]))
        self._num_pictures += 1
        label = self.renderInlineAsText(token.children, options, env)
        try:
            picture = (self._source.parent / src).read_text(encoding="utf-8")
            return inline_picture(picture, label=label, name=f"picture-{self._num_pictures}")
        except OSError as error:
            raise ConfigError(
                f"{self._source} shows {src}, which cannot be read ({error.strerror}): draw it, or correct its name"
            ) from error
        except (ElementTree.ParseError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{self._source} shows {src}, which is no SVG: {error}") from error

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Writes a fenced block: Python in colours, anything else as a drawing."""
        token = tokens[idx]
        return code_block(token.content) if token.info == "python" else drawing(token.content)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Writes an indented block as a drawing."""
        return drawing(tokens[idx].content)

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Begins a table in a box that scrolls if the table is too wide."""
        return '<div class="table" tabindex="0"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Ends a table."""
        return "</table></div>\n"


def parse(markdown: str) -> list[list[Token]]:
    """Returns the tokens of each paragraph, list, picture, … of the prose."""
    parts: list[list[Token]] = [[]]
    for token in MARKDOWN.parse(markdown):
        parts[-1].append(token)
        if token.level == 0 and token.nesting <= 0:
            parts.append([])
    for part in parts[:-1]:
        match part:
            case [Token(type="paragraph_open"), Token(children=[Token(type="image")]), _]:
                part[0].tag = part[-1].tag = "figure"
    return parts[:-1]


def is_wide(part: list[Token]) -> bool:
    """Returns whether a part of the prose is a picture, drawing or table, which wants more room than lines of text."""
    return part[0].tag in ("figure", "code", "table")


def parse_line(markdown: str) -> list[Token]:
    """Returns the tokens of a title, which is no paragraph of its own."""
    return MARKDOWN.parseInline(markdown)


def plain(markdown: str) -> str:
    """Returns the text of a title or paragraph, without marks, in one line."""
    text = RendererHTML().renderInlineAsText(parse_line(markdown)[0].children, MARKDOWN.options, {})
    return " ".join(text.split())


def drawing(text: str) -> str:
    """Returns a drawing in text, or an example of a command line."""
    return f'<pre class="drawing" tabindex="0">{escape(text.rstrip(), quote=False)}</pre>\n'


def code_block(code: str) -> str:
    """Returns Python in colours. `tabindex`: a box that scrolls can be reached from the keyboard."""
    return f'<pre class="code" tabindex="0"><code>{"".join(_coloured(code.rstrip()))}</code></pre>\n'


def _coloured(code: str) -> Iterator[str]:
    def colour(token: tuple[object, str]) -> str:
        return next((name for kind, name in COLOURS if token[0] in kind), "")

    for name, tokens in groupby(PythonLexer(stripnl=False, ensurenl=False).get_tokens(code), colour):
        text = escape("".join(text for _, text in tokens), quote=False)
        yield f'<span class="{name}">{text}</span>' if name else text


def inline_picture(svg: str, *, label: str, name: str) -> str:
    """Returns a picture as a part of a page, in which `name` is its own.

    Raises:
        ValueError: it is not SVG with a viewBox, without which it cannot be scaled.
    """
    root = ElementTree.fromstring(svg)
    if root.tag != f"{SVG}svg" or "viewBox" not in root.attrib:
        raise ValueError("want an <svg> with a viewBox")
    for element in list(root.iter()):
        for child in list(element):
            if not child.tag.startswith(SVG):  # what drawing programs say about themselves
                element.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)  # HTML knows what is SVG, and has no namespaces
        element.attrib = {key.rpartition("}")[2]: _own(value, name) for key, value in element.attrib.items()}
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
        if element.get("href", "").startswith("#"):
            element.set("href", f"#{name}-{element.get('href', '')[1:]}")
        if element.tag == "style":
            element.text = f"#{name} {{ {_own(element.text or '', name)} }}"
    root.attrib = {**root.attrib, "id": name, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode").strip()


def _own(value: str, name: str) -> str:
    return value.replace("url(#", f"url(#{name}-")
