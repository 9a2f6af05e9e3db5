"""Mixed precision: autocast, the loss scale, and master weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ddp.process import gpu
from ddp.setting import Precision

# --- Mixed precision -------------------------------------------------------------------------------------------------
#
# With bf16 and fp16, parameters, gradients, their sum over ranks and the optimizer stay float32. bfloat16 has float32's
# range, so the loss needs no scaling (Kalamkar et al., arXiv 1905.12322). float16 has more digits and a small range, so
# it does. With bf16_pure, parameters and gradients are bfloat16 as well.


NARROW = {"bf16": torch.bfloat16, "bf16_pure": torch.bfloat16, "fp16": torch.float16}


def forward_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for forward and loss; backward runs outside it, in the types that forward chose."""
    if precision in NARROW:
        return torch.autocast(device.type, dtype=NARROW[precision])
    return nullcontext()


# --- Loss scale ------------------------------------------------------------------------------------------------------
#
# float16 has no number below 6e-8, and gradients are often smaller. So the loss is multiplied by a scale before
# backward, and gradients are divided by it together with the global count, in one division (`gradients/totals.py`).
#
#     a gradient is not finite     the scale is too large: it is halved, and the step is repeated
#     GROW_AFTER good steps        the scale is doubled, to find the largest that works
#
# The scale is a power of two, so multiplying and dividing by it changes no digit. All ranks see the norm of the same
# mean gradient, so all change their scales in the same way, without a message.
#
# Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, sections 3.2 and 4.1.


FIRST, LARGEST, LEAST = 1 << 16, 1 << 24, 1
GROW_AFTER = 2000  # steps


class LossScale:
    """The factor on the loss.

    Attributes:
        value: a power of two.
        num_good: steps since it was changed.
    """

    def __init__(self) -> None:
        self.value, self.num_good = FIRST, 0

    def grow(self) -> None:
        """Records a step whose gradients were finite."""
        self.num_good += 1
        if self.num_good >= GROW_AFTER:
            self.value, self.num_good = min(2 * self.value, LARGEST), 0

    def shrink(self) -> bool:
        """Halves the scale after a non-finite gradient. Returns False if it is the smallest one already."""
        if self.value <= LEAST:
            return False
        self.value, self.num_good = self.value // 2, 0
        return True

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a checkpoint."""
        return {"value": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes from a state that `state_dict` returned."""
        self.value, self.num_good = state["value"], state["num_good"]


# --- Master weights --------------------------------------------------------------------------------------------------
#
# Parameters in bfloat16, and a float32 copy of each that the optimizer updates.
#
#     forward, backward     bfloat16 parameters and gradients: half the memory, and half the bytes on a network
#     step                  the gradient as float32; the optimizer updates the master; the parameter is it, rounded
#
# bfloat16 has 8 bits of precision, so an update of less than 1/256 of a weight would be lost, and most are. The master
# adds them up. If a parameter no longer equals its rounded master, the program has changed it, and the master follows.
# A checkpoint has the masters in place of the parameters. So it loads into any model, and a run can resume from it in
# any precision. At the end of training the masters become the model's parameters, in float32 again.
#
# BatchNorm keeps its parameters in float32, like its statistics.
#
# Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.1.


class MasterWeights:
    """Converts parameters of a model to bfloat16, and keeps float32 copies of them, which the optimizer updates.

    Args:
        module: the model.
        parameters: those that become bfloat16; if there are none, nothing changes.
        watched: the program may write to `parameter.data`, which no counter shows, so values must be compared.

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
        self._record_rounded()

    # --- a step, in the order of time ---------------------------------------------------------------------------------

    def updated(self) -> Iterator[Tensor]:
        """Yields the tensors that the optimizer updates: the masters, and the parameters that have none."""
        return (self.of.get(parameter, parameter) for parameter in self._module.parameters())

    def take_gradients(self) -> None:
        """Gives the masters the gradients of their parameters, as float32."""
        for parameter, master in self.of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def take_in(self) -> None:
        """Copies to the masters the elements of parameters that the program has changed since they were rounded."""
        for parameter, master in self.of.items():
            if parameter.grad is None:
                master.grad = None  # no rank has a gradient; on a GPU that is known only after `take_gradients`
            if not self._watched and self._seen[parameter] == _version(parameter):
                continue
            if parameter.dtype != torch.bfloat16:  # by `parameter.data = …`
                master.copy_(parameter)
                parameter.data = master.bfloat16()
                continue
            if self._scratch.device != master.device:
                self._scratch = self._scratch.to(master.device)
            rounded = self._scratch[: master.numel()].view(master.shape).copy_(master)
            on_gpu = parameter.device.type == gpu.KIND  # where the host would wait for the comparison
            if on_gpu or not torch.equal(parameter.view(torch.int16), rounded.view(torch.int16)):  # bits, which is fast
                master.copy_(torch.where(parameter == rounded, master, parameter))
        self._record_rounded()

    @contextmanager
    def installed_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Puts the masters in place of their parameters in the optimizer and its state, for a block."""
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
        self._record_rounded()

    def _record_rounded(self) -> None:
        """Records that every parameter equals its rounded master."""
        self._seen = {} if self._watched else {parameter: _version(parameter) for parameter in self.of}

    # --- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state with the masters in place of its parameters."""
        self.take_in()
        state: dict[str, Tensor] = self._module.state_dict()
        if not self.of:
            return state
        named = dict(self._module.named_parameters(remove_duplicate=False))
        return {**state, **{name: self.of[p].detach() for name, p in named.items() if p in self.of and name in state}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a state that `state_dict` has returned."""
        self._module.load_state_dict(state)
        for name, parameter in self._module.named_parameters():
            if parameter in self.of:
                self.of[parameter].detach().copy_(state[name])
        self._record_rounded()

    def give_back(self) -> None:
        """Makes the parameters float32 again: the masters."""
        self.take_in()
        for parameter, master in self.of.items():
            parameter.data, parameter.grad = master.data, None
        self.of.clear()


def _version(parameter: Tensor) -> tuple[int, int]:
    """Returns numbers that change when a parameter is written to or gets other memory."""
    return parameter._version, parameter.data_ptr()


def narrowed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the float32 parameters that become bfloat16."""
    kept = {id(p) for child in module.modules() if isinstance(child, _NormBase) for p in child.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in kept and parameter.dtype == torch.float32:
            yield parameter
