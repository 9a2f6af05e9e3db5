"""Finds the chapters of the read-along, and takes each apart into a title and pairs of prose and code.

    \"\"\"02 · Ring all-reduce          title, because of the number; other modules are called by their file's name

    Who sends what, and when?        prose of the first pair: Markdown
    \"\"\"

    import torch                     code of the first pair

    # ## The ring                    prose of the second pair: comments at the margin, a hash and a space before each
    #                                line; Markdown as well
    # Every rank sends to …

    def ring(): …                    code of the second pair
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from ddp.errors import ConfigError

FOLDER = Path(__file__).parent.parent


class Block(NamedTuple):
    """Prose, and the code that it is about; either may be empty."""

    prose: str
    code: str


class Chapter(NamedTuple):
    """One file, taken apart."""

    path: Path
    title: str
    blocks: tuple[Block, ...]

    @property
    def question(self) -> str:
        """The first paragraph."""
        return self.blocks[0].prose.partition("\n\n")[0]

    @property
    def output(self) -> str:
        """One run's output, which is kept beside the chapters; empty if there is none."""
        kept = self.path.parent / "output" / f"{self.path.stem}.txt"
        return kept.read_text(encoding="utf-8") if kept.is_file() else ""


def read_chapters(folder: Path) -> list[Chapter]:
    """Returns the chapters of a folder, in the order of their names, and then the modules that they share.

    Raises:
        ConfigError: there are none, or one of them cannot be read as a chapter.
    """
    chapters = [parse(path) for path in sorted(folder.glob("[!._]*.py"))]
    if not chapters:
        raise ConfigError(f"there is no chapter in {folder}: name recipes/tutorial/ of a clone")
    return chapters


def read_prose(path: Path) -> Chapter:
    """Returns a file of Markdown beside the chapters: a title, and one block of prose.

    Raises:
        ConfigError: there is none, or it has no title.
    """
    title, _, prose = path.read_text(encoding="utf-8").partition("\n") if path.is_file() else ("", "", "")
    if not title.startswith("# "):
        raise ConfigError(f"{path} must begin with a title, such as “# The read-along”: write that line first")
    return Chapter(path, title.removeprefix("# ").strip(), (Block(prose.strip(), ""),))


def parse(path: Path) -> Chapter:
    """Takes one file apart.

    Raises:
        ConfigError: it is no Python, or begins with no docstring.
    """
    source = path.read_bytes()
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}; correct it and call this again") from error
    docstring = ast.get_docstring(tree)
    if docstring is None:
        raise ConfigError(f"{path} begins with no docstring: write one with the chapter's title and its question")
    title, _, prose = docstring.partition("\n")
    if not re.match(r"\d+ · ", title):
        title, prose = path.name, docstring
    return Chapter(path, title, _blocks(source.decode(), prose.strip(), after=tree.body[0].end_lineno or 0))


def _blocks(source: str, prose: str, *, after: int) -> tuple[Block, ...]:
    """Returns the pairs of a file, whose first prose ends in line `after`."""
    source = source.replace("\r\n", "\n")
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.start[1] == 0 and re.match(r"#( |$)", token.string)
    }
    pairs: list[tuple[list[str], list[str]]] = [([prose], [])]
    for number, line in enumerate(source.split("\n")[after:], start=after + 1):
        text, code = pairs[-1]
        if number in comments and code:
            pairs.append(([line[2:]], []))
        elif number in comments or not (line or code):  # an empty line before any code
            text.append(line[2:])
        else:
            code.append(line)
    return tuple(Block("\n".join(text).strip(), "\n".join(code).rstrip()) for text, code in pairs)
