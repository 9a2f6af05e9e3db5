"""Exercise memory: make the step of a batch that is too large for the memory.

    scripts/ddp exercise memory        says what is wrong with it

`step` is right, but takes this rank's whole share in one forward, and there is memory for `most` samples. Take the
share in micro-batches: each rank comes to the same weights as before, and sends its gradients as often as before, once.
Chapter 09 is about this.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

import ddp


def step(
    model: ddp.BucketedDataParallel,
    optimizer: Optimizer,
    inputs: Tensor,
    classes: Tensor,
    *,
    num_samples: int,
    most: int,
) -> None:
    """Makes one optimizer step on the global batch.

    Args:
        model: its backward averages the gradients over the ranks.
        inputs, classes: this rank's share of the batch; other ranks' may be larger or smaller.
        num_samples: of the batch, on all ranks together.
        most: how many samples a forward may take.
    """
    optimizer.zero_grad()
    loss_sum = F.cross_entropy(model(inputs), classes, reduction="sum")
    (loss_sum * model.comm.world_size / num_samples).backward()
    optimizer.step()
