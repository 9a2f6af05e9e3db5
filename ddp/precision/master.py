"""Master weights: parameters in bfloat16, and a float32 copy of each that the optimizer updates.

    forward, backward     bfloat16 parameters and gradients: half the memory, and half the bytes on a network
    step                  the gradient as float32; the optimizer updates the master; the parameter is it, rounded

bfloat16 has 8 bits of precision, so an update of less than 1/256 of a weight would be lost, and most are. The master
adds them up. A checkpoint has the masters, in the place of the parameters. So it loads into any model, and a run may
go on from it in any precision. At the end of training the model has float32 parameters again, which are the masters.

BatchNorm keeps its parameters in float32, beside its statistics.

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.1. Read before: `loss_scale.py`,
`optim/update.py`. Read next: `train/state.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ddp.optim.update import Update, clipped_step, gradient_norm


class MasterWeights:
    """Makes a model's parameters bfloat16, and keeps float32 copies of them.

    Attributes:
        of: by parameter, its master.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.of: dict[Tensor, nn.Parameter] = {}
        for parameter in narrowed(module):
            self.of[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.bfloat16()
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state with the masters in the place of its parameters."""
        named = dict(self._module.named_parameters(remove_duplicate=False))
        state: dict[str, Tensor] = self._module.state_dict()
        return {**state, **{name: self.of[p].detach() for name, p in named.items() if p in self.of and name in state}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` has returned."""
        self._module.load_state_dict(state)
        for name, parameter in self._module.named_parameters():
            if parameter in self.of:
                self.of[parameter].copy_(state[name])

    def give_back(self) -> None:
        """Makes the parameters float32 again: the masters."""
        for parameter, master in self.of.items():
            parameter.data, parameter.grad = master.data, None
        self.of.clear()


def narrowed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the float32 parameters that become bfloat16."""
    kept = {id(p) for child in module.modules() if isinstance(child, _NormBase) for p in child.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in kept and parameter.dtype == torch.float32:
            yield parameter


def twin(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer with the same attributes and hooks. (`copy.copy` would keep no attribute of a subclass.)"""
    other = object.__new__(type(optimizer))
    # A scheduler puts a `step` there that would step the first one.
    other.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return other


class MasterUpdate(Update):
    """Updates the masters, and rounds them to the parameters.

    Args:
        module: the model, whose parameters are bfloat16 already.
        optimizer: over its parameters. Its groups hold in every step; its state is elsewhere, until `finish`.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, masters: MasterWeights) -> None:
        super().__init__(module, optimizer)
        self._masters = masters
        self._of_masters = twin(optimizer)
        self._of_masters.state = defaultdict(dict)
        self._of_masters.state.update({self._master(p): state for p, state in optimizer.state.items()})
        self._sync()
        optimizer.state = defaultdict(dict)

    def _master(self, parameter: Tensor) -> Tensor:
        return self._masters.of.get(parameter, parameter)

    def _sync(self) -> None:
        """Takes over the optimizer's groups as they are now."""
        self._of_masters.param_groups = [
            {**group, "params": [self._master(parameter) for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def gradient_norm(self) -> Tensor:
        for parameter, master in self._masters.of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        return gradient_norm(self._master(parameter) for parameter in self._module.parameters())

    @torch.no_grad()
    def step(self, norm: Tensor, clip_norm: float | None) -> None:
        self._sync()
        clipped_step(self._of_masters, map(self._master, self._module.parameters()), norm, clip_norm)
        self._take_over()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        moved = {parameter: master for parameter, master in self._masters.of.items() if master.grad is not None}
        torch._foreach_copy_(list(moved), list(moved.values()))
        for master in moved.values():
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        self._sync()
        return self._of_masters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._of_masters.load_state_dict(state)
        self._take_over()

    def _take_over(self) -> None:
        """Gives the optimizer's groups what those of the masters have by now."""
        for group, newer in zip(self.optimizer.param_groups, self._of_masters.param_groups, strict=True):
            group.update({key: value for key, value in newer.items() if key != "params"})

    def finish(self) -> None:
        parameters: dict[Tensor, Tensor] = {master: parameter for parameter, master in self._masters.of.items()}
        state = self._of_masters.state
        self.optimizer.state.update({parameters.get(each, each): value for each, value in state.items()})
        self._of_masters.state = defaultdict(dict)
        self._masters.give_back()
