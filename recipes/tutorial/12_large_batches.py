"""12 · Large batches

More workers need a larger batch, and a larger batch leaves fewer steps. What does that break, and what mends it?

    batch 32     │ 45 steps an epoch │→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→→│
    batch 719    │  2 steps an epoch │→→ far enough?           →───────────────────→ 22 times as far: into the wall │
"""

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, share
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.data.sets.image_sets import load_digits

EPOCHS, SMALL, LARGE, WARMUP = 10, 32, 719, 0.1

# ## Batches without workers
#
# The chapters before have proven that p workers compute the gradient of the whole batch. So one process with a large
# batch shows what many workers would do. Twelve samples are too few for that; 1,438 scanned digits do.


def samples() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns inputs [n, 64] and classes [n], to train on and to test on."""
    splits = load_digits()
    train, test = splits.train.batch(range(len(splits.train))), splits.test.batch(range(len(splits.test)))
    return (train[0].flatten(1), train[1]), (test[0].flatten(1), test[1])


def network() -> nn.Sequential:
    """Returns a deep network, with the same first weights at every call."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


# ## The trust ratio
#
# A step may change a layer by a small share of its weights, whatever the length of its gradient g is. So LARS
# multiplies the rate of each tensor by ‖w‖ ÷ ‖g‖, its *trust ratio*; LAMB does so with Adam's update in the place of g.
# Biases keep the plain rate: their norm says nothing about the step that they can take.


def by_hand(parameter: Tensor, velocity: Tensor, rate: float, trusts: bool) -> None:
    """Makes a step of momentum, with or without a trust ratio."""
    ratio = parameter.norm() / parameter.grad.norm() if trusts and parameter.dim() > 1 else 1.0
    velocity.mul_(0.9).add_(ratio * parameter.grad)
    parameter -= rate * velocity


def library(model: nn.Module) -> ddp.optim.LARS:
    """Returns the library's LARS with the same choices: the rate outside the momentum, no decay, no factor η."""
    groups = ddp.optim.parameter_groups(model, weight_decay=0.0, adapt="never")
    return ddp.optim.LARS(groups, preset="timm", adapt="always", trust_coefficient=1.0, eps=0.0)


def train(batch: int, rate: float, *, trusts: bool = False, by_library: bool = False) -> tuple[float, Tensor]:
    """Returns the share of test digits that are read rightly, and the weights; with a warm-up and half a cosine."""
    (inputs, classes), (test_inputs, test_classes) = samples()
    model, seen, total = network(), 0, EPOCHS * len(inputs)
    schedule = ddp.optim.with_warmup(ddp.optim.cosine(), fraction=WARMUP)
    velocities, optimizer = [torch.zeros_like(p) for p in model.parameters()], library(model)
    for epoch in range(EPOCHS):
        for part in torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch)).split(batch):
            model.zero_grad()
            F.cross_entropy(model(inputs[part]), classes[part]).backward()
            factor = rate * schedule(seen + len(part) / 2, total)  # by samples, so alike for every batch
            seen += len(part)
            if by_library:
                for group in optimizer.param_groups:
                    group["lr"] = factor
                optimizer.step()
            else:
                with torch.no_grad():
                    for parameter, velocity in zip(model.parameters(), velocities, strict=True):
                        by_hand(parameter, velocity, factor, trusts)
    right = (model(test_inputs).argmax(dim=1) == test_classes).float().mean().item()
    return right, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    parts = [gradient_of_sum(*share(rank, 4)) for rank in range(4)]
    assert torch.allclose(sum(parts) / NUM_SAMPLES, answer())
    (inputs, classes), model = samples()[0], network()
    F.cross_entropy(model(inputs), classes).backward()
    ratios = [(p.detach().norm() / p.grad.norm()).item() for p in model.parameters() if p.dim() > 1]
    print("‖w‖ ÷ ‖g‖ by layer:", " ".join(f"{ratio:.0f}" for ratio in ratios))
    small, _ = train(SMALL, 0.1)
    print(f"batch {SMALL}, {EPOCHS * 45} steps, rate 0.1: {small:.0%}")
    for rate in (0.1, 0.3, 1.0, 0.1 * LARGE / SMALL):
        print(f"batch {LARGE}, {EPOCHS * 2} steps, rate {rate:.3g}: {train(LARGE, rate)[0]:.0%}")
    linear, trusted = train(LARGE, 0.1 * LARGE / SMALL)[0], train(LARGE, 0.02, trusts=True)
    print(f"batch {LARGE}, {EPOCHS * 2} steps, rate 0.02 with a trust ratio: {trusted[0]:.0%}")
    assert torch.allclose(trusted[1], train(LARGE, 0.02, by_library=True)[1], rtol=1e-4, atol=1e-5)
    assert max(ratios) > 3 * min(ratios)
    assert linear + 0.2 < trusted[0] < small - 0.1 and small > 0.9 and linear < 0.4

# ## What to look at
#
# *Linear scaling* makes a step of k times the batch k times as long: k small steps would have gone as far, as long as
# the gradient stays the same meanwhile. Here k is 22, and it does not. The first line says why no other single rate
# does: the layers' ratios differ threefold at the start, and change while the network learns.
#
# ## The number that surprised
#
# The last line, still far below the second. A trust ratio makes a step as long as the weights allow, but 20 steps are
# 20 steps. Past some batch, more workers buy almost nothing; `docs/large-batches.md` says how a run finds out where.
#
# ## Exercises
#
# 1. Give the biases a ratio, too. Does it matter here?
# 2. Train the large batch for 40 epochs, with and without the ratio. Was it the batch, or the number of steps?
#
# ## Next
#
# `13_less_traffic.py`: what if the network is the slowest part?
