"""00 · One process, a loop by hand

What does a training step compute, and which part of it could somebody else do?

    batch of 12 samples ──▶ forward ──▶ 12 losses ──▶ mean ──▶ backward ──▶ gradient ──▶ optimizer step
    ├── 5 samples ──▶ forward ──▶ their sum ──▶ backward ──▶ gradient ─┐
    └── 7 samples ──▶ forward ──▶ their sum ──▶ backward ──▶ gradient ─┴─▶ add, divide by 12: the same gradient
"""

import torch
from problem import NUM_SAMPLES, answer, batch, flat_gradient, gradient_of_sum, net
from torch.nn import functional as F

# ## The loop
#
# Every program that trains a network is this loop. Forward computes the loss of a batch, backward computes the gradient
# of the loss with respect to every parameter, and the optimizer moves the parameters a little against the gradient.


def train(num_steps: int) -> list[float]:
    """Returns the loss before each step."""
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, classes = batch()
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), classes)  # the mean over the batch
        loss.backward()
        if step == 0:
            assert torch.allclose(flat_gradient(model), answer())  # the gradient that all chapters are about
        optimizer.step()
        losses.append(loss.item())
    return losses


# ## The parts
#
# The loss of a batch is a sum over its samples, divided by their number. A derivative of a sum is the sum of the
# derivatives. So two processes that have the same weights may each take a part of the batch, and what they find adds up
# to the gradient of the whole. They need not talk about samples or activations, only about gradients.
#
# The division needs care. Each part could divide by its own number of samples, and the two means could be averaged.
# Where the parts are unequal, that gives another gradient.


def add_sums(num_first: int) -> torch.Tensor:
    """Returns the gradient from two parts of the batch, as sums that are divided once, by the number of all samples."""
    inputs, classes = batch()
    here = gradient_of_sum(inputs[:num_first], classes[:num_first])
    there = gradient_of_sum(inputs[num_first:], classes[num_first:])
    return (here + there) / NUM_SAMPLES


def average_means(num_first: int) -> torch.Tensor:
    """Returns the average of the gradients of the mean losses of two parts."""
    inputs, classes = batch()
    here = gradient_of_sum(inputs[:num_first], classes[:num_first]) / num_first
    there = gradient_of_sum(inputs[num_first:], classes[num_first:]) / (NUM_SAMPLES - num_first)
    return (here + there) / 2


def error(gradient: torch.Tensor) -> float:
    """Returns the distance from the answer, relative to the length of the answer."""
    return ((gradient - answer()).norm() / answer().norm()).item()


if __name__ == "__main__":
    losses = train(num_steps=20)
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in 20 steps")
    print(f"parts of 6 and 6: sums are off by {error(add_sums(6)):.0e}, means by {error(average_means(6)):.0e}")
    print(f"parts of 5 and 7: sums are off by {error(add_sums(5)):.0e}, means by {error(average_means(5)):.0e}")
    print(f"parts of 1 and 11: sums are off by {error(add_sums(1)):.0e}, means by {error(average_means(1)):.0e}")

    assert losses[-1] < losses[0] / 2
    assert all(error(add_sums(num_first)) < 1e-14 for num_first in range(NUM_SAMPLES + 1))
    assert error(average_means(6)) < 1e-14 < 1e-2 < error(average_means(5)) < error(average_means(1))

# ## What to look at
#
# `add_sums` is the whole of data-parallel training. What comes from here on replaces its plus sign, by better and
# better ways to add what many processes have.
#
# ## The number that surprised
#
# 2e-01. With parts of 5 and 7 samples, averaging two means is wrong by a fifth of the gradient, and nothing fails: the
# loss still falls. So gradients travel here as sums, and are divided once, by the number of samples of all processes.
#
# ## Exercises
#
# 1. Average the means with weights 5/12 and 7/12. Why is the result right, and what must a process know for it?
# 2. Replace `SGD` by `Adam` and compare the loop with one that steps on `add_sums(5)`. How far apart are the weights
#    after 20 steps, and where does the difference come from?
#
# ## Next
#
# `01_send_and_receive.py`: two processes compute the two parts, and one sends its gradient to the other.
