"""docs/losses.md: its programs run, and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import run_program

PAGE = (Path(__file__).parent.parent / "docs" / "losses.md").read_text()
PROGRAMS = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


def printed(title: str, folder: Path) -> str:
    """Returns the last line that a program prints."""
    if "torchmetrics" in PROGRAMS[title]:
        pytest.importorskip("torchmetrics", reason="pip install -e '.[test,strangers]'")
    (folder / "program.py").write_text(PROGRAMS[title])
    done = run_program(folder / "program.py", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("Class weights and ignored labels", r"\d\.\d+"),  # a share of one sample often has no value that is known
        ("Metrics", r"epoch 2: 0\.\d+ on training samples, 0\.\d+ on held-out ones"),
        ("A loss with its own weights", "True"),
    ],
)
def test_a_program_prints_what_the_page_says(title: str, said: str, tmp_path: Path) -> None:
    assert re.fullmatch(said, printed(title, tmp_path))


def test_a_loss_over_the_whole_batch_is_that_of_one_worker(tmp_path: Path) -> None:
    title = "A loss over the whole batch"
    both = printed(title, tmp_path)
    PROGRAMS[title] = PROGRAMS[title].replace("workers=2", "workers=1")
    assert printed(title, tmp_path) == both


def test_no_program_of_the_page_is_left_out() -> None:
    assert len(PROGRAMS) == PAGE.count("```python")
