"""Writes the read-along as pages for a browser: prose beside code, one file per page, nothing from elsewhere.

    python -m ddp tutorial --html site/

    ┌──────────────────────────────────────────┐
    │ the read-along                Chapters ▾ │
    ├──────────────────────────────────────────┤
    │ 02 · Ring all-reduce                     │
    │ the question        ┌─ drawing ────────┐ │   a row: prose, and the pictures, drawings and code that it is about,
    │                     └──────────────────┘ │   side by side where there is room, and one after another on a phone
    │ The ring            ┌─ code ───────────┐ │   a row
    │ Every rank sends …  └──────────────────┘ │
    │ One run printed …   ┌─ output ─────────┐ │   a row
    │                     └──────────────────┘ │
    │ What surprised │ Exercises │ Next        │   prose without code after it: its sections side by side
    ├──────────────────────────────────────────┤
    │ ← 01 · Send and …     03 · Tree, … →     │
    └──────────────────────────────────────────┘

The frame is page.html, and what it looks like is page.css.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

from markdown_it.token import Token

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.process.files import make_folder, write_whole
from ddp.units import counted
from recipes.tutorial.tools.chapters import FOLDER, Chapter, read_chapters, read_prose
from recipes.tutorial.tools.prose import Prose, code_block, drawing, is_wide, parse, parse_line, plain

PRINTED = "One run has printed this. Times, and what depends on the cores, differ from machine to machine."
FRAME, STYLE = (Path(__file__).with_name(name) for name in ("page.html", "page.css"))


def main(words: Sequence[str]) -> int:
    """Writes the pages where the words say."""
    parser = parser_of("tutorial")
    parser.add_argument("--html", type=Path, required=True, metavar="FOLDER", help="the folder to write them into")
    return respond(parser, parser.parse_args(words), lambda options: write_site(options.html))


def write_site(site: Path, *, chapters: Path = FOLDER) -> str:
    """Writes all pages into the folder `site`, and returns a sentence that says so.

    Raises:
        ConfigError: a chapter is wrong, or the folder cannot be written.
    """
    written = pages(chapters)
    try:
        make_folder(site)
        for name, page in written.items():
            write_whole(site / name, page)
    except OSError as error:
        raise ConfigError(f"cannot write pages into {site}: {error.strerror}; name a folder after --html") from error
    return f"{counted(len(written), 'page')} in {site}: open {site / 'index.html'} in a browser"


def pages(folder: Path) -> dict[str, str]:
    """Returns the pages of a folder of chapters by their names; the same chapters give the same pages.

    Raises:
        ConfigError: a chapter is wrong: it does not parse, or shows a picture that is not there.
    """
    preface, chapters, answers = read_prose(folder / "README.md"), read_chapters(folder), folder / "answers.md"
    walk = [preface, *chapters, *([read_prose(answers)] if answers.is_file() else [])]
    names = {each.path.name: f"{each.path.stem}.html" for each in walk} | {"README.md": "index.html"}
    return {names[each.path.name]: _page(each, walk, names) for each in walk}


def _page(chapter: Chapter, walk: Sequence[Chapter], names: Mapping[str, str]) -> str:
    """Returns one page. `walk`: the preface and all chapters in their order; `names`: their pages."""
    prose, place = Prose(chapter.path, names), walk.index(chapter)

    def link(to: Chapter, relation: str = "") -> str:
        current = ' aria-current="page"' if to is chapter else ""
        return f'<a href="{names[to.path.name]}"{relation}{current}>{escape(plain(to.title))}</a>'

    neighbours = [link(each, ' rel="prev"') for each in walk[:place][-1:]]
    neighbours += [link(each, ' rel="next"') for each in walk[place + 1 :][:1]]
    return Template(FRAME.read_text(encoding="utf-8")).substitute(
        style=STYLE.read_text(encoding="utf-8"),
        title=escape(" — ".join(plain(each.title) for each in dict.fromkeys((chapter, walk[0])))),
        description=escape(plain(chapter.question)),
        home=link(walk[0]),
        contents="\n".join(f"<li>{link(each)}</li>" for each in walk[1:]),
        kind="preface" if place == 0 else "chapter",
        heading=prose.write(parse_line(chapter.title)),
        file=escape("/".join(chapter.path.parts[-3:])),
        body="\n".join(_body(chapter, prose) if place else map(prose.write, parse(chapter.blocks[0].prose))),
        neighbours="\n".join(neighbours),
    )


def _body(chapter: Chapter, prose: Prose) -> Iterator[str]:
    """Yields the blocks of a chapter; after its last lines of code, what they have printed."""
    last_code = max((number for number, block in enumerate(chapter.blocks) if block.code), default=-1)
    for number, block in enumerate(chapter.blocks):
        parts = parse(block.prose)
        yield from _rows(parts, prose, code=block.code) if block.code else _closing(parts, prose)
        if number == last_code and chapter.output:
            yield _row(f"<p>{PRINTED}</p>\n", drawing(chapter.output))


def _rows(parts: Sequence[list[Token]], prose: Prose, *, code: str = "") -> Iterator[str]:
    """Yields prose and code as rows, each of which ends before the prose that follows something wide."""
    text, wide = "", ""
    for part in parts:
        if is_wide(part):
            wide += prose.write(part)
            continue
        if wide:
            yield _row(text, wide)
            text, wide = "", ""
        text += prose.write(part)
    yield _row(text, wide + (code_block(code) if code else ""))


def _row(text: str, wide: str) -> str:
    inside = [f'<div class="{name}">\n{part}</div>\n' for name, part in (("text", text), ("wide", wide)) if part]
    return f'<div class="row">\n{"".join(inside)}</div>'


def _closing(parts: Sequence[list[Token]], prose: Prose) -> Iterator[str]:
    """Yields prose without code: sections with something wide as rows, those between them side by side."""
    sections: list[list[list[Token]]] = [[]]
    for part in parts:
        if part[0].tag == "h2":
            sections.append([])
        sections[-1].append(part)
    yield '<div class="closing">'
    for has_wide, group in groupby(filter(None, sections), lambda section: any(map(is_wide, section))):
        if has_wide:
            for section in group:
                yield from _rows(section, prose)
        else:
            inside = "".join(f"<section>\n{''.join(map(prose.write, section))}</section>\n" for section in group)
            yield f'<div class="sections">\n{inside}</div>'
    yield "</div>"
