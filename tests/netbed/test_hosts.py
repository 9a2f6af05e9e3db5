"""Tests the bed of hosts: addresses, links, faults, and that nothing is left behind. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp.run.launch.command_line import main

ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, str(ROOT / "scripts" / "netbed" / "hosts.py")]
NAME = f"test{os.getpid()}"
PAYLOAD = 0.956  # of the rate: the rest is headers

SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 16):
    pass
peer.sendall(b"x")
"""
SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
start = time.perf_counter()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.perf_counter() - start)
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=0.3)
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("lost")
"""
WORKER = """
import os, time
os.write(1, f"worker {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n".encode())  # whole lines, whoever else writes
time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def means() -> None:
    if os.geteuid():
        pytest.skip("needs root: a bed is made of network namespaces")
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}: install iproute2 and util-linux")
    probe = subprocess.run(["ip", "netns", "add", f"{NAME}-probe"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"network namespaces are not allowed here: {probe.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", f"{NAME}-probe"], check=True)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    bed("down")
    assert left_over() == []


def command(*words: object) -> list[str]:
    return [*TOOL, "--name", NAME, *map(str, words)]


def bed(*words: object, status: int = 0) -> str:
    done = subprocess.run(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )
    assert done.returncode == status, f"{words}: {done.stdout}"
    return done.stdout


def python(host: int, script: str, *words: object) -> list[str]:
    return command("exec", host, sys.executable, "-S", "-E", "-c", script, *words)


def seconds(num_bytes: int) -> float:
    """To send so much from host 0 to host 1 and hear back."""
    with subprocess.Popen(python(1, SINK, "10.77.0.2"), stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        source = python(0, SOURCE, "10.77.0.2", num_bytes)
        return float(subprocess.run(source, capture_output=True, text=True, timeout=30, check=True).stdout)


def reach(here: int, there: int) -> str:
    answer = subprocess.run(python(here, REACH, f"{NAME}-h{there}"), capture_output=True, text=True, timeout=30)
    return answer.stdout.strip()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "never came"
        time.sleep(0.02)


def left_over(name: str = NAME) -> list[str]:
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    files = [*Path("/dev/shm").glob(f"{name}-*"), *Path("/run/hosts-bed").glob(name)]
    return [line for line in namespaces if line.startswith(name)] + [str(file) for file in files]


@pytest.mark.slow
def test_up_and_down_repeat_and_leave_the_machines_own_network_alone() -> None:
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, check=True).stdout
    bed("up", 2)
    bed("up", 3)  # in place of the two
    assert bed("status").count(" up ") == 3
    assert subprocess.run(["ip", "-brief", "link"], capture_output=True, check=True).stdout == links
    bed("down")
    bed("down")
    assert "not up" in bed("status", "--name", NAME, status=1)  # also after the verb


@pytest.mark.slow
def test_hosts_differ_and_have_no_way_out() -> None:
    bed("up", 2)
    script = "hostname; cat /proc/sys/kernel/random/boot_id; touch /dev/shm/$0; ls /dev/shm"
    first, second = (bed("exec", host, "sh", "-c", script, f"mark{host}").split() for host in (0, 1))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert second[2:] == ["mark1"]
    assert "default" not in bed("exec", 0, "ip", "route")


@pytest.mark.slow
def test_a_rate_is_kept_and_can_be_changed() -> None:
    """Nothing is faster than its link; how much slower it is depends on who else uses the machine."""
    bed("up", 2, "--rate", "40mbit")
    limited_s = seconds(2_000_000)
    assert limited_s > 2_000_000 * 8 / (40e6 * PAYLOAD) * 0.95  # a burst goes at once
    bed("rate", "8mbit")
    assert seconds(20_000) > 0.5 * 20_000 * 8 / 8e6  # a small message pays too: the burst is short
    bed("rate", "unlimited")
    assert seconds(2_000_000) < limited_s


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun for links with a delay")
@pytest.mark.slow
def test_a_delay_holds_every_message_back() -> None:
    bed("up", 2, "--delay", "20ms")
    assert seconds(1) > 2 * 0.020


@pytest.mark.parametrize(("delay", "silently"), [("0", ()), ("1ms", ("--silent",))])
@pytest.mark.quick(1)
def test_a_cut_host_is_alone_until_it_is_healed(delay: str, silently: tuple[str, ...]) -> None:
    bed("up", 3, "--delay", delay)
    bed("cut", 1, *silently)
    assert "cut" in bed("status")
    assert reach(0, 1) == "lost"
    wait_for(lambda: reach(0, 2) == "reached")
    bed("heal", 1)
    wait_for(lambda: reach(0, 1) == "reached")  # a host that got no answer asks again for the address a second later


