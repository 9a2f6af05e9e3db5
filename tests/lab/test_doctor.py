"""`python -m ddp doctor`: each finding from facts made up here, and one examination by ranks.

Tests: ddp/lab/doctor_findings.py, ddp/process/host.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from ranks import run_ranks

from ddp.__main__ import main
from ddp.collectives.cost import Link
from ddp.comm.transport import shared_memory
from ddp.errors import PeerLost, workers_failed
from ddp.lab import doctor
from ddp.lab.doctor_findings import GIB, LEAST_MEMORY, LEAST_SHARED, MIB, Clock, Figures, Finding, findings, named, rate
from ddp.process import host
from ddp.process.host import HostFacts, demands, facts
from ddp.process.memory import VARIABLES, available_cores, core_quota
from ddp.strategies import region

ROOT = Path(__file__).parent.parent.parent
WELL = HostFacts(
    host="a",
    kernel="one",
    versions={"python": "3.12.1", "torch": "2.13.0+cpu", "torchvision": "0.28.0"},
    demands=[("ddp", "python", ">=3.11"), ("ddp", "torch", ">=2.10,<2.16"), ("torchvision", "torch", "==2.13.0")],
    cores=[0, 1],
    num_cores=2,
    quota=float("inf"),
    load=3.0,
    threads=1,
    variables={"MKL_CBWR": "AUTO", **VARIABLES},
    gpus=[],
    num_gpus=0,
    interfaces={"lo": "127.0.0.1", "ifb0": "", "eth0": "10.0.0.1"},
    address="127.0.0.1",
    shared_bytes=GIB,
    shared_free=LEAST_SHARED,
    left_behind=[],
    memory_left=2 * LEAST_MEMORY,
    open_files=280,
    pinned_bytes=GIB,
    adapters=[],
    folder="/home/me",
    disk_free=GIB,
    temporary="/tmp",
    temporary_free=16 * MIB,
    data="data",
    data_is="absent",
    unanswered=[],
)
TWO_HOSTS = {"address": "10.0.0.1", "threads": 2}


def found(*ranks: HostFacts, **figures: Any) -> list[Finding]:
    """Returns the findings of ranks, which are on one host unless `hosts` says otherwise."""
    return findings(ranks, Figures(**{"hosts": (tuple(range(len(ranks))),), **figures}))


def test_there_is_nothing_to_say_of_ranks_that_just_have_what_they_need() -> None:
    assert found(WELL, WELL) == []
    over_hosts = replace(WELL, **TWO_HOSTS)
    others = replace(over_hosts, host="b", kernel="two")
    assert found(over_hosts, others, hosts=((0,), (1,)), clocks=[Clock(0.0, 0.0), Clock(-1.5, 0.6)]) == []


@pytest.mark.parametrize("data_is", ["absent", "usable"])
@pytest.mark.parametrize(
    "harmless",
    [
        {"cores": [0], "quota": 2.0, "load": 4.0, "open_files": 272},  # bound to a core, and the other one is not
        {"gpus": [("H", 1), ("H", 1)], "num_gpus": 2, "adapters": ["mlx5_0"]},
        {"adapters": ["mlx5_0"], "pinned_bytes": 8 * MIB},  # of Gloo, none uses them
        {"gpus": [("H", 1), ("H", 1)], "num_gpus": 2, "pinned_bytes": 8 * MIB},
        {"versions": {**WELL.versions, "torch": "2.14.0.dev20261101"}, "demands": WELL.demands[1:2]},
        {"address": "127.0.0.1", "variables": {**WELL.variables, "GLOO_SOCKET_IFNAME": "lo"}},
        {"kernel": "", "shared_bytes": 0, "shared_free": LEAST_SHARED},
    ],
)
def test_what_looks_alike_and_is_harmless(harmless: dict[str, Any], data_is: str) -> None:
    each = replace(WELL, data_is=data_is, **harmless)
    assert found(each, replace(each, cores=[0, 1], threads=1)) == []


@pytest.mark.parametrize(
    ("what", "is_problem", "says"),
    [
        ({"unanswered": ["the name a"]}, True, "the name a has not answered within 20 s"),
        ({"versions": {**WELL.versions, "python": "3.10.2"}}, True, "python 3.10.2 is none that ddp admits (>=3.11)"),
        ({"versions": {**WELL.versions, "torch": ""}, "demands": WELL.demands[1:2]}, True, "pip install 'torch>=2.10,"),
        (
            {"versions": {**WELL.versions, "torch": "2.13.1"}},
            True,
            "torch 2.13.1 is none that torchvision 0.28.0 admits (==2.13.0): take another one: pip install 'torch==",
        ),
        ({"threads": 2}, True, "4 threads of 2 ranks on 2 cores take turns: set OMP_NUM_THREADS=1 (cluster"),
        ({"threads": 2, "num_cores": 8}, True, "on 2 of 8 cores take turns: set OMP_NUM_THREADS=1"),
        ({"cores": [0, 1, 2], "quota": 1.5, "num_cores": 3}, False, "2 ranks oversubscribe 1.5 of 3 cores: 1 or fewer"),
        ({"cores": [0], "num_cores": 8}, False, "2 ranks oversubscribe 1 of 8 cores"),
        ({"cores": [0, 1, 2, 3], "num_cores": 4}, False, "2 threads of 2 ranks use at most half of 4 cores"),
        ({"load": 4.1}, False, "other processes are using the cores (load 4.1 on 2 cores)"),
        ({"variables": VARIABLES}, False, "export MKL_CBWR=AUTO before your launcher"),
        ({"variables": {"MKL_CBWR": "AUTO"}}, False, "export GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold="),
        ({"memory_left": 2 * LEAST_MEMORY - 1}, True, "less than 256 MiB of memory are left for each of 2 ranks"),
        ({"shared_bytes": 0}, True, "/dev/shm cannot be written, through which loader processes send: mount"),
        ({"shared_free": LEAST_SHARED - MIB}, False, "255 MiB of 1 GiB are free in /dev/shm"),
        ({"left_behind": ["/dev/shm/ddp-1-0"]}, False, "have left something in memory: rm -r /dev/shm/ddp-1-0"),
        ({"open_files": 271}, True, "may open 271 files, and a rank of 2 needs up to 272: ulimit -n 272"),
        (
            {"gpus": [("H", 1)] * 2, "num_gpus": 2, "adapters": ["mlx5_0"], "pinned_bytes": 8 * MIB},
            True,
            "may pin 8 MiB of memory, and mlx5_0 needs more for its buffers: ulimit -l unlimited",
        ),
        (
            {"variables": {**WELL.variables, "GLOO_SOCKET_IFNAME": "eth9,lo"}, "address": ""},
            True,
            "GLOO_SOCKET_IFNAME=eth9 names no interface: take one of lo, ifb0, eth0, or leave it out",
        ),
        ({"num_gpus": 3}, False, "the driver shows 3 GPUs, and torch sees none: install its CUDA build"),
        ({"num_gpus": 1, "gpus": [("H", 1)]}, False, "2 ranks share 1 GPU, so tensors travel through the host's"),
        ({"disk_free": -1}, True, "/home/me, which keeps runs, cannot be written: call from another folder"),
        ({"disk_free": 0}, True, "less than 1 GiB are free in /home/me: make room"),
        ({"disk_free": GIB - 1}, True, "less than 1 GiB are free in /home/me: make room"),
        ({"temporary_free": 16 * MIB - 1}, True, "less than 16 MiB are free in /tmp, which every launch needs: make"),
        ({"data_is": "Permission denied"}, True, "data: Permission denied: let data.root be a folder that you"),
    ],
)
def test_what_is_wrong_with_a_host(what: dict[str, Any], is_problem: bool, says: str) -> None:
    """Of a host where all else is well, and once, however many ranks there are."""
    each = replace(WELL, **what)
    ((is_one, text),) = found(each, each)
    assert says in text and is_one == is_problem
    assert ("mpirun --bind-to none" in text) == ("threads" in what and "num_cores" in what)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "the name a stands for 127.0.1.1, where no other host reaches the ranks: export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME names lo, where no other host reaches"),
    ],
)
def test_a_host_that_others_do_not_reach(variables: dict[str, str], says: str) -> None:
    """It is known where the ranks do not come together, too."""
    lonely = replace(WELL, address="127.0.1.1", threads=2, variables=WELL.variables | variables)
    reached = replace(WELL, address="10.0.0.2", threads=2, host="b", kernel="two")
    ((_, text),) = found(reached, lonely, hosts=((0,), (1,)))
    assert text.startswith(f"a: {says}")
    ((is_problem, text),) = found(lonely, num_unreached=1)
    assert is_problem and text.startswith(says)


def test_what_hosts_have_in_common_is_said_once_and_problems_come_first() -> None:
    one, other, third = (
        replace(WELL, **TWO_HOSTS, host=name, kernel=name, load=9.0, open_files=100 * number + 300)
        for number, name in enumerate("abc")
    )
    texts = [text for _, text in found(one, replace(other, disk_free=-1), third, hosts=((0,), (1,), (2,)))]
    assert [text.partition(" ")[0] for text in texts] == ["b:", "other"]
    assert [text[:6] for _, text in found(one, other, replace(third, load=0.0), hosts=((0,), (1,), (2,)))] == ["a, b: "]


def test_what_is_wrong_between_ranks() -> None:
    one = replace(WELL, **TWO_HOSTS)
    two, three = (replace(one, host=name, kernel=name) for name in ("b", "c"))
    newer = replace(two, versions={**two.versions, "torch": "2.13.0+cu130"})
    apart = {"hosts": ((0,), (1,), (2,))}
    ((is_problem, text),) = found(one, newer, three, **apart)
    assert is_problem and text.startswith("torch is 2.13.0+cpu on ranks 0, 2, 2.13.0+cu130 on rank 1: install one")
    ((is_problem, text),) = found(one, one, three, **apart)
    assert is_problem and text.startswith("ranks 0, 1 are on one machine, a, and do not reach each other's memory")
    assert found(replace(one, kernel=""), replace(one, kernel=""), three, **apart) == []

    links = {(0, 1): Link(1e-4, 1e-9), (0, 2): Link(1e-4, 1.5e-9), (1, 2): Link(1e-4, 3e-9)}
    assert found(one, two, three, **apart, links=links) == []
    ((is_problem, text),) = found(one, two, three, **apart, links={**links, (1, 2): Link(1e-4, 3.1e-9)})
    assert is_problem and text.startswith("the link from b to c carries 2.58 Gbit/s, and the median one 5.33 Gbit/s:")
    assert found(one, two, hosts=((0,), (1,)), links={(0, 1): Link(1e-4, 9.0)}) == []

    assert found(one, two, three, **apart, copies=[4e9, 6e9, 2e9]) == []
    assert found(one, two, hosts=((0,), (1,)), copies=[1e9, 9e9]) == []
    ((is_problem, text),) = found(one, two, three, **apart, copies=[4e9, 6e9, 1.9e9])
    assert not is_problem and text.startswith("rank 2 copied memory at less than half") and text.endswith("on c")

    clocks = [Clock(0.0, 0.0), Clock(0.9, 0.0), Clock(-1.7, 0.6)]
    ((is_problem, text),) = found(one, two, three, **apart, clocks=clocks)
    assert is_problem and text.startswith("the clock of c is 1.70 s ± 600 ms behind that of a: let both follow")


def test_words() -> None:
    assert [named(ranks) for ranks in ([3], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        *("rank 3", "ranks 0, 1", "ranks 0 to 2", "ranks 0, 2, 3")
    ]
    assert [rate(Link(0.0, beta_s)) for beta_s in (8e-9, 8e-8, 0.0)] == [
        *("1.00 Gbit/s", "100 Mbit/s", "more than can be measured")
    ]


# --- what a process finds out ----------------------------------------------------------------------------------------


def own(data: str = "data") -> HostFacts:
    return facts(data, kernel="", threads=1, gpus=list, left_behind=[])


def test_what_is_admitted_is_what_pyproject_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    asked["python"] = SpecifierSet(project["requires-python"])
    assert {package: SpecifierSet(versions) for by, package, versions in demands() if by == "ddp"} == asked
    assert [each for each in demands() if each.by == "torchvision" and each.package == "torch"]


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").write_text("")
    assert [own(str(path)).data_is for path in (tmp_path, file, tmp_path / "none")] == [
        *("usable", "Not a directory", "absent")
    ]
    monkeypatch.chdir(tmp_path)
    assert own().folder == str(tmp_path) and own().disk_free > 0
    monkeypatch.setattr(host.os, "access", lambda *_: False)  # root may write everywhere
    assert (own().disk_free, own().shared_bytes, own(str(tmp_path)).data_is) == (-1, 0, "Permission denied")


def test_the_address_at_which_gloo_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    elsewhere, here = ((*stream, (address, 0)) for address in ("203.0.113.7", "127.0.0.7"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere, here])
    assert own().address == "127.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    assert own().address == "127.0.0.1"
    for interface, address in (("lo", "127.0.0.1"), ("none", "")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{interface},other")
        assert own().address == address


def test_a_name_server_that_does_not_answer_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    for_ever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: for_ever.wait(60) or [])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(host, "ANSWER_S", 0.05)
    found = own()
    for_ever.set()
    assert (found.address, found.unanswered) == ("", [f"the name {socket.gethostname()}"])


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/gone", {"cpu.max": "50000 100000"}, 0.5),  # a container sees its own group as the root
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2.0),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, float("inf")),
        ("3:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, float("inf")),
    ],
)
def test_the_cores_that_a_container_allows(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float) -> None:
    for name, text in {"proc/self/cgroup": cgroup, **{f"groups/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert core_quota(tmp_path / "proc", tmp_path / "groups") == quota


def test_as_many_cores_are_used_as_the_quota_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    for quota, cores in ((2.5, 2), (0.5, 1), (16.0, 8), (float("inf"), 8)):
        monkeypatch.setattr("ddp.process.memory.core_quota", lambda quota=quota: quota)
        assert available_cores() == cores


def test_what_killed_processes_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, here, hexadecimal = 1 << 30, 1, "0123456789abcdef"  # no kernel has that many processes
    for name in (f"ddp-{gone}-{hexadecimal}", f"ddp-{here}-{hexadecimal}", f"ddp-{gone}-other"):
        (tmp_path / name).write_text("")
    assert shared_memory.left_behind(tmp_path) == [tmp_path / f"ddp-{gone}-{hexadecimal}"]
    monkeypatch.setattr(region, "_regions_folder", lambda: tmp_path)
    begins = region._folder("begins")
    begins.mkdir(mode=0o700)
    left = region._folder("left")
    left.mkdir(mode=0o700)
    (left / region._ENTRY).write_text("{}")
    assert region.left_behind() == [left]
    (begins / region._ENTRY).write_text("{}")
    monkeypatch.setattr(region, "_kept_entry", lambda folder: folder == begins)
    assert region.left_behind() == [left]


# --- the command -----------------------------------------------------------------------------------------------------


def examined_by_a_rank(rank_1_is_ahead_s: float, file: str) -> tuple[int, str, list[Clock]]:
    """Runs the command as one rank; the clocks of rank 1 are another host's."""
    from os import environ

    from ddp.lab import doctor
    from ddp.train.reports import traces

    clocks: list[Clock] = []
    judge, time_of_day, durations = doctor.diagnosis, time.time, time.perf_counter

    def listening(everyone: Any, figures: Any) -> Any:
        clocks.extend(figures.clocks)
        return judge(everyone, figures)

    doctor.diagnosis = listening
    if environ["RANK"] == "1":
        time.time = lambda: time_of_day() + rank_1_is_ahead_s
        doctor.now_s = traces.now_s = lambda: durations() + 50.0
        traces.clock_name = lambda: "another host's"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(["doctor", "--data", file])
    return status, said.getvalue(), clocks


