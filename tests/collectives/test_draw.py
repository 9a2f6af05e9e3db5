"""Drawings and the command line: every transfer is shown; bad input gets one line that says what to do.

Tests: ddp/collectives/picture.py, ddp/commands/schedules.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddp.__main__ import main
from ddp.collectives import ring
from ddp.collectives.catalog import OVER_SHARDS, SCHEDULES, Hosts, Schedule, all_reduce_schedules
from ddp.collectives.picture import CELL_HEIGHT, svg
from ddp.collectives.schedule import Add, Goal, Recv, Round, ScheduleError, Send, draw
from ddp.collectives.shards import nodes_by_rank

SVG = "{http://www.w3.org/2000/svg}"


def test_text_shows_every_transfer() -> None:
    text = draw(ring.all_reduce, 3)
    assert text.count("→") == 12
    assert text.count("+=") == 6
    assert text.count("←") == 6
    assert "  rank 0   chunk 2 → rank 1      chunk 1 += rank 2" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_nothing_to_do(name: str) -> None:
    assert "nothing to do" in draw(SCHEDULES[name].algorithm, 1)


def test_text_names_other_buffers() -> None:
    text = draw(SCHEDULES["all_to_all_exchange"].algorithm, 2)
    assert "  rank 1   chunk 0 → rank 0               chunk 0 of buffer 1 ← rank 0" in text
    assert draw(SCHEDULES["naive_all_to_all"].algorithm, 3).count("+= rank 0 (before)") == 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_picture_shows_every_transfer_and_every_buffer(name: str, num_ranks: int) -> None:
    schedule = SCHEDULES[name]
    picture = ElementTree.fromstring(svg(schedule, num_ranks, title="a < b"))
    ops = [op for rank in range(num_ranks) for ops in schedule.algorithm(rank, num_ranks) for op in ops]
    sends, additions = [op for op in ops if isinstance(op, Send)], [op for op in ops if isinstance(op, Recv) and op.add]
    proof = schedule.check(num_ranks)

    assert picture.findtext(f"{SVG}title") == "a < b"
    assert len(picture.findall(f"{SVG}path")) == sum(len(op.chunks) for op in sends) == sum(proof.chunks_sent)
    tips = [tip.get("fill") for tip in picture.findall(f"{SVG}polygon")]
    legend = 2 if schedule.goal.adds else 1
    assert len(tips) == len(sends) + legend
    assert tips.count("#1f2937") == len(additions) + legend - 1
    buffers = 2 if schedule.goal is Goal.ALL_TO_ALL else 1
    cells = [box for box in rectangles(picture) if float(box.get("height", 0)) == CELL_HEIGHT and outlined(box)]
    assert len(cells) == num_ranks * buffers * proof.num_chunks * (proof.num_rounds + 1)
    words = [text.text for text in picture.findall(f"{SVG}text")]
    assert [f"rank {rank}" in words for rank in range(num_ranks)] == [True] * num_ranks
    assert [word for word in words if word and word.startswith("round ")] == [
        f"round {number}" for number in range(1, proof.num_rounds + 1)
    ]
    assert f"Goal: {schedule.goal.value}." in words


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_picture_shows_every_buffer_and_every_addition_over_shards(num_ranks: int) -> None:
    schedule = OVER_SHARDS["slice_owners"](8)
    picture = ElementTree.fromstring(svg(schedule, num_ranks, title=""))
    ops = [op for rank in range(num_ranks) for ops in schedule.algorithm(rank, num_ranks) for op in ops]
    num_buffers = sum(map(len, nodes_by_rank(num_ranks, 8)))
    cells = [box for box in rectangles(picture) if float(box.get("height", 0)) == CELL_HEIGHT and outlined(box)]
    assert len(cells) == num_ranks * num_buffers * num_ranks * 3
    words = [text.text or "" for text in picture.findall(f"{SVG}text")]
    additions = [f"{op.into} += {op.other}" for op in ops if isinstance(op, Add)]
    assert [word for word in words if "+=" in word and "is added" not in word] == additions
    assert len(additions) == num_ranks * (num_buffers - 1)
    assert ("0 += 2: buffer 2 is added to buffer 0" in words) == (num_ranks > 1)


def test_everything_stands_on_the_page() -> None:
    for num_ranks in (2, 3, 9, 16):
        for schedule in (*(SCHEDULES[name] for name in ("ring", "butterfly", "tree")), OVER_SHARDS["slice_owners"](19)):
            picture = ElementTree.fromstring(svg(schedule, num_ranks, title=""))
            width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
            for box in rectangles(picture)[1:]:
                right = float(box.get("x", 0)) + float(box.get("width", 0))
                below = float(box.get("y", 0)) + float(box.get("height", 0))
                assert float(box.get("x", 0)) > 0
                assert right < width
                assert below < height


def test_complete_cells_are_full() -> None:
    """After the last round of an all-reduce, every cell is filled to its edge; at first each holds one of 4 parts."""
    picture = ElementTree.fromstring(svg(SCHEDULES["ring"], 4, title="ring"))
    filled = [float(box.get("height", 0)) for box in rectangles(picture) if not outlined(box) and is_color(box)]
    assert filled[:16] == [pytest.approx(CELL_HEIGHT / 4, abs=0.06)] * 16
    assert filled[-18:-2] == [CELL_HEIGHT] * 16  # the last two are the legend's


@pytest.mark.parametrize("hosts", [((0, 1, 2), (3, 4, 5)), ((0, 1, 2), (3,), (4, 5)), ((5, 0), (4, 1), (3, 2))])
def test_hosts_are_framed(hosts: Hosts) -> None:
    picture = ElementTree.fromstring(svg(all_reduce_schedules(hosts)["hierarchical"], 6, title="", hosts=hosts))
    frames = [box for box in rectangles(picture) if box.get("stroke-dasharray") == "4 3"]
    assert len(frames) == len(hosts)
    at = {text.text: float(text.get("x", 0)) for text in picture.findall(f"{SVG}text")}
    for host, frame in zip(hosts, frames, strict=True):
        left = float(frame.get("x", 0))
        right = left + float(frame.get("width", 0))
        assert [rank for rank in range(6) if left < at[f"rank {rank}"] < right] == sorted(host)


def test_a_wrong_schedule_is_not_drawn() -> None:
    def half(rank: int, num_ranks: int) -> Iterator[Round]:
        yield (Send(1 - rank, range(1)),)

    with pytest.raises(ScheduleError):
        svg(Schedule(half, Goal.ALL_REDUCE, lambda num_ranks: 1), 2, title="")


def rectangles(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return picture.findall(f"{SVG}rect")


def outlined(box: ElementTree.Element) -> bool:
    return box.get("stroke") != "none" and box.get("stroke-dasharray") != "4 3"


def is_color(box: ElementTree.Element) -> bool:
    return box.get("fill") not in (None, "none", "#ffffff", "#f1f5f9")


# --- the command line --------------------------------------------------------------------------------------------


def test_draw_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "ring", "3"]) == 0
    assert capsys.readouterr().out.strip() == draw(ring.all_reduce, 3)
    assert main(["check", "tree", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tree with 3 ranks: proven (every rank ends with the sum of every chunk)",
        "  rounds: 4; a rank sends at most 2 messages, 2 times the buffer",
        "  order of additions: canonical",
        "  chunk 0 = ((0, 1), 2)",
    ]


def test_check_says_what_is_not_canonical(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "hierarchical", "6", "--hosts", "3,3"])
    assert "order of additions: not canonical" in capsys.readouterr().out
    main(["check", "hierarchical", "4", "--hosts", "2,2"])
    assert "order of additions: canonical" in capsys.readouterr().out


def test_a_schedule_over_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "slice_owners", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "slice_owners with 3 ranks and 8 shards: proven (every rank ends with the sum of every chunk)",
        "  rounds: 2; a rank sends at most 6 messages, 2 times the buffer",
        "  order of additions: canonical",
        "  chunk 0 = (((0, 1), (2, 3)), ((4, 5), (6, 7)))",
    ]
    main(["check", "slice_owners", "3", "--shards", "5"])
    assert "chunk 0 = (((0, 1), (2, 3)), 4)" in capsys.readouterr().out
    main(["draw", "slice_owners", "3", "--shards", "3"])
    assert "           then in chunk 2: buffer 1 += 2, buffer 0 += 1" in capsys.readouterr().out
    main(["draw", "slice_owners", "3", "--svg", str(tmp_path / "3.svg")])
    assert "slice_owners, 3 ranks, 8 shards" in capsys.readouterr().out
    main(["simulate", "slice_owners", "5", "--bytes", "1MB"])
    assert "slice_owners, 5 ranks on 5 hosts, 1MB: " in capsys.readouterr().out


def test_check_of_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """An expression of 2000 ranks is too deep to be printed."""
    assert main(["check", "master_worker", "2000"]) == 0
    assert "up to 64 ranks" in capsys.readouterr().out


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "ring.svg"
    assert main(["draw", "two_dimensional", "6", "--hosts", "3,3", "--svg", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert ElementTree.parse(target).getroot().tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("draw rign 4", "no schedule 'rign'. Did you mean ring? There are ring, tree, "),
        ("draw ring x", "argument num_ranks: x: give a whole number from 1 to 256"),
        (
            "draw ring 4 --svg /no/such/place.svg",
            "cannot write /no/such/place.svg: No such file or directory; name ano",
        ),
        (
            "draw hierarchical 4",
            "hierarchical needs several hosts, one of them with several ranks: add e.g. --hosts 2,2",
        ),
        ("draw hierarchical+tree 4 --hosts 1,1,1,1", "hierarchical+tree needs several hosts"),
        ("check two_dimensional 5", "5 ranks fill no grid of several rows and columns: take another number, or ring"),
        ("check slice_owners 9", "--shards 8 are fewer than 9 ranks, some of which would have none: give at least --s"),
        ("simulate slice_owners 3 --shards 0", "argument --shards: 0: give a whole number from 1 to 10,000"),
        ("check hierarchical 6 --hosts 3,2", "--hosts 3,2 are 5 ranks, but num_ranks=6: make them equal"),
        ("check hierarchical 6 --hosts 3,x", "give the number of ranks of each host, from 1 up, e.g. --hosts 2,2"),
        ("check hierarchical 6 --hosts 6,0", "give the number of ranks of each host, from 1 up, e.g. --hosts 2,2"),
        ("fly ring 4", "there is no command fly. "),
        ("check", "the following arguments are required: schedule, num_ranks"),
    ],
)
def test_bad_input_gets_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_reader_may_stop_early() -> None:
    """As `head` does: no traceback."""
    program = [sys.executable, "-m", "ddp", "draw", "ring", "64"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "round 1\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""