@pytest.mark.slow
def test_torchrun_on_every_host_with_a_scripted_kill_and_nothing_left_after_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    bed("up", 2)
    words = command("run", "-k", 2, "--timeout", 60, "--on", "worker 3 4", "kill 1 1", script)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        seen = ""
        # torchrun ends the rest of that host only, maybe before worker 2 has said a word.
        sure = {"0", "1", "3"}
        while not re.search(r"\[h1 .*\] exit 1", seen) or not sure <= set(re.findall(r"worker (\d) 4", seen)):
            line = run.stdout.readline()
            assert line, seen
            seen += line
        run.terminate()
        run.stdout.read()
    assert run.returncode == 128 + signal.SIGINT
    assert "Signal 9" in seen
    assert bed("status").count(" 0 processes") == 2


# Trains on a host whose disk is its own: what stands at the same path on the other one is not seen.
TRAINING = """
import os, socket, subprocess, sys
base = sys.argv.pop(1)
own, disk = os.path.join(base, socket.gethostname()), os.path.join(base, "disk")
subprocess.run(["mount", "--bind", own, disk], check=True)
os.chdir(disk)
import ddp.run.assembly.components
from ddp.run.launch.torchrun import main

def load_data(config, load=ddp.run.assembly.components.load_data, *, download=False):
    if download:
        open("prepared", "a").write("once ")
    assert os.path.exists("prepared"), "not on this host"
    return load(config)

ddp.run.assembly.components.load_data = load_data
main()
"""


@pytest.mark.slow
def test_hosts_without_a_shared_disk_fetch_their_own_data_and_resume_what_rank_0_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run began on one host, and goes on on two."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    hosts = [tmp_path / f"{NAME}-h{host}" for host in range(2)]
    for folder in (*hosts, tmp_path / "disk"):
        folder.mkdir()
    job = ["data=synthetic", "data.num_samples=64", "model=mlp", "run.name=mine"]
    monkeypatch.chdir(hosts[0])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back
    monkeypatch.setattr(sys, "argv", ["train.py", *job, "max_steps=2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0

    bed("up", 2)
    words = command("run", "--timeout", 100, "--env", f"PYTHONPATH={ROOT}", script, tmp_path, *job)
    words += ["max_steps=3", "resume=auto"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150)
    assert done.returncode == 0 and "continuing after step 2" in done.stdout, done.stdout
    assert [(folder / "prepared").read_text() for folder in hosts] == ["once ", "once "]
    assert [len(list(folder.glob("runs/mine/checkpoints/step-*"))) for folder in hosts] == [3, 0]


@pytest.mark.slow
def test_a_cluster_that_is_described_trains_on_two_hosts_without_a_launcher(tmp_path: Path) -> None:
    """One process on each host, of which each knows the whole cluster, and which of its tasks it is."""
    bed("up", 2, "--rate", "100mbit", "--delay", "1ms")
    spec = [f"cluster.spec.chief=[{NAME}-h0:4711]", f"cluster.spec.worker=[{NAME}-h1:4711]"]
    job = ["data=synthetic", "data.num_samples=64", "model=mlp", "max_steps=2", "run.name=mine", "device=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tasks = [
        subprocess.Popen(
            command("exec", host, sys.executable, "-P", "-m", "ddp", "train", *spec, f"cluster.task={task}", *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        for host, task, words in ((1, "worker:0", []), (0, "chief:0", job))
    ]
    said = [task.communicate(timeout=150)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    summary = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert (summary["world_size"], summary["roles"], summary["steps"]) == (2, ["chief:0", "worker:0"], 2)
    assert "shared memory" not in summary["all_reduce"], "they are on two hosts"


@pytest.mark.slow
def test_an_interrupted_benchmark_takes_its_bed_down() -> None:
    words = [sys.executable, "-m", "ddp", "bench", "collectives", "--netbed", "2x1@1gbit"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        mine = Path(f"/run/hosts-bed/bench{process.pid}")
        wait_for(lambda: mine.exists() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, said
    assert not mine.exists()
    assert left_over(f"bench{process.pid}") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("up", 0), "cannot make 0 hosts"),
        *[(("up", 2, "--rate", rate), "want e.g. 100mbit") for rate in ("fast", "1.2.3mbit", "9" * 400 + "gbit")],
        (("up", 2, "--delay", "1.2.3ms"), "want e.g. 500us"),
        (("run", "-k", 1000000, "script.py"), "'1000000': want 1 to 64: all hosts share this machine's cores"),
        (("run", "--timeout", "nan", "script.py"), "'nan': want seconds above 0"),
        (("cut", 0), "not up"),
        (("run", "--on", "x", "cut", "script.py"), "the following arguments are required: host"),
        (("run", "--on", "x", "dance 1", "script.py"), "not a fault"),
        (("run", "--on", "x", "sleep nan", "script.py"), "not a fault"),
        (("down", "--name", "A-B"), "'A-B': want up to 16 lower-case letters"),
    ],
)
@pytest.mark.quick(2)
def test_bad_input_is_refused_in_words(words: tuple[object, ...], message: str) -> None:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
