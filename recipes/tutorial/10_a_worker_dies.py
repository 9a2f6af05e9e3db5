"""10 · A worker dies

Among thousands of workers, some fail every day. Who notices, what is said, and how much work is lost?

    step          1  2  3  4  5  6  7  8  9 10 11 12
    run A         ●──●──●──■──●──●──●──■──●──●──●──■     ■ checkpoint
    run B, 1st    ●──●──●──■──●──●──✗                    rank 1 is killed; rank 0 notices, and its error names rank 1
    run B, 2nd                ●──●──●──■──●──●──●──■     goes on after step 4, and ends with the bits of run A
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from problem import answer, batch, flat_gradient, net
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import WorkersFailed
from ddp.train.steps.state import TrainState

DIES_IN, SAVE_EVERY, NUM_STEPS = 7, 4, 12

# ## The run
#
# `ddp.fit` is the loop of chapter 00 with all that came since. Every four steps it writes a *checkpoint*: the weights,
# the states of the optimizer and the learning rate, and the position in the data (chapter 08). Dropout's random numbers
# follow from the seed, the step and the part of the batch (here one part per worker). So a run continues to the bit.


class Beginning(ddp.Callback):
    """Notes after how many steps a call of `ddp.fit` begins."""

    def fit_start(self, state: TrainState) -> None:
        self.num_steps = state.step


class Accident(ddp.Callback):
    """Kills rank 1 in the middle of a run, without a word, as the kernel does when memory runs out."""

    def step_start(self, state: TrainState) -> None:
        if state.step == DIES_IN - 1 and state.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, *callbacks: ddp.Callback) -> tuple[int, Tensor, float]:
    """Returns after how many steps this call began, and the weights and the test loss at the end."""
    model = nn.Sequential(net(), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    begins, keep = Beginning(), ddp.Folder(run_dir, resume="auto", every_steps=SAVE_EVERY, progress=False, curves=False)
    state = ddp.fit(model, batch(), optimizer, loss=F.cross_entropy, global_batch=5, max_steps=NUM_STEPS, folder=keep,
                    schedule=ddp.optim.TorchSchedule(rates, every="step"), test_data=batch(),
                    callbacks=[begins, *callbacks])
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return begins.num_steps, weights, state.evaluation["test_loss"]


def with_accident(folder: Path) -> None:
    """Makes run A, and leaves its results there; then run B, which fails. Rank 0 writes down why."""
    comm = ddp.init(abort_s=10)  # no wait takes longer; on Linux, a dead process of the same host is noticed at once
    torch.save(train(folder / "A")[1:], folder / f"A-{comm.rank}.pt")
    start = time.monotonic()
    try:
        train(folder / "B", Accident())
    except ddp.PeerLost as error:
        (folder / f"B-{comm.rank}.txt").write_text(f"{time.monotonic() - start:.1f} s after run B began: {error}")
        raise


def afterwards(folder: Path) -> tuple[int, Tensor, float, Tensor]:
    """Continues run B. Returns where it began, its results, and the gradient that these workers compute."""
    comm, model, (inputs, classes) = ddp.init(), net(), batch()
    mine, replica = slice(comm.rank, None, comm.world_size), ddp.BucketedDataParallel(model)
    F.cross_entropy(replica(inputs[mine]), classes[mine]).backward()  # equal shares: the mean of means is right
    return *train(folder / "B"), flat_gradient(model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            first_lines = ddp.launch(with_accident, folder, workers=2)
        except WorkersFailed as error:
            first_lines = str(error).splitlines()[:2]
        print("the launcher:", *first_lines, sep="\n  ")
        assert first_lines == ["rank 0 stopped because rank 1 failed", "rank 1 was killed by SIGKILL (out of memory?)"]
        said = (folder / "B-0.txt").read_text()
        print(f"rank 0, {said}")
        assert "lost rank 1 " in said and ("its process has ended" in said or not hasattr(os, "pidfd_open"))

        weights_of_a, loss_of_a = torch.load(folder / "A-0.pt")
        for num_done, weights, test_loss, grad in ddp.launch(afterwards, folder, workers=2):
            assert torch.equal(weights, weights_of_a) and test_loss == loss_of_a
            assert num_done == SAVE_EVERY * ((DIES_IN - 1) // SAVE_EVERY)
            assert torch.allclose(grad, answer())
        print(f"run B continued after step {num_done}; steps lost: {DIES_IN - 1 - num_done}; it ends with run A's bits")

# ## What to look at
#
# Nobody can ask a dead rank. Every rank publishes what it does. On the dead rank's own host the kernel tells the
# others; on other hosts they miss its sign of life (`ddp/comm/watch/watchdog.py`). "Out of memory?" is a guess.
#
# ## The number that surprised
#
# 2 steps: all that came after the last checkpoint. On average half of `SAVE_EVERY` is lost. So how often to write a
# checkpoint depends on what one costs, and on how often a worker dies.
#
# ## Exercises
#
# 1. Continue run B with 3 workers. How far is it from `weights_of_a`? How far with `"num_shards": 6` in `keep`? Why?
# 2. Let B die in step 10, and cut a file of `B/checkpoints/step-00000008` in half. From where does it continue?
#
# ## Next
#
# `11_how_it_scales.py`: what each further worker brings.
