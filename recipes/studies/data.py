"""Times what feeds the workers, beside torch's DataLoader with its DistributedSampler, in one process.

| row                        | what is measured                                                                       |
|----------------------------|----------------------------------------------------------------------------------------|
| order of 10⁹ samples       | from nothing to the first batch's samples on one of 1,024 ranks; an index, in blocks   |
| first index                | of `DistributedSampler`, 10⁷ samples, 8 ranks: from `iter` to the first `next`         |
| resume at 90 %             | from a saved state to the first batch; torch's loader has to read up to there          |
| a step that reads          | reading waits for 80 % of the computing time; over a step that reads nothing           |
| samples/s                  | an epoch through the loader, without training                                          |
| files opened               | by a worker in an epoch, files ÷ workers + lanes at most                               |

    python recipes/studies/data.py               some two minutes
    python recipes/studies/data.py --turns 21    more turns, whose medians are shown
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import DistributedSampler as TorchSampler

from ddp.data.files.file_set import FileSet
from ddp.data.files.tar_files import TarSamples
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.distributed_sampler import DistributedSampler
from ddp.data.orders.sampler import TrainSampler, sampler_of
from ddp.data.samples import TensorSet
from ddp.lab.bench.turns import take_turns
from ddp.process.arguments import Parser, whole
from ddp.process.clock import now_s
from ddp.units import three_digits

BATCH = 64

COMPUTING_S = 10e-3  # of a step
READING_SHARE = 0.8  # of that


class Sizes(NamedTuple):
    """Says how much is measured; a test takes less."""

    order: int = 10**9
    first_index: int = 10**7
    resumed: int = 10**5
    num_files: int = 1000
    samples_per_file: int = 20
    num_steps: int = 60


USUAL = Sizes()


class Row(NamedTuple):
    """A line of the table: the median of ours, of torch's (None: it cannot), and a note."""

    name: str
    ours: str
    torch: str
    ratio: str


class Rows(Dataset[Any]):
    """Samples that are made in Python, and counts how many are read; each waits as long as a disk would."""

    may_read_ahead = True

    def __init__(self, length: int, *, wait_s: float = 0.0) -> None:
        self.length, self.wait_s, self.num_read = length, wait_s, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.num_read += 1
        if self.wait_s:
            time.sleep(self.wait_s)
        return torch.full((16,), float(index)), index % 10


def rows(sizes: Sizes, num_turns: int) -> Iterator[Row]:
    """Yields the lines of the table, as they are measured."""
    yield from _order(sizes)
    yield _first_index(sizes, num_turns)
    yield _resumed(sizes, num_turns)
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        files = _tar_files(Path(folder), sizes)
        yield _resumed_files(files, sizes, num_turns)
        yield from _files_opened(files, sizes)
    yield from _reading(sizes, num_turns)
    yield from _samples_per_s(sizes, num_turns)


# ------------------------------------------------------------------------------------------------------ the samplers


def _order(sizes: Sizes) -> Iterator[Row]:
    """Yields what a permutation costs at once, and per index."""
    tracemalloc.start()
    start_s = now_s()
    sampler = TrainSampler(sizes.order, global_batch=32 * 1024, rank=512, world_size=1024)
    next(sampler.plans())
    took_s = now_s() - start_s
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    name = f"order of {sizes.order:.0e} samples, 1,024 ranks"
    yield Row(f"{name}: start", f"{1e3 * took_s:.1f} ms, {peak / 2**20:.1f} MiB", "", "")
    start_s, count = now_s(), 0
    for plan in islice(sampler.plans(), 2000):
        count += sum(len(micro.indices) for micro in plan.micros)
    yield Row(f"{name}: an index", f"{1e6 * (now_s() - start_s) / count:.2f} µs", "", "")


def _first_index(sizes: Sizes, num_turns: int) -> Row:
    data = range(sizes.first_index)
    turns = {
        name: partial(_timed, lambda kind=kind: next(iter(kind(data, num_replicas=8, rank=3))))  # type: ignore[misc]
        for name, kind in (("ours", DistributedSampler), ("torch", TorchSampler))
    }
    return _row(f"DistributedSampler, {sizes.first_index:.0e} samples, 8 ranks: first index", turns, num_turns)


