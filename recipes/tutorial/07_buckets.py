"""07 · Buckets and overlap

The naive replica waits until backward has ended, and then for a message per parameter. How can the wait disappear?

    naive      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░ ░░ ░░ ░░ ░░ ░░ ░░ ░░ a message per parameter, each with its α
    buckets    backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░ ░░░░░░░ fewer messages
    overlap    backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░ only the last one is waited for
    messages               ░░░░░░░ ░░░░░░░ ░░░░░░    the others are on their way while backward goes on
"""

from functools import partial

import torch
from problem import NUM_SAMPLES, answer, as_threads, flat_gradient, net, share
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.comm.work import Work
from ddp.replica.timeline_picture import timeline_text

# ## By hand
#
# Backward computes gradients from the last layer to the first; autograd calls a hook when one is ready. Once all
# gradients of a *bucket* are ready, they are copied side by side, and their all-reduce is *launched*: it runs in the
# background. All ranks must launch in the same order, and fill a bucket even if a gradient is missing. Here none is.


class Buckets:
    """Averages the gradients of a model while backward runs, in buckets of two parameters."""

    def __init__(self, comm: ddp.Communicator, model: nn.Module) -> None:
        self.comm, self.in_flight = comm, list[tuple[list[nn.Parameter], torch.Tensor, Work]]()
        backwards = list(model.parameters())[::-1]  # the order in which gradients become ready
        for bucket in (backwards[k : k + 2] for k in range(0, len(backwards), 2)):
            waits_for = set(bucket)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.note, bucket, waits_for))

    def note(self, bucket: list[nn.Parameter], waits_for: set[nn.Parameter], parameter: nn.Parameter) -> None:
        """Launches the bucket if this gradient is the last one that it waits for."""
        waits_for.remove(parameter)
        if not waits_for:
            waits_for.update(bucket)  # in the next backward
            flat = torch.cat([each.grad.flatten() for each in bucket])
            self.in_flight.append((bucket, flat, self.comm.all_reduce(flat, async_op=True)))

    def finish(self, count: int) -> None:
        """Waits for all buckets, and copies the means to where the optimizer looks for them."""
        for bucket, flat, work in self.in_flight:
            work.wait()  # until then `flat` belongs to the all-reduce
            for parameter, mean in zip(bucket, (flat / count).split([each.numel() for each in bucket]), strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        self.in_flight.clear()


# ## The same in the library
#
# `ddp.BucketedDataParallel` (`ddp/replica/backward.py`) learns the order in the first backward. A gradient lives in its
# bucket, so nothing is copied back, and the all-reduce divides on its way.


def on_each_rank(comm: ddp.Communicator) -> list[torch.Tensor]:
    """Returns the gradients of three backwards by hand, and of three by the library."""
    model, other, (inputs, classes), gradients = net(), net(), share(comm.rank, comm.world_size), []
    buckets = Buckets(comm, model)
    replica = ddp.BucketedDataParallel(other, comm=comm, overlap=True, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(inputs), classes, reduction="sum").backward()
        buckets.finish(NUM_SAMPLES)
        replica.zero_grad()
        loss_sum = F.cross_entropy(replica(inputs), classes, reduction="sum")
        replica.ride_along(ddp.Totals(loss_sum.detach(), len(inputs)))
        loss_sum.backward()  # ends when all buckets are complete
        gradients += [flat_gradient(model), flat_gradient(other)]
    assert len(replica.buckets) == 2 and replica.totals.num_items == NUM_SAMPLES
    return gradients


def timeline() -> dict[str, object]:
    """Returns the times of one backward of a larger model, on this rank."""
    comm = ddp.init(shared_memory=False)  # messages, as between hosts
    torch.manual_seed(comm.rank)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    replica = ddp.BucketedDataParallel(model, overlap=True, bucket_cap_mb=1)
    for _ in range(5):
        replica(torch.randn(256, 512)).square().mean().backward()
    return replica.logging_data()


if __name__ == "__main__":
    for p in (1, 2, 3, 5):
        results = as_threads(on_each_rank, p)
        assert all(torch.allclose(gradient, answer()) for gradients in results for gradient in gradients)
        assert all(torch.equal(torch.cat(gradients), torch.cat(results[0])) for gradients in results)
    steps = ddp.launch(timeline, workers=2)
    print(timeline_text(steps))
    for step in steps:
        launched_s = [bucket["launched_s"] for bucket in step["buckets"]]
        assert launched_s == sorted(launched_s) and launched_s[0] < step["backward_s"]

# ## What to look at
#
# The first buckets are complete while backward still computes. `scripts/ddp draw overlap --svg overlap.svg` draws it:
#
# ![Timeline of a backward with overlap](pictures/overlap.svg)
#
# ## The number that surprised
#
# The share that is hidden: most of the communication costs no time. Only the last bucket has nothing to hide behind.
#
# ## Exercises
#
# 1. Give `timeline` a `bucket_cap_mb` of 100, and then of 0.1. What is left of the overlap, and what does it cost?
# 2. `python -m ddp exercise 07`: write the lines that launch a bucket, in `ddp/replica/backward.py`.
#
# ## Next
#
# `08_who_gets_which_sample.py`: equal copies are not enough if two ranks train on the same samples.
