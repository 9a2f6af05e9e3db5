"""`python -m ddp simulate` and `explain`. (`draw` and `check` are tested beside the schedules, an answer of `explain`
with the commands of the README.)

Tests: ddp/commands/registry.py, ddp/commands/schedules.py, ddp/lab/explain.py, ddp/lab/ranks.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from ddp.__main__ import main
from ddp.commands import registry
from ddp.commands.registry import COMMANDS


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_simulate_gives_the_textbook_s_time_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Ring, 8 ranks, 8 MB at 8 Gbit/s, no latency, next to no cost of adding: 14 rounds of 1 MB at 1 GB/s."""
    free = ("--alpha", "0us", "--rate", "8gbit", "--add-gb-s", "1e9")
    text = answer(capsys, "simulate", "ring", "8", "--bytes", "8MB", *free)
    assert text.startswith("ring, 8 ranks on 8 hosts, 8MB: 14.7 ms\n")
    assert "14 rounds, 112 messages" in text
    assert "sent by the busiest rank 14,680,064 bytes (1.75 times the buffer)" in text
    assert text.rstrip().endswith("bus bandwidth 1 GB/s")


def test_ctrl_c_ends_a_command_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("it has ended the workers")

    monkeypatch.setattr("ddp.run.launch.from_python.launch", interrupted)
    monkeypatch.setattr("ddp.commands.schedules.simulate", interrupted)
    for words in (["draw", "overlap"], ["explain", "25MB"], ["simulate", "ring", "4"]):
        assert main(words) == 130
        assert capsys.readouterr().err == "stopped by SIGINT before there was an answer\n"


def test_ctrl_c_ends_a_command_while_it_is_imported_and_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        heard.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    def imported(_: str) -> SimpleNamespace:
        heard.append(signal.getsignal(signal.SIGINT))
        return SimpleNamespace(main=interrupted)

    heard: list[object] = []
    monkeypatch.setattr(registry, "import_module", imported)
    assert main(["report"]) == 130 and heard == [signal.SIG_DFL, signal.default_int_handler]
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_one_rank_has_nothing_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "simulate", "ring", "1") == "ring, one rank: there is nothing to send\n"
    assert answer(capsys, "check", "ring", "1").startswith("ring with 1 rank: proven")


def test_simulate_ten_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "simulate", "tree", "10000", "--bytes", "4KB", "--per-host", "8")
    assert "tree, 10,000 ranks on 1,250 hosts" in text
    assert "28 rounds, 19,998 messages" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *[
            (f"ring 4 --rate {rate}", f"--rate: {rate}: give bits per")
            for rate in ("fast", "nan", "-1", "0gbit", "inf")
        ],
        ("ring 4 --rate " + "9" * 400 + "gbit", "give bits per second, e.g. 10gbit"),
        ("ring 4 --alpha 5", "argument --alpha: 5: give a time, e.g. 20us"),
        *[(f"ring 4 --add-gb-s {number}", f"{number}: give a number above 0") for number in ("nan", "-1", "0", "inf")],
        ("ring 4 --bytes " + "9" * 400 + "GB", "want a multiple of 4 bytes"),
        ("ring 4 --bytes 5B", "size '5B': want a multiple of 4 bytes"),
        ("ring 4 --per-host 0", "--per-host: 0: give a whole number from 1 up"),
        ("ring 4 --per-host 2 --hosts 2,2", "--hosts and --per-host both say who shares a host"),
        ("rang 4", "Did you mean ring?"),
        ("ring 1000000000", "1000000000: give a whole number from 1 to 10,000: some schedules take"),
        ("ring 2 --bytes 100000GB", "2 ranks: more than 1,000,000 messages, which would take minutes and gigabytes"),
    ],
)
def test_what_simulate_refuses(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, f"simulate {words}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("draw ring 0", "num_ranks: 0: give a whole number from 1 to 256: a drawing has a line for each rank"),
        ("draw ring 100000", "from 1 to 256"),
        ("draw ring 33 --svg there.svg", "--svg with 33 ranks: take at most 32; a picture shows every chunk"),
        ("draw overlap --workers 1000000", "1000000: give a whole number from 2 to"),
        ("draw overlap --bucket-mb nan", "nan: give a number above 0"),
        ("draw step nowhere", "nowhere holds no profile.json: run it with profile.steps=5"),
        ("check ring 1000000000", "from 1 to 10,000"),
        ("check ring 1000", "1,000 ranks: its proof follows 1,998,000 chunks or messages of all ranks; take so few"),
        ("explain 25MB --workers 1", "give a whole number from 2 to"),
        ("explain 128GB", "128GB: all-reduces of it are timed, and 2 ranks have no memory for that here"),
        ("where runs/mine --step 0", "--step: 0: give a whole number from 1 up"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_reason(
    words: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp.run.launch.from_python.launch", None)  # nothing is started
    monkeypatch.setattr("ddp.process.memory.available_bytes", lambda: 1e9)
    assert says in refused(capsys, words)


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Returns the line with which a command is refused."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_every_command_has_a_module_a_line_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == text
    listed, _, examples = text.partition("examples:")
    for command, (module, _) in COMMANDS.items():
        assert find_spec(f"ddp.{module.rpartition('.')[0]}")
        assert f"\n    {command}" in listed and f"\n  python -m ddp {command} " in examples


def test_drawing_imports_no_torch() -> None:
    code = "import sys; from ddp.__main__ import main; main(['draw', 'ring', '3']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command drow. Did you mean draw? The commands are train, " in refused(capsys, "drow ring 4")
    assert "profile. A run is profiled with profile.steps=5, and scale measures" in refused(capsys, "profile")
    assert "Did you mean bench step?" in refused(capsys, "benchmark")
    of_benches = "bench alone is no command; give one of bench step, bench forecast, bench collectives"
    assert refused(capsys, "bench --help").endswith(of_benches) and of_benches in refused(capsys, "bench")
    assert "there is no command bench_step. Did you mean bench step?" in refused(capsys, "bench_step --turns 3")
    assert "Did you mean search?" in refused(capsys, "tune")