def test_ranks_examine_their_hosts_together(tmp_path: Path) -> None:
    """Rank 0 alone says what all have found; each ends with the same status."""
    (file := tmp_path / "file").write_text("")
    (first, text, clocks), (second, nothing, _) = run_ranks(examined_by_a_rank, 2, 100.0, str(file))
    assert (first, second, nothing) == (1, 1, "")
    report, _, judged = text.partition("\n\n")
    names = [line[:12].strip() for line in report.splitlines()]
    assert names[0] == "host" and names[-4:] == ["link inside", "all-reduce", "all-reduce", "copy"]
    assert f"problem: {file}: Not a directory: let data.root be a folder" in judged
    assert abs(clocks[1].offset_s - 100.0) <= clocks[1].error_s + 0.01 and clocks[0] == Clock(0.0, 0.0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Makes of this process a rank that the other one, on another host, does not reach."""

    def refuse(**_: object) -> None:
        raise PeerLost(1, "b", 0, 0, "start-up", "it arrived, but could not be connected")

    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ddp.init", refuse)
    yield monkeypatch


def test_ranks_that_do_not_come_together_say_what_they_know(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem: rank 0 on " in text and "has not come together with the others: PeerLost: lost rank 1" in text
    assert "problem: GLOO_SOCKET_IFNAME names lo, where no other host reaches the ranks" in text
    for name in ("RANK", "LOCAL_RANK"):
        alone.setenv(name, "1")
    alone.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("problem: rank 1 on ")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (workers_failed("rank 1 stopped because …\nrank 0 was killed by SIGKILL\nthe end", 0), "rank 0 was killed by"),
        (ImportError("libtorch.so: no such file"), "ImportError: libtorch.so: no such file"),
    ],
)
def test_workers_that_do_not_start_are_a_problem_and_no_traceback(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ddp.run.launch.from_python.launch", refuse)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    (problem,) = [line for line in text.splitlines() if line.startswith("problem: workers cannot work here (")]
    assert says in problem and "Traceback" not in text and "MKL_CBWR" not in text.partition("\n\n")[2]
    assert doctor.HOW["abort_s"] < doctor.LAUNCH_S
