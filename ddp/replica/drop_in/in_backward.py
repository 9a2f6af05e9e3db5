"""The optimizer inside backward: a bucket's parameters are stepped as soon as their mean is complete.

    model.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

The step overlaps with the rest of backward, and `p.grad` is None again once it has been used. Each bucket has an
optimizer of its own, which is made when the bucket has its first mean, because then the order of gradients is known.

The cost: a step is no longer a transaction. Once the first bucket has been stepped, nothing can be taken back, and
nothing can look at all gradients first. So it is refused with `ddp.fit` (which clips by the global norm, and takes back
a step whose values are not finite), with create_graph, and where gradients may be missing. If one is missing all the
same, its parameter is stepped with zeros before the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Layout
from ddp.replica.backward import Stepper

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class StepInBackward(Stepper):
    """Steps each bucket's parameters when it holds the mean.

    Args:
        make_optimizer: called with some of the parameters; the same settings each time.

    Attributes:
        optimizers: by bucket.

    Raises:
        TypeError: `make_optimizer` cannot be called.
    """

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        if not callable(make_optimizer):
            raise TypeError(
                f"make_optimizer={make_optimizer!r}: want a function of parameters, e.g. lambda p: SGD(p, 0.1)"
            )
        self._make = make_optimizer
        self.optimizers: dict[Bucket, Optimizer] = {}

    def begin(self, layout: Layout, *, creates_graph: bool) -> None:
        """Raises ConfigError for a backward that creates a graph, in which parameters must not change meanwhile."""
        if creates_graph:
            raise refusal("create_graph=True")

    @torch.no_grad()
    def complete(self, bucket: Bucket) -> None:
        """Steps the bucket's parameters, and drops their gradients."""
        if bucket not in self.optimizers:
            self.optimizers[bucket] = self._make([slot.parameter for slot in bucket.slots])
        self.optimizers[bucket].step()
        self.optimizers[bucket].zero_grad(set_to_none=True)


def check_own_optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ConfigError if torch steps one of these in backward: by this rank's gradient, before there is a mean."""
    if found := [name for name, parameter in named if hasattr(parameter, "_in_backward_optimizers")]:
        raise ConfigError(
            f"{', '.join(found)}: _apply_optimizer_in_backward of torch.distributed.optim steps these parameters by "
            "this rank's gradient, before there is a mean, and replicas would differ. Leave it out, and call "
            "step_in_backward(lambda parameters: SGD(parameters, lr=0.1)), say, of the replica"
        )


class StepsOfOthers(Stepper):
    """Finds parameters that someone else has stepped in backward, by this rank's gradient, before there is a mean.

    A gradient that is gone when backward has ended proves nothing, because autograd also reaches parameters with
    undefined gradients. But a step of a parameter writes to it, and torch counts that. The counts are recorded in the
    first step, and in each that follows one with undefined gradients: no other step pays for it.
    """

    def __init__(self) -> None:
        self._is_suspicious = True
        self._versions: dict[str, int] = {}

    def begin(self, layout: Layout, *, creates_graph: bool) -> None:
        """Notes how often each parameter was written to, if this step is to be checked."""
        self._versions = {slot.name: slot.parameter._version for slot in layout.slots} if self._is_suspicious else {}

    def check(self, gone: Callable[[], Sequence[Slot]]) -> None:
        """Raises ConfigError if one of the parameters whose gradient is gone was written to since `begin`."""
        slots = gone()
        self._is_suspicious = bool(slots)
        versions = ((slot, self._versions.get(slot.name)) for slot in sorted(slots, key=lambda slot: slot.index))
        if found := [slot.name for slot, before in versions if before not in (None, slot.parameter._version)]:
            raise ConfigError(
                f"{', '.join(found)}: a hook (yours, or that of _apply_optimizer_in_backward) has stepped these "
                "parameters by this rank's gradient, before there is a mean, and replicas differ now. Leave it out, "
                "and call step_in_backward(lambda parameters: SGD(parameters, lr=0.1)), say, of the replica"
            )


def refusal(of: str) -> ConfigError:
    """Returns the error for what does not go with a step inside backward."""
    return ConfigError(
        f"{of} does not go with step_in_backward: once the first bucket is stepped, a step cannot be taken back, and "
        "nothing can look at all gradients before. Call optimizer.step() after backward instead"
    )
