"""10 · A worker dies

With a thousand workers, one of them fails every day. Who notices, what is said, and how much work is lost?

    step          1  2  3  4  5  6  7  8  9 10 11 12
    run A         ●──●──●──■──●──●──●──■──●──●──●──■     ■ checkpoint
    run B, 1st    ●──●──●──■──●──●──✗                    rank 1 is killed; rank 0 notices, and ends with its name
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
from ddp.train.state import TrainState

DIES_IN, SAVE_EVERY, NUM_STEPS = 7, 4, 12

# ## The run
#
# `ddp.fit` is the loop of chapter 00 with all that came since. Every four steps it writes a checkpoint: weights, the
# optimizer's state, and the position in the data. The position is three numbers (chapter 08), and no random number
# depends on a rank. So with these a run can go on as if nothing had happened.


class Beginning(ddp.Callback):
    """Notes after how many steps a call of `ddp.fit` begins."""

    def fit_start(self, state: TrainState) -> None:
        self.num_steps = state.step


class Accident(ddp.Callback):
    """Kills rank 1 in the midst of a run, without a word, as if its power had failed."""

    def step_start(self, state: TrainState) -> None:
        if state.step == DIES_IN - 1 and state.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, *callbacks: ddp.Callback) -> tuple[int, Tensor, float]:
    """Returns after how many steps this call began, and the weights and the test loss at the end."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    begins, keep = Beginning(), {"checkpoint_dir": run_dir, "checkpoint_every_steps": SAVE_EVERY, "resume": "auto"}
    state = ddp.fit(model, batch(), optimizer, loss=F.cross_entropy, global_batch=5, max_steps=NUM_STEPS, **keep,
                    schedule=rates, schedule_every="step", test_data=batch(), progress=False, curves=False,
                    callbacks=[begins, *callbacks])
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return begins.num_steps, weights, state.evaluation["test_loss"]


def with_accident(folder: Path) -> None:
    """Makes run A, and leaves its results there; then run B, which does not end."""
    comm = ddp.init(abort_s=10)  # no wait takes longer; a dead process on the same host is noticed at once
    _, *results = train(folder / "A")
    if comm.rank == 0:
        torch.save(results, folder / "results-of-A.pt")
    comm.barrier()
    train(folder / "B", Accident())


def afterwards(folder: Path) -> tuple[int, Tensor, float, Tensor]:
    """Continues run B. Returns where it began, its results, and the gradient that these workers compute."""
    comm, model, (inputs, classes) = ddp.init(), net(), batch()
    mine, replica = slice(comm.rank, None, comm.world_size), ddp.BucketedDataParallel(model)
    F.cross_entropy(replica(inputs[mine]), classes[mine]).backward()  # equal shares: the mean of means is right
    return *train(folder / "B"), flat_gradient(model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.monotonic()
        try:
            ddp.launch(with_accident, folder, workers=2)
            said = "nobody has noticed"
        except WorkersFailed as error:
            said = str(error)
        print(f"after {time.monotonic() - start:.1f} s, most of it to start two workers:\n{said}\n")
        assert "rank 1" in said and "SIGKILL" in said

        weights_of_a, loss_of_a = torch.load(folder / "results-of-A.pt")
        for first_step, weights, test_loss, grad in ddp.launch(afterwards, folder, workers=2):
            assert torch.equal(weights, weights_of_a) and test_loss == loss_of_a
            assert first_step == SAVE_EVERY * ((DIES_IN - 1) // SAVE_EVERY)
            assert torch.allclose(grad, answer())
        print(f"continued after step {first_step}; after step {NUM_STEPS} its weights have the bits of run A")

# ## What to look at
#
# Nobody asked the dead rank. Every rank publishes what it does, and the kernel tells its neighbours that its process is
# gone. On another host, a sign of life that fails to come says the same, and nobody waits longer than `abort_s`.
#
# `torch.equal` again: not one bit of run B tells that there was an accident. The steps 5 and 6 were made twice, on the
# same samples.
#
# ## The number that surprised
#
# 2 steps. That is all that was lost: what came after the last checkpoint. Half of `SAVE_EVERY` is lost on average, so
# the price of a checkpoint and the time between two accidents decide how often to write one.
#
# ## Exercises
#
# 1. Continue run B with 3 workers. Which bits differ, and why so few?
# 2. Kill rank 1 while a checkpoint is being written. Which one does the run continue from? See
#    `ddp/train/checkpoint_store.py`.
#
# ## Next
#
# `11_how_it_scales.py`: what is gained by each further worker.
