"""Master weights: parameters in bfloat16, and a float32 copy of each that the optimizer updates.

    forward, backward     bfloat16 parameters and gradients: half the memory, and half the bytes on a network
    step                  the gradient as float32; the optimizer updates the master; the parameter is it, rounded

bfloat16 has 8 bits of precision, so an update of less than 1/256 of a weight would be lost, and most are. The master
adds them up. Where a parameter is no longer its master, rounded, somebody has set it, and the master follows. A
checkpoint has the masters, in the place of the parameters. So it loads into any model, and a run may go on from it in
any precision. At the end of training the model has float32 parameters again, which are the masters.

BatchNorm keeps its parameters in float32, beside its statistics.

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer


class MasterWeights:
    """Makes parameters of a model bfloat16, and keeps float32 copies of them, which the optimizer updates.

    Args:
        module: the model.
        parameters: those that become bfloat16; of none, nothing changes.
        watched: somebody may write to `parameter.data`, which shows in no counter, so that values must be compared.

    Attributes:
        of: by parameter, its master.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter], *, watched: bool = True) -> None:
        self._module, self._watched = module, watched
        self.of: dict[Tensor, nn.Parameter] = {}
        for parameter in parameters:
            self.of[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.bfloat16()
            parameter.grad = None
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._scratch = torch.empty(max((p.numel() for p in self.of), default=0), dtype=torch.bfloat16)
        self._note_rounded()

    # --- a step, in the order of time ---------------------------------------------------------------------------------

    def updated(self) -> Iterator[Tensor]:
        """Yields what the optimizer updates: the masters, and the parameters that have none."""
        return (self.of.get(parameter, parameter) for parameter in self._module.parameters())

    def take_gradients(self) -> None:
        """Gives the masters the gradients of their parameters, as float32."""
        for parameter, master in self.of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def take_in(self) -> None:
        """Gives the masters the elements of parameters that somebody has changed since they were rounded."""
        for parameter, master in self.of.items():
            if not self._watched and self._seen[parameter] == _version(parameter):
                continue
            if parameter.dtype != torch.bfloat16:  # by `parameter.data = …`
                master.copy_(parameter)
                parameter.data = master.bfloat16()
                continue
            if self._scratch.device != master.device:
                self._scratch = self._scratch.to(master.device)
            rounded = self._scratch[: master.numel()].view(master.shape).copy_(master)
            if not torch.equal(parameter.view(torch.int16), rounded.view(torch.int16)):  # bits, which is fast
                master.copy_(torch.where(parameter == rounded, master, parameter))
        self._note_rounded()

    @contextmanager
    def known_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Lets the optimizer have masters in the place of parameters, with their state, for a block."""
        self._exchange(optimizer, self.of)
        try:
            yield
        finally:
            self._exchange(optimizer, {master: parameter for parameter, master in self.of.items()})

    def _exchange(self, optimizer: Optimizer, of: Mapping[Any, Tensor]) -> None:
        if of:
            for group in optimizer.param_groups:
                group["params"] = [of.get(each, each) for each in group["params"]]
            state = {of.get(each, each): state for each, state in optimizer.state.items()}
            optimizer.state = defaultdict(dict, state)

    @torch.no_grad()
    def round(self) -> None:
        """Rounds the masters that had a gradient to their parameters."""
        moved = {parameter: master for parameter, master in self.of.items() if master.grad is not None}
        if moved:
            torch._foreach_copy_(list(moved), list(moved.values()))
        for master in moved.values():
            master.grad = None
        self._note_rounded()

    def _note_rounded(self) -> None:
        """Notes that every parameter is its master, rounded."""
        self._seen = {} if self._watched else {parameter: _version(parameter) for parameter in self.of}

    # --- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state with the masters in the place of its parameters."""
        self.take_in()
        state: dict[str, Tensor] = self._module.state_dict()
        if not self.of:
            return state
        named = dict(self._module.named_parameters(remove_duplicate=False))
        return {**state, **{name: self.of[p].detach() for name, p in named.items() if p in self.of and name in state}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` has returned."""
        self._module.load_state_dict(state)
        for name, parameter in self._module.named_parameters():
            if parameter in self.of:
                self.of[parameter].detach().copy_(state[name])
        self._note_rounded()

    def give_back(self) -> None:
        """Makes the parameters float32 again: the masters."""
        self.take_in()
        for parameter, master in self.of.items():
            parameter.data, parameter.grad = master.data, None
        self.of.clear()


def _version(parameter: Tensor) -> tuple[int, int]:
    """Returns what changes if somebody writes to a parameter, or gives it other memory."""
    return parameter._version, parameter.data_ptr()


def narrowed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the float32 parameters that become bfloat16."""
    kept = {id(p) for child in module.modules() if isinstance(child, _NormBase) for p in child.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in kept and parameter.dtype == torch.float32:
            yield parameter
