"""00 · One process, a loop by hand

What does a training step compute, and which part of it can another process do?

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
# derivatives. So two processes that have the same weights can each take a part of the batch, and their gradients add up
# to the gradient of the whole batch. Gradients are all that they need to exchange.
#
# The division needs care. Each part could divide by its own number of samples, and the two means could be averaged.
# Where the parts are unequal, the result is a different gradient.


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
    for num_first in (6, 5, 1):
        of_sums, of_means = error(add_sums(num_first)), error(average_means(num_first))
        parts = f"parts of {num_first} and {NUM_SAMPLES - num_first}"
        print(f"{parts}: sums are off by {of_sums:.0e}, means by {of_means:.2g}")

    assert losses[-1] < losses[0] / 2
    assert all(error(add_sums(num_first)) < 1e-14 for num_first in range(NUM_SAMPLES + 1))
    assert error(average_means(6)) < 1e-14 and 0.16 < error(average_means(5)) < 0.17 < error(average_means(1))

# ## What to look at
#
# `add_sums` is the core of data-parallel training. Chapters 01 to 05 replace its plus sign: there the two terms are in
# different processes, and all of them need the sum.
#
# ## The number that surprised
#
# 0.16. With parts of 5 and 7 samples, an average of two means is off by a sixth of the gradient, and no error says so.
# So gradients travel here as sums, and are divided once, by the number of samples of all processes.
#
# ## Exercises
#
# 1. Average the means with weights 5/12 and 7/12. Why is the result right, and what must a process know for it?
# 2. Write a loop that calls `backward` on the sum of the losses of the first 5 samples, then on that of the other 7,
#    and divides `p.grad` by 12. How far are its weights from those of `train` after 20 steps, with SGD and with Adam?
#    Where does the difference come from?
#
# ## Next
#
# `01_send_and_receive.py`: two processes compute the two parts, and one sends its gradient to the other.
