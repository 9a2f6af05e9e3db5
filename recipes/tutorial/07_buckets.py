"""07 · Buckets and overlap

The naive replica waits until backward has ended, and then for a message per parameter. How can the wait disappear?

    naive      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░ ░░ ░░ ░░ ░░ ░░ ░░ ░░ a message per parameter, each with its α
    buckets    backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░ ░░░░░░░ fewer messages
    overlap    backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░ only what is still on its way is waited for
    messages               ░░░░░░░ ░░░░░░░ ░░░░░░    the others arrive while backward goes on
"""

import torch
from problem import NUM_SAMPLES, answer, as_threads, flat_gradient, net, share
from torch import nn

import ddp
from ddp.lab.timeline import timeline_text

# ## By hand
#
# Backward computes gradients from the last layer to the first, and autograd calls an *observer* for each one. Gradients
# that are reduced together are a *bucket*: once all are ready, they are copied side by side, and their all-reduce is
# *launched*, in the background. All ranks must launch all buckets, in the same order. The first observer of a backward
# asks autograd to call `finish` when this backward has ended.


def average_in_buckets(comm: ddp.Communicator, model: nn.Module) -> None:
    """Makes every backward of this model end with averaged gradients, in buckets of two parameters."""
    backwards = list(model.parameters())[::-1]  # the order in which gradients become ready
    bucket_of = {parameter: backwards[k // 2 * 2 : k // 2 * 2 + 2] for k, parameter in enumerate(backwards)}
    ready, in_flight = set[nn.Parameter](), []

    def note(parameter: nn.Parameter) -> None:
        if not ready:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        ready.add(parameter)
        if ready.issuperset(bucket := bucket_of[parameter]):
            flat = torch.cat([each.grad.flatten() for each in bucket])
            in_flight.append((bucket, flat, comm.all_reduce(flat, async_op=True)))

    def finish() -> None:
        for bucket, flat, work in in_flight:
            work.wait()  # until then `flat` belongs to the all-reduce
            means = (flat / NUM_SAMPLES).split([each.numel() for each in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))  # to where the optimizer looks for it
        in_flight.clear()
        ready.clear()

    for parameter in backwards:
        parameter.register_post_accumulate_grad_hook(note)


# ## The same in the library
#
# `ddp.BucketedDataParallel` (`ddp/replica/backward.py`) learns the order in the first backward, because layers may be
# used in another order than they were made in. A gradient lives in its bucket, so nothing is copied back. Observers of
# the *outputs* of forward find the end of backward, also for a bucket without any gradient (`ddp/replica/autograd.py`).
# Large linear layers need no `torch.cat` either: the gradient of such a weight is the product of two matrices, which
# `torch.mm(…, out=place)` computes in the bucket (`ddp/replica/direct.py`).


def on_each_rank(comm: ddp.Communicator) -> list[torch.Tensor]:
    """Returns the gradients of three backwards by hand, and of three by the library."""
    model, other, gradients = net(), net(), []
    inputs, classes = share(comm.rank, comm.world_size)
    average_in_buckets(comm, model)
    replica = ddp.BucketedDataParallel(other, comm=comm, overlap=True, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), classes, reduction="sum").backward()
        replica.zero_grad()
        loss_sum = nn.functional.cross_entropy(replica(inputs), classes, reduction="sum")
        replica.ride_along(ddp.Totals(loss_sum.detach(), len(inputs)))
        loss_sum.backward()
        gradients += [flat_gradient(model), flat_gradient(other)]
    assert len(replica.buckets) == 2 and replica.totals.num_items == NUM_SAMPLES
    return gradients


def timeline() -> dict[str, object]:
    """Returns the times of the last of five backwards of a larger model, on a rank that sends messages."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    replica = ddp.BucketedDataParallel(model, comm=ddp.init(shared_memory=False), overlap=True, bucket_cap_mb=1)
    for _ in range(5):
        replica.zero_grad()
        replica(torch.randn(256, 512)).square().mean().backward()
    assert sum(len(bucket.direct) for bucket in replica.buckets) == 6  # weights: computed in place
    return replica.logging_data()


if __name__ == "__main__":
    for p in (1, 2, 3, 5):
        results = as_threads(on_each_rank, p)
        assert all(torch.allclose(gradient, answer()) for gradients in results for gradient in gradients)
        assert all(torch.equal(torch.cat(gradients), torch.cat(results[0])) for gradients in results)
    steps = ddp.launch(timeline, workers=2)
    print(timeline_text(steps))
    assert all(step["overlap"] > 0 for step in steps)  # something was reduced while backward ran

# ## What to look at
#
# Times are in milliseconds since a rank's backward began: when a bucket was *ready*, and its all-reduce *launched* and
# *done*. *Hidden* is the share before backward ended. `scripts/ddp draw overlap --svg overlap.svg` draws it:
#
# ![Timeline of a backward with overlap](pictures/overlap.svg)
#
# ## The number that surprised
#
# The share that is hidden, and that it is not free. To send takes a core, too. Where backward needs all cores it
# becomes slower, and part of what was hidden is paid for there.
#
# ## Exercises
#
# 1. Give `timeline` a `bucket_cap_mb` of 2, and then of 100: what is left to hide behind? Then set `overlap=False`, at
#    which the last assertion fails. How long do backward and the wait take together, on your number of cores?
# 2. `scripts/ddp exercise 07`: write the lines of `ddp/replica/backward.py` that launch a bucket.
#
# ## Next
#
# `08_who_gets_which_sample.py`: equal copies are not enough if two ranks train on the same samples.
