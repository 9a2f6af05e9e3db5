"""The pages of the read-along: everything of the sources is in them, and they need nothing from elsewhere.

Tests: ddp/lab/clone.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ddp.__main__ import main
from ddp.errors import ConfigError
from ddp.lab import clone
from recipes.tutorial.tools.chapters import FOLDER, parse, read_chapters
from recipes.tutorial.tools.prose import inline_picture
from recipes.tutorial.tools.web import pages

PAGES = pages(FOLDER)
VOID = {"meta", "link", "br", "hr", "img", "input"}
CHAPTER = '''"""00 · A title

A question?

    a drawing <b>
"""

x = 1 < 2

# ## What to look at
#
# Prose with `01_next.py`, [a link](01_next.py), and
#
# ![a picture](pictures/p.svg)

y = "<&>"
'''
NEXT = '"""01 · The next one\n\nWhy?\n"""\n'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect id="a" fill="url(#b)"/></svg>'


class Page(HTMLParser):
    """Takes a page apart, and notes what is wrong with its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action") and not (value or "").startswith(("#", "data:,")):
                self.fetched.append(f"<{tag} {name}={value}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_needs_nothing_from_elsewhere(name: str) -> None:
    text = PAGES[name]
    page = Page(text)
    assert page.open == [] and page.wrong == []
    assert len(set(page.ids)) == len(page.ids)
    assert page.fetched == [] and "@import" not in text and "<script" not in text
    assert all(found.startswith("url(#") for found in re.findall(r"url\([^)]*", text))
    assert len(text.encode()) < 300_000
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and '<html lang="en">' in text
    for link in page.links:
        file, _, section = link.partition("#")
        assert not file or file in PAGES, link
        assert not section or section in Page(PAGES[file or name]).ids, link


@pytest.mark.parametrize("chapter", read_chapters(FOLDER), ids=lambda chapter: chapter.path.stem)
def test_every_line_of_code_and_every_sentence_is_on_the_page(chapter: object) -> None:
    text = Page(PAGES[f"{chapter.path.stem}.html"]).text  # type: ignore[attr-defined]
    words = " ".join(text.split())
    for block in chapter.blocks:  # type: ignore[attr-defined]
        for line in block.code.splitlines():
            assert line in text
        prose = re.sub(r"^(\d\. |#+ )", "", re.sub(r"[`*]|!\[.*", "", block.prose), flags=re.MULTILINE)
        for sentence in re.split(r"(?<=[.?:]) |\n\n", prose):
            assert " ".join(sentence.split()) in words


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "README.md").write_text("# A book\n\nSee [the first](00_first.py).\n")
    (tmp_path / "00_first.py").write_text(CHAPTER)
    (tmp_path / "01_next.py").write_text(NEXT)
    (tmp_path / "pictures" / "p.svg").write_text(SVG)
    (tmp_path / "answers.md").write_text("# Answers\n\n## 00\n\n1. Yes.\n")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "00_first.txt").write_text("x < 2\n")
    yield tmp_path


def test_prose_stands_beside_its_code_with_links_and_pictures(folder: Path) -> None:
    page = pages(folder)["00_first.html"]
    assert page == pages(folder)["00_first.html"]
    assert [block.code for block in parse(folder / "00_first.py").blocks] == ["x = 1 < 2", 'y = "<&>"']
    assert page.count('href="01_next.html"') == 4  # contents, in code, as a link, next
    assert '<pre class="drawing" tabindex="0">a drawing &lt;b&gt;</pre>' in page
    assert 'fill="url(#picture-1-b)"' in page and 'aria-label="a picture"' in page


def test_what_a_program_has_printed_stands_after_it_and_answers_have_a_page(folder: Path) -> None:
    written = pages(folder)
    before, _, after = written["00_first.html"].partition('<pre class="drawing" tabindex="0">x &lt; 2</pre>')
    assert "One run has printed this." in before and "&lt;&amp;&gt;" in before and "printed" not in after
    assert "One run has printed" not in written["01_next.html"]
    assert "<li>Yes.</li>" in written["answers.html"] and 'href="answers.html"' in written["00_first.html"]


def test_a_closing_section_with_a_picture_is_a_row_and_the_others_stand_side_by_side(folder: Path) -> None:
    prose = ("## Look", "Here:", "![it](pictures/p.svg)", "## Exercises", "1. Do.", "## Next", "Go.")
    (folder / "01_next.py").write_text(f"{NEXT}x = 1\n\n# " + "\n#\n# ".join(prose) + "\n")
    _, page = pages(folder)["01_next.html"].split('<div class="closing">')
    row, sections = page.split('<div class="sections">')
    assert row.count('<div class="row">') == 1 and row.index("Here:") < row.index('class="wide"') < row.index("<svg")
    assert sections.count("<section>") == 2


def test_a_link_to_a_file_without_a_page_names_the_file(folder: Path) -> None:
    shown = {
        "[p.svg](pictures/p.svg)": "<code>p.svg</code>",
        "[`pictures/p.svg`](pictures/p.svg)": "<code>pictures/p.svg</code>",
        "[a square](pictures/p.svg)": "a square (<code>pictures/p.svg</code>)",
        "[out](https://pytorch.org/x)": '<a href="https://pytorch.org/x">out</a>',
    }
    (folder / "README.md").write_text("# A book\n\n" + "\n\n".join(shown))
    page = pages(folder)["index.html"]
    assert [html for html in shown.values() if f"<p>{html}</p>" not in page] == []
    (folder / "README.md").write_text("# A book\n\n[gone](02_gone.py)\n")
    with pytest.raises(ConfigError, match=r"README\.md links to 02_gone\.py, which is not there"):
        pages(folder)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("00_first.py", '"""00 · A\n\n?"""\nx = (\n', "00_first.py, line 4: '(' was never closed"),
        ("00_first.py", "x = 1\n", "00_first.py begins with no docstring"),
        ("pictures/p.svg", "<html/>", "shows pictures/p.svg, which is no SVG"),
        ("README.md", "no title", "must begin with a title"),
    ],
)
def test_a_wrong_chapter_is_named(folder: Path, file: str, text: str, says: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(ConfigError) as refused:
        pages(folder)
    assert says in str(refused.value)


def test_what_is_not_there_is_named(folder: Path) -> None:
    (folder / "pictures" / "p.svg").unlink()
    with pytest.raises(ConfigError, match=r"shows pictures/p\.svg, which cannot be read"):
        pages(folder)
    with pytest.raises(ConfigError, match="recipes/tutorial/ of a clone"):
        read_chapters(folder / "pictures")
    with pytest.raises(ValueError, match="viewBox"):
        inline_picture("<svg xmlns='http://www.w3.org/2000/svg'/>", label="", name="p")


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "new" / "site"
    assert main(["tutorial", "--html", str(site)]) == 0
    assert capsys.readouterr().out == f"{len(PAGES)} pages in {site}: open {site / 'index.html'} in a browser\n"
    assert {path.name: path.read_text() for path in site.iterdir()} == PAGES
    (tmp_path / "file").touch()
    for words, says in (
        (["--html", str(tmp_path / "file")], "cannot write pages into"),
        ([], "the following arguments are required: --html"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["tutorial", *words])
        assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["tutorial", "--html", "site"], ["exercise", "02"], ["bench", "forecast"]])
def test_an_installed_package_says_where_recipes_are(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clone, "CLONE", tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "needs recipes/, which an installed package does not have: call" in capsys.readouterr().err
