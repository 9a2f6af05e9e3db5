"""Every chapter of the tutorial runs, proves its claim, and keeps to the form; words stand where they are explained."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from forked import run_program
from ranks import without_gloo

from recipes.tutorial.tools.chapters import parse
from recipes.tutorial.tools.holes import SOURCES
from tests.tutorial.chapter_mutants import SUBJECTS, function_in

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = ROOT / "recipes" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("[0-9][0-9]_*.py"))
INDEX = (TUTORIAL / "README.md").read_text()
SECTIONS = ["What to look at", "The number that surprised", "Exercises", "Next"]
WORDS = re.findall(r"^\| ([\w -]+) \| (\d\d) \|", INDEX.partition("## Words")[2], re.MULTILINE)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)


def test_a_chapter_runs_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK", "1")
    done = run_program(CHAPTERS[-1], tmp_path)
    assert done.returncode == 0 and done.stdout and not done.stderr


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(each, id=each.stem, marks=[] if each.stem[:2] == "07" else pytest.mark.slow) for each in CHAPTERS],
)
def test_a_chapter_proves_its_claim(
    chapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each runs in this process, which has imported torch, and its workers are processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TUTORIAL)
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(sys, "argv", [str(chapter)])
    runpy.run_path(str(chapter), run_name="__main__")
    printed = capfd.readouterr()
    assert printed.out.strip() and not printed.err
    kept = parse(chapter).output
    assert words_of(printed.out) == words_of(kept), f"the page shows another output: write {chapter.stem}.txt anew"
    assert list(tmp_path.iterdir()) == []


def words_of(output: str) -> list[str]:
    """Returns what a chapter prints on every machine: its lines without numbers, bars and the name of the host."""
    lines = re.sub(r"(on host) \S+", r"\1", without_gloo(output)).replace("cores", "core").splitlines()
    bare = [re.sub(r"[-+]?\d[\d,.]*(e[-+]\d+)?|[·\u2500-\u259f]", " ", line).split() for line in lines]
    return sorted({" ".join(words) for words in bare})


@each_chapter
def test_an_exercise_that_no_program_judges_has_an_answer(chapter: Path) -> None:
    text = chapter.read_text()
    exercises = re.split(
        r"^# (?=\d\. )", text.partition("# ## Exercises")[2].partition("# ## Next")[0], flags=re.MULTILINE
    )
    answers = (
        (TUTORIAL / "answers.md").read_text().partition(f"## {text[3:].splitlines()[0]}\n")[2].partition("\n## ")[0]
    )
    open_ones = [each[:2] for each in exercises[1:] if "scripts/ddp exercise" not in each]
    assert re.findall(r"^\d\.", answers, re.MULTILINE) == open_ones


@each_chapter
def test_a_chapter_keeps_to_the_form(chapter: Path) -> None:
    text, number = chapter.read_text(), CHAPTERS.index(chapter)
    assert len(text.splitlines()) <= 120
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, question = docstring.partition("\n\n")
    assert title.startswith(f"{chapter.stem[:2]} · ") and "?" in question.partition("\n\n")[0]
    assert "\n    " in question  # a drawing
    last_program = text.partition('if __name__ == "__main__":')[2].partition(f"# ## {SECTIONS[0]}")[0]
    assert "assert " in last_program
    assert re.findall(r"^# ## (.*)", text, re.MULTILINE)[-len(SECTIONS) :] == SECTIONS
    exercises, _, ahead = text.partition("# ## Exercises")[2].partition("# ## Next")
    assert re.findall(r"^# (\d)\. ", exercises, re.MULTILINE) == ["1", "2"]
    if number + 1 < len(CHAPTERS):
        assert f"`{CHAPTERS[number + 1].name}`" in ahead
    assert f"| {chapter.stem[:2]} | [{title[5:].partition(':')[0]}]({chapter.name}) |" in INDEX


@each_chapter
def test_what_a_chapter_names_exists(chapter: Path) -> None:
    text = chapter.read_text()
    files = re.findall(r"`((?:ddp|docs|recipes|tests)/[\w/.-]+)`", text) + re.findall(r"`(\d\d_\w+\.py)`", text)
    pictures = re.findall(r"\]\((pictures/[\w.]+)\)", text)
    assert [name for name in files if not (ROOT / name).exists() and not (TUTORIAL / name).exists()] == []
    assert [name for name in pictures if not (TUTORIAL / name).exists()] == []
    for exercise in re.findall(r"exercise (\d\d)", text):
        assert exercise in SOURCES


@pytest.mark.parametrize("chapter", SUBJECTS)
def test_what_chapters_are_about_is_there_to_be_mutated(chapter: str) -> None:
    assert (TUTORIAL / f"{chapter}.py").exists()
    for subject in SUBJECTS[chapter]:
        file, _, names = subject.partition(": ")
        tree = ast.parse((ROOT / "ddp" / file).read_text())
        assert all(function_in(tree, name) for name in names.split(", "))


def test_the_chapters_are_numbered_without_a_gap() -> None:
    assert [chapter.name[:2] for chapter in CHAPTERS] == [f"{number:02}" for number in range(len(CHAPTERS))]


@pytest.mark.parametrize(("word", "chapter"), WORDS)
def test_a_word_first_stands_in_the_chapter_that_explains_it(word: str, chapter: str) -> None:
    spaced = r"[\s#]+".join(map(re.escape, word.split()))
    found = re.compile(rf"\b{spaced}(e?s)?\b", re.IGNORECASE)
    assert next(each.name[:2] for each in CHAPTERS if found.search(each.read_text())) == chapter
