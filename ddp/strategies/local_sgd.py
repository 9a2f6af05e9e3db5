"""Local SGD: every worker trains by itself for a round of steps; then the workers agree on common parameters.

    micro_batch   forward, backward, clip, and a step of the worker's own optimizer: an inner step. No message
    round's end   each worker's difference to the last common parameters, weighted by its samples, is averaged, in
                  buckets, through wires or hooks. Until `update` the module holds the last common parameters
    agree         loss, count and norm of the mean difference, once a round
    update        the outer step: common ← common − outer_lr · (mean difference, with Nesterov momentum)

With outer_lr=1 and outer_momentum=0 the common parameters become the workers' mean, weighted by samples: local SGD
(Stich, arXiv 1805.09767). DiLoCo has AdamW inside, and 0.7 and 0.9 outside (Douillard et al., arXiv 2311.08105). One
round of H steps sends as much as one synchronous step, an H-th for each sample.

With every=1, SGD makes the synchronous step, because it is linear: the mean of p − lr · gᵣ is p − lr · the mean of gᵣ.
With momentum that holds as long as each worker has the same share of all samples: then the mean of the workers'
velocities is the velocity of the mean. Clipping and Adam are not linear: with them, every=1 is another algorithm.

What is not averaged stays a worker's own: the optimizer's state, and buffers, both of which a checkpoint has of every
worker. An evaluation sees those of rank 0. BatchNorm's running statistics become those over the items of all workers.
A round that is not finite leaves parameters and buffers as it has found them, and no gradient.

With island="host" the workers of a host add up their gradients in memory in every inner step, and make the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import broadcast_object
from ddp.errors import ConfigError
from ddp.optim.layerwise import clipped_step
from ddp.optim.norms import gradient_norm
from ddp.policies import LocalSGD, Rounds
from ddp.replica.broadcast import BufferSnapshot
from ddp.replica.bucketed import BucketedDataParallel
from ddp.setting import Setup, refuse
from ddp.strategies.strategy import Agreement, Replicated


class LocalSteps(Replicated):
    """Makes inner steps on this rank alone, and outer steps on all. Collective to make.

    Args:
        model: a module, or a replica of it; in buckets, by an all-reduce.
        optimizer: over its parameters: this rank's own, for inner steps.
        rounds: how the common parameters follow, without a delay; how long a round is the loop says, by `is_last`.
        how: as in `Replicated`, but not with precision="fp16" or "bf16_pure".

    Raises:
        ConfigError: the model, the precision, the hosts or a delay do not go with it.
    """

    model: BucketedDataParallel
    needs_buckets = unties = True
    _may_be_late = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, rounds: Rounds | None = None, **how: Any) -> None:
        if how.get("precision") in ("fp16", "bf16_pure"):
            raise ConfigError(f"LocalSteps with precision={how['precision']!r}: take precision='bf16' or 'fp32'")
        rounds = rounds or LocalSGD()
        if rounds.delay and not self._may_be_late:
            raise ConfigError(f"LocalSteps with delay={rounds.delay}: take ddp.strategies.Streaming, or delay=0")
        super().__init__(model, optimizer, **how)
        self.rounds = rounds
        momentum = rounds.outer_momentum
        whole = list(self.model.module.parameters())
        self._outer = SGD(whole, lr=rounds.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._island = island_of(self.model.comm) if rounds.island == "host" else None
        self._is_round = False  # the last step was one
        self._inner: list[nn.Parameter] = []  # trained in the running round; none between rounds
        self._common: list[Tensor] = []  # theirs, as the round began
        self._num_items = self._num_items_of_step = 0.0  # of this rank, in the round so far, and in its last step
        self._has_gradient = self._is_finite = True  # in the round so far

    # --- a round -----------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, *, is_last: bool = True, synchronous: bool = False) -> Iterator[int]:
        model = self.model
        if model.compression is not None:
            model.compression.change_to("gradients" if synchronous else "differences")
        self._is_round = not synchronous
        if synchronous:
            with super().micro_batch(is_last=is_last) as scale:
                yield scale
            return
        if not self._inner:
            self._begin()
        with model.no_sync(), model.without_buffer_sync():
            yield 1
        self._inner_step()
        self._stepped(is_last=is_last)

    @torch.no_grad()
    def _begin(self) -> None:
        self._inner = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        self._common = [parameter.detach().clone() for parameter in self._inner]
        self._num_items, self._has_gradient, self._is_finite = 0.0, False, True
        self._buffers = BufferSnapshot(self.model.module)
        self.model.zero_grad(set_to_none=True)  # of the mean difference

    def _inner_step(self) -> None:
        """Makes this rank's own step, with the mean gradient of the items of a micro-batch."""
        told = self.model.riding
        num_items = 1 if told is None else told.items_on_host - self._num_items
        self._num_items += num_items
        self._num_items_of_step = num_items
        gradients = [each.grad for each in self._inner if each.grad is not None]
        self._has_gradient |= bool(gradients)
        if self._island is not None:
            gradients, num_items = self._of_island(self._island, num_items)
        if not num_items or not gradients:
            return
        torch._foreach_div_(gradients, float(num_items))
        norm = gradient_norm(self._inner)
        if math.isfinite(float(norm)):
            clipped_step(self.optimizer, self._inner, norm, self._clip_norm)
        else:
            self._is_finite = False
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _of_island(self, island: Communicator, num_items: float) -> tuple[list[Tensor], float]:
        """Adds up gradients and items of the ranks of this host."""
        for parameter in self._inner:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in self._inner if parameter.grad is not None]
        count = torch.tensor([num_items], dtype=torch.float64, device=island.device)
        label = f"round {self.model.num_steps + 1}, gradients of a host"
        island.all_reduce([*gradients, count], label=label)
        return gradients, float(count)

    @torch.no_grad()
    def _stepped(self, *, is_last: bool) -> None:
        """Averages the differences to the common parameters at the end of a round; the module has these again then."""
        if not is_last:
            return
        inner, common, told = self._inner, self._common, self.model.riding
        self._inner, self._common = [], []
        if told is not None and self._num_items and not self._has_gradient:
            return  # the loss was not computed from what the model returned, which the loop tells
        differences = [start - now for start, now in zip(common, inner, strict=True)]
        if told is not None:
            torch._foreach_mul_(differences, float(self._num_items))
        if not self._is_finite:
            for difference in differences:
                difference.fill_(torch.nan)  # so that all ranks know it
        _put(common, inner)
        for parameter, difference in zip(inner, differences, strict=True):
            parameter.grad = difference
        self.model.average_gradients()

    def _take_back(self) -> None:
        super()._take_back()
        if self._is_round:
            self._buffers.restore()
            self.model.zero_grad(set_to_none=True)

    def update(self, agreement: Agreement) -> None:
        if not self._is_round:
            super().update(agreement)
            return
        self._average_statistics(agreement)
        self._outer.step()

    @torch.no_grad()
    def _average_statistics(self, agreement: Agreement) -> None:
        """Gives all ranks BatchNorm's running statistics over the items of all, which have a share w on each rank.

        With means m and variances v the mean is M = Σ w·m, and the variance Σ w·(v + (m − M)²): the mean of the
        variances, and the variance of the means.
        """
        comm, modules = self.model.comm, self.model.modules()
        layers = [each for each in modules if isinstance(each, _NormBase) and each.training]  # others keep theirs
        means = [each.running_mean for each in layers if each.running_mean is not None]
        variances = [each.running_var for each in layers if each.running_var is not None]
        if not means or comm.world_size == 1:
            return
        everyone, label = agreement.totals.items_on_host, f"round {self.model.num_steps}, statistics"
        share = self._num_items / everyone if everyone else 1 / comm.world_size
        mean = share * (own := torch.cat(means))
        comm.all_reduce(mean, label=label)
        variance = share * (torch.cat(variances) + (own - mean).square())
        comm.all_reduce(variance, label=label)
        sizes = list(map(len, means))
        torch._foreach_copy_([*means, *variances], [*mean.split(sizes), *variance.split(sizes)])

    def finish(self, *, alone: bool = False) -> None:
        if self._inner:  # an error has ended a round
            with torch.no_grad():
                _put(self._common, self._inner)
            self._buffers.restore()
            self._inner, self._common = [], []
        if self._island is not None and not alone:
            self._island.close()
        super().finish(alone=alone)

    # --- in a checkpoint ---------------------------------------------------------------------------------------------
    #
    #     model, optimizer   the common parameters, and rank 0's optimizer: what every strategy can go on from
    #     local_sgd          the outer momentum
    #     own                by rank its optimizer and its buffers, which as many ranks take again. Any other number of
    #                        ranks drops them, and all begin with those of rank 0

    def state_dict(self) -> dict[str, Any]:
        common = {"outer": self._outer.state_dict()["state"], "is_round": self._is_round}
        return {**super().state_dict(), "local_sgd": common}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "local_sgd": None})
        if (known := broadcast_object(self.model.comm, state.get("local_sgd"))) is None:
            return  # of another strategy
        self._outer.load_state_dict({**self._outer.state_dict(), "state": known["outer"]})
        self._is_round = known["is_round"]
        if self.model.compression is not None and self._is_round:
            self.model.compression.change_to("differences")

    @property
    def _keeps_own_buffers(self) -> bool:
        return True

    def _own_state(self) -> dict[str, Any]:
        has_own = self._is_round and self.model.comm.rank
        return super()._own_state() | ({"optimizer": self.optimizer.state_dict()["state"]} if has_own else {})

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        super()._load_own_state(own)
        if "optimizer" in own:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": own["optimizer"]})


def island_of(comm: Communicator) -> Communicator:
    """Returns the ranks of this host. Collective.

    Raises:
        ConfigError: there is one host.
    """
    refuse(Setup(island="host", num_hosts=len(comm.hosts)))
    groups = [comm.subgroup(ranks) for ranks in comm.hosts]
    return next(group for group in groups if group is not None)


def _put(values: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    torch._foreach_copy_(list(parameters), list(values))