# ------------------------------------------------------------------------------------------------------------ resume


def _resumed(sizes: Sizes, num_turns: int) -> Row:
    data = Rows(sizes.resumed)
    done = int(0.9 * sizes.resumed) // BATCH

    def ours() -> None:
        data.num_read = 0
        first = _first_batch_at(data, done * BATCH)
        assert data.num_read == len(first[0])  # nothing is read again

    def torchs() -> None:
        sampler: TorchSampler[Any] = TorchSampler(data, num_replicas=1, rank=0)
        next(islice(iter(DataLoader(data, batch_size=BATCH, sampler=sampler)), done, None))

    turns = {"ours": partial(_timed, ours), "torch": partial(_timed, torchs)}
    return _row(f"resume at 90 % of {sizes.resumed:.0e} samples: first batch", turns, num_turns)


def _first_batch_at(data: Any, consumed: int) -> Any:
    sampler, _ = sampler_of(
        data, order=None, sharding="auto", global_batch=BATCH, rank=0, world_size=1, num_shards=4, micro_size=BATCH
    )
    sampler.load_state_dict({**sampler.state_dict(), "consumed": consumed})
    return next(next(iter(TrainLoader(data, sampler).epoch()))[1])


def _tar_files(folder: Path, sizes: Sizes) -> Callable[[], FileSet]:
    """Writes tar files with an index, and returns what opens them."""
    for file in range(sizes.num_files):
        with tarfile.open(folder / f"{file:05d}.tar", "w") as archive:
            for number in range(sizes.samples_per_file):
                for extension, data in (("txt", b"x" * 400), ("cls", b"3")):
                    member = tarfile.TarInfo(f"{file:05d}-{number:05d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
    format = TarSamples(decode=_decoded)
    FileSet(str(folder), format, index_dir=folder / "index")
    return lambda: FileSet(str(folder), format, index_dir=folder / "index", build=False)


def _decoded(sample: dict[str, Any]) -> tuple[int, int]:
    return len(sample["txt"]), int(sample["cls"])


def _resumed_files(files: Callable[[], FileSet], sizes: Sizes, num_turns: int) -> Row:
    def ours() -> None:
        data = files()
        _first_batch_at(data, int(0.9 * len(data)) // BATCH * BATCH)

    return _row(
        f"resume at 90 % of {sizes.num_files:,} tar files: open, first batch",
        {"ours": partial(_timed, ours)},
        num_turns,
    )


def _files_opened(files: Callable[[], FileSet], sizes: Sizes) -> Iterator[Row]:
    for world_size in (1, 2, 4):
        opened = []
        for rank in range(world_size):
            data = files()
            sampler, _ = sampler_of(
                data, order=None, sharding="file", global_batch=BATCH, rank=rank, world_size=world_size, num_shards=4
            )
            for _, batches in TrainLoader(data, sampler).epoch():
                for _ in batches:
                    pass
            opened.append(data.opened.cache_info().misses)
        most = sizes.num_files // world_size + 4
        yield Row(f"files opened by a worker of {world_size}, 4 lanes", f"{max(opened):,} (at most {most:,})", "", "")


# ----------------------------------------------------------------------------------------------------- steps that read


def _reading(sizes: Sizes, num_turns: int) -> Iterator[Row]:
    """Yields the steps of loaders whose reading waits, over a step that reads nothing."""
    weights = torch.randn(512, 512)

    def compute() -> None:
        end_s = now_s() + COMPUTING_S
        while now_s() < end_s:
            torch.mm(weights, weights)

    data = Rows(BATCH * sizes.num_steps, wait_s=_sleep_for(READING_SHARE * COMPUTING_S / BATCH))
    loader = TrainLoader(data, TrainSampler(len(data), global_batch=BATCH, rank=0, world_size=1))
    epochs: dict[str, Callable[[], Iterator[Any]]] = {
        "nothing": lambda: iter([None] * sizes.num_steps),
        "ours": lambda: _our_epoch(loader),
        "torch": lambda: iter(DataLoader(data, batch_size=BATCH, shuffle=True)),
        "torch, a loader process": lambda: iter(DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=1)),
    }
    found = take_turns({name: partial(_step_s, epoch, compute) for name, epoch in epochs.items()}, num_turns)
    nothing = found.pop("nothing")
    over = {
        name: three_digits(statistics.median(a / b for a, b in zip(times, nothing, strict=True)))
        for name, times in found.items()
    }
    name = "a step whose reading waits for 80 % of it, over one that reads nothing"
    yield Row(name, over["ours"], over["torch"], "")
    yield Row(f"{name}; torch's with a loader process", over["ours"], over["torch, a loader process"], "")


def _sleep_for(wanted_s: float) -> float:
    """Returns what to ask of `time.sleep`, which takes longer, for a wait of this time."""
    start_s = now_s()
    for _ in range(100):
        time.sleep(wanted_s)
    return max(1e-6, 2 * wanted_s - (now_s() - start_s) / 100)


def _our_epoch(loader: TrainLoader) -> Iterator[Any]:
    for _, batches in loader.epoch():
        yield from batches


def _step_s(epoch: Callable[[], Iterator[Any]], compute: Callable[[], None]) -> float:
    """Returns the mean time of a step, from one batch to the next, after the first quarter."""
    times: list[float] = []
    begin_s = now_s()
    for _ in epoch():
        compute()
        times.append(now_s() - begin_s)
        begin_s = now_s()
    return statistics.mean(times[len(times) // 4 :])


def _samples_per_s(sizes: Sizes, num_turns: int) -> Iterator[Row]:
    """Yields how fast an epoch goes through the loaders."""
    num_samples = BATCH * 10 * sizes.num_steps
    tensors = torch.randn(num_samples, 16), torch.zeros(num_samples, dtype=torch.int64)
    whole, one_by_one = TensorSet(*tensors), torch.utils.data.TensorDataset(*tensors)
    for name, ours, theirs in (("in whole batches", whole, one_by_one), ("one by one", one_by_one, one_by_one)):
        loader = TrainLoader(ours, TrainSampler(num_samples, global_batch=BATCH, rank=0, world_size=1))
        sampler: TorchSampler[Any] = TorchSampler(theirs, num_replicas=1, rank=0)
        turns = {
            "ours": partial(_timed, lambda loader=loader: sum(1 for _ in _our_epoch(loader))),  # type: ignore[misc]
            "torch": partial(
                _timed,
                lambda data=theirs, sampler=sampler: sum(  # type: ignore[misc]
                    1 for _ in DataLoader(data, batch_size=BATCH, sampler=sampler)
                ),
            ),
        }
        yield _row(f"an epoch of {num_samples:,} tensors through the loader, {name}", turns, num_turns)


# ---------------------------------------------------------------------------------------------------------- the table


def _timed(work: Callable[[], Any]) -> float:
    start_s = now_s()
    work()
    return now_s() - start_s


def _row(name: str, turns: Mapping[str, Callable[[], float]], num_turns: int) -> Row:
    found = take_turns(turns, num_turns)
    ours, torchs = found["ours"], found.get("torch")
    if torchs is None:
        return Row(name, _in_ms(ours), "", "")
    ratio = statistics.median(theirs / mine for mine, theirs in zip(ours, torchs, strict=True))
    return Row(name, _in_ms(ours), _in_ms(torchs), three_digits(ratio))


def _in_ms(times_s: list[float]) -> str:
    return f"{three_digits(1e3 * statistics.median(times_s))} ms"


def show(num_turns: int, sizes: Sizes = USUAL) -> None:
    """Measures everything, and prints the table."""
    torch.set_num_threads(1)
    table = Table(title=f"feeding one process, one thread; medians of {num_turns} turns")
    table.add_column("what", overflow="fold")
    for title in ("ours", "torch", "torch ÷ ours"):
        table.add_column(title, justify="right")
    for row in rows(sizes, num_turns):
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=whole(1), default=5, help="turns of each measurement (default: %(default)s)")
    show(parser.parse_args().turns)


if __name__ == "__main__":
    main()
