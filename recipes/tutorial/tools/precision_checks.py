"""Checks exercise precision: is it narrow where it should be, float32 where it must be, and as good as full precision?

Each rank notes in which types its layers, its loss, its all-reduces and its updates compute, and each gradient that the
optimizer finds. What was trained in bfloat16 and float16 is compared with what was trained in float32, step by step.
Then the gradients of one step overflow. Ranks are threads, and nothing here depends on a clock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp.comm.communicator import Communicator
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake
from recipes.tutorial.tools.threads import on_ranks

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW_TYPES = {*NARROW, *NARROW.values(), "int8", "int8_stochastic"}  # words are formats of the wire
NUM_RANKS, OVERFLOW = 2, 5  # the step whose gradients overflow, on the last rank alone
NEAR = 0.1  # of a gradient's length: what rounding may come to
NEAR_LOSS = 0.05  # of the way that the loss falls

AUTOCAST = '`with torch.autocast("cpu", dtype=…):` around forward and loss; the model and the inputs stay as they are'
SCALER = (
    "one torch.amp.GradScaler for the training; in a step scaler.scale(loss).backward(), scaler.unscale_(optimizer), "
    "clip, scaler.step(optimizer), scaler.update()"
)


# --- what a training notes --------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Notes one step of one rank.

    Attributes:
        weights: of the model, before it.
        inputs: of the model.
        layers, reduced, updated: the types of what layers return, of what is added up over ranks, and of parameters.
        loss, loss_type: of what backward was called; in_autocast: … under autocast.
        gradient: what the optimizer has found, flat; None: it was not called.
    """

    weights: Tensor
    inputs: Tensor | None = None
    layers: set[object] = field(default_factory=set)
    reduced: set[object] = field(default_factory=set)
    updated: set[object] = field(default_factory=set)
    loss: float = math.nan
    loss_type: object = None
    in_autocast: bool = False
    gradient: Tensor | None = None


@dataclass
class Training:
    """Notes a training on one rank.

    Attributes:
        overflows: the step in which a gradient becomes infinite on this rank; None: never.
        depth: of the module whose forward is running; 0: the model's is not.
        weights: of the model, at the end.
        losses: what the reader's function has returned.
    """

    overflows: int | None = None
    steps: list[Step] = field(default_factory=list)
    model: nn.Module | None = None
    depth: int = 0
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    losses: list[float] = field(default_factory=list)

    @property
    def scales(self) -> list[float]:
        """Returns what the loss of each step was multiplied by before backward."""
        return [step.loss / loss if loss else math.nan for step, loss in zip(self.steps, self.losses, strict=True)]

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the mean loss of the first and the last tenth of the steps."""
        tenth = max(1, len(self.losses) // 10)
        return sum(self.losses[:tenth]) / tenth, sum(self.losses[-tenth:]) / tenth


class Noted(Communicator):
    """A communicator that notes what it adds up."""

    training = Training()

    def all_reduce(self, tensor: Any, *args: Any, wire: Any = None, **kwargs: Any) -> Any:
        if self.training.steps:
            tensors = [tensor] if isinstance(tensor, Tensor) else tensor
            self.training.steps[-1].reduced |= {wire or each.dtype for each in tensors if each.is_floating_point()}
        return super().all_reduce(tensor, *args, wire=wire, **kwargs)


def _trained(module: ModuleType, word: str, *, overflows: int | None = None) -> list[Training]:
    """Trains by the reader's function on all ranks.

    Args:
        word: the precision.
        overflows: the step whose gradients become infinite, on the last rank.
    """
    of_thread: dict[int, Training] = {}

    def as_rank(comm: Noted) -> Training:
        mine = of_thread[threading.get_ident()] = Training(overflows if comm.rank == comm.world_size - 1 else None)
        comm.training = mine
        losses = module.train(comm, word)
        comm.barrier()  # a mistake on one rank alone must not look like a deadlock on the others
        if mine.model is None:
            raise Mistake(word, "train has not called the model, which is a torch module")
        with suppress(TypeError, ValueError):  # of what is no number
            mine.losses = [*map(float, losses)]
        if len(mine.losses) != len(mine.steps):
            raise Mistake(word, f"train returns no list of {len(mine.steps)} losses, one for each step")
        mine.weights = _flat(mine.model.parameters())
        return mine

    with _noting(of_thread):
        return on_ranks(NUM_RANKS, as_rank, kind=Noted, step=word, module=module)


@contextmanager
def _noting(of_thread: dict[int, Training]) -> Iterator[None]:
    """Lets torch tell the trainings what happens, in this block."""

    def mine() -> Training | None:
        return of_thread.get(threading.get_ident())

    def before_forward(model: nn.Module, given: tuple[Any, ...]) -> None:
        if (training := mine()) is None:
            return
        if training.depth == 0:  # the first that is called is the model; others may be losses
            training.model = training.model or model
            if model is not training.model or not torch.is_grad_enabled():
                return
            training.steps.append(Step(_flat(model.parameters())))
        training.depth += 1
        if training.steps[-1].inputs is None and given and isinstance(given[0], Tensor):
            training.steps[-1].inputs = given[0].detach().clone()

    def after_forward(model: nn.Module, _: tuple[Any, ...], outputs: Any) -> None:
        if (training := mine()) is None or training.depth == 0:
            return
        training.depth -= 1
        if isinstance(model, nn.Linear):  # which autocast computes in the narrow type
            training.steps[-1].layers.add(outputs.dtype)
            if len(training.steps) == training.overflows:
                outputs.register_hook(lambda gradient: gradient * math.inf)

    run_backward = vars(torch.autograd)["_engine_run_backward"]

    def noted_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor], *given: Any, **how: Any) -> Any:
        if (training := mine()) is not None and training.steps:
            step = training.steps[-1]
            step.loss, step.loss_type = (tensors[0] * gradients[0]).sum().item(), tensors[0].dtype
            step.in_autocast = torch.is_autocast_enabled("cpu")
        return run_backward(tensors, gradients, *given, **how)

    def before_update(optimizer: Optimizer, *_: object) -> None:
        if (training := mine()) is not None and training.steps:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            training.steps[-1].updated |= {parameter.dtype for parameter in parameters}
            training.steps[-1].gradient = _flat(p.grad for p in parameters if p.grad is not None)

    handles = (
        register_module_forward_pre_hook(before_forward),
        register_module_forward_hook(after_forward),
        register_optimizer_step_pre_hook(before_update),
    )
    try:
        with patch.object(torch.autograd, "_engine_run_backward", noted_backward):  # however it is called
            yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(tensors: Any) -> Tensor:
    return torch.cat([torch.empty(0).double(), *(tensor.detach().double().flatten() for tensor in tensors)])


# --- what is right, in the order in which a reader can mend it --------------------------------------------------------


def mixed(module: ModuleType) -> Iterator[str]:
    """Checks exercise precision."""
    full = _trained(module, "fp32")
    yield from _judged_full(full, _trained(module, "fp32"))
    for word in NARROW:
        yield from _judged(word, _trained(module, word), full)
    yield from _judged_overflow(_trained(module, "fp16", overflows=OVERFLOW))


def _judged_full(full: Sequence[Training], again: Sequence[Training]) -> Iterator[str]:
    """Yields what is right with two trainings in full precision; raises Mistake at what is not."""
    for rank, (mine, other) in enumerate(zip(full, again, strict=True)):
        for number, step in enumerate(mine.steps, 1):
            where = f"fp32, rank {rank}, step {number}"
            if types := (step.layers | step.reduced | step.updated | {step.loss_type}) & NARROW_TYPES:
                raise Mistake(where, f"computes in {_names(types)}", "leave what `train` does in full precision")
            if not math.isclose(step.loss, returned := mine.losses[number - 1], rel_tol=1e-4):
                found = f"returned the loss {returned:.4g}, and backward was called of {step.loss:.4g}"
                raise Mistake(where, found, "return the losses that the optimizer goes by")
        _check_same(f"fp32 again, rank {rank}", other, mine, "the first time")
        if not torch.equal(mine.weights, other.weights):
            hint = "draw from a torch.Generator with a seed"
            raise Mistake(f"fp32 again, rank {rank}", "ends with other weights", hint)
    first, last = full[0].ends
    if not last < first:
        raise Mistake("fp32", f"the loss goes from {first:.3f} to {last:.3f}", "leave the net, the data and the rate")
    yield f"fp32: the loss falls from {first:.3f} to {last:.3f}, and a second training has the same bits"


def _judged(word: str, ranks: Sequence[Training], full: Sequence[Training]) -> Iterator[str]:
    """Yields what is right with a training in mixed precision beside that in full; raises Mistake at what is not."""
    for rank, (mine, wide) in enumerate(zip(ranks, full, strict=True)):
        for number, step in enumerate(mine.steps, 1):
            if narrow := step.updated & NARROW_TYPES:
                hint = (
                    "a bfloat16 weight is not moved by less than 1/512 of itself, so small updates are lost: "
                    f"{AUTOCAST}"
                )
                found = f"the optimizer updates {_names(narrow)} parameters, expected float32"
                raise Mistake(f"{word}, rank {rank}, step {number}", found, hint)
        _check_same(f"{word}, rank {rank}", mine, wide, "in full precision")
    yield f"{word}: the same first weights, samples and number of steps as in full precision"
    for rank, mine in enumerate(ranks):
        for number, step in enumerate(mine.steps, 1):
            _check_types(f"{word}, rank {rank}, step {number}", step, NARROW[word])
    yield f"{word}: layers compute in {_names({NARROW[word]})}; loss, sums over ranks and updates are float32"
    off = 0.0
    for rank, (mine, wide) in enumerate(zip(ranks, full, strict=True)):
        if word == "fp16":
            _check_scale(f"{word}, rank {rank}", mine, wide)
        for number, (step, same) in enumerate(zip(mine.steps, wide.steps, strict=True), 1):
            off = max(off, _gradient_is_off(f"{word}, rank {rank}, step {number}", step, same))
    scaled = f", scaled by {ranks[0].scales[0]:,.0f} and back," if word == "fp16" else ""
    yield f"{word}: the gradients{scaled} are those of full precision, up to {off:.1%}"
    (first, wanted), (_, last) = full[0].ends, ranks[0].ends
    if not abs(last - wanted) <= NEAR_LOSS * (first - wanted):
        raise Mistake(word, f"the loss ends at {last:.3f}, in full precision at {wanted:.3f}", AUTOCAST)
    yield f"{word}: the loss ends at {last:.3f}, in full precision at {wanted:.3f}"


def _check_same(where: str, mine: Training, other: Training, when: str) -> None:
    """Raises Mistake unless two trainings begin alike, and see the same samples."""
    if len(mine.steps) != len(other.steps):
        raise Mistake(where, f"{len(mine.steps)} steps, {when} {len(other.steps)}", "as many steps in every precision")
    if not torch.equal(mine.steps[0].weights, other.steps[0].weights):
        hint = "draw the first weights from a torch.Generator with a seed, whatever the precision"
        raise Mistake(where, f"begins with other weights than {when}", hint)
    for number, (step, same) in enumerate(zip(mine.steps, other.steps, strict=True), 1):
        if step.inputs is None or same.inputs is None:
            raise Mistake(f"{where}, step {number}", "no layer is given a tensor")
        if not torch.equal(step.inputs, same.inputs):
            is_rounded = step.inputs.dtype != same.inputs.dtype and step.inputs.shape == same.inputs.shape
            hint = "the comparison is of precisions, so the samples of a step must be the same: give their draw a seed"
            raise Mistake(f"{where}, step {number}", f"other inputs than {when}", AUTOCAST if is_rounded else hint)


def _check_types(where: str, step: Step, narrow: torch.dtype) -> None:
    """Raises Mistake unless a step computes in the right types."""
    if step.layers != {narrow}:
        raise Mistake(where, f"layers compute in {_names(step.layers)}, expected {_names({narrow})}", AUTOCAST)
    if step.loss_type != torch.float32:
        hint = "compute the loss inside of autocast, which has cross_entropy in float32, and do not cast it"
        raise Mistake(where, f"the loss is {_names({step.loss_type})}, expected float32", hint)
    if step.in_autocast:
        hint = "end the block before backward, which computes in the types that forward chose"
        raise Mistake(where, "backward is called under autocast", hint)
    if cast := step.reduced & NARROW_TYPES:
        hint = "the sums over ranks are of float32 gradients: cast none, and give the replica no wire"
        raise Mistake(where, f"gradients are added up over ranks as {_names(cast)}, expected float32", hint)


def _check_scale(where: str, mine: Training, wide: Training) -> None:
    """Raises Mistake unless the loss is scaled before backward, and returned as it is."""
    if not math.isclose(mine.losses[0], wide.losses[0], rel_tol=0.5):
        found = f"returned the loss {mine.losses[0]:.4g}, in full precision {wide.losses[0]:.4g}"
        raise Mistake(where, found, "return the loss as it is before it is scaled")
    if not max(mine.scales) > 1.5:
        raise Mistake(where, "the loss is not scaled, so small gradients become zero in float16", SCALER)


def _gradient_is_off(where: str, step: Step, wide: Step) -> float:
    """Returns how far the gradient of a step is from that in full precision; raises Mistake if that is too far."""
    if step.gradient is None or wide.gradient is None:
        hint = "call it in every step; a scaler leaves steps out while its scale is too large: begin with its own 65536"
        raise Mistake(where, "the optimizer was not called", hint)
    length, wanted = step.gradient.norm().item(), wide.gradient.norm().item()
    off: float = (step.gradient - wide.gradient).norm().item() / wanted
    if off <= NEAR:
        return off
    found = f"the optimizer finds a gradient of length {length:.3g}, in full precision {wanted:.3g}"
    if length < wanted / 8:
        raise Mistake(where, found, f"clipped before it was unscaled: {SCALER}")
    if length > 8 * wanted:
        raise Mistake(where, found, f"never unscaled: {SCALER}")
    raise Mistake(where, f"{found}; they are {off:.0%} apart", "clip in every precision, once, what is unscaled")


def _judged_overflow(ranks: Sequence[Training]) -> Iterator[str]:
    """Yields what is right with a training in which a step overflows; raises Mistake at what is not."""
    where = f"fp16, the gradients of step {OVERFLOW} overflow on rank {NUM_RANKS - 1}"
    for rank, mine in enumerate(ranks):
        if len(mine.steps) <= OVERFLOW:
            found = f"rank {rank} ends after {counted(len(mine.steps), 'step')}"
            raise Mistake(where, found, "leave out that update alone, and go on")
        if not torch.equal(mine.steps[OVERFLOW - 1].weights, mine.steps[OVERFLOW].weights):
            hint = f"an update from infinite gradients ruins the weights; scaler.step leaves it out: {SCALER}"
            raise Mistake(where, f"rank {rank} makes the update", hint)
        before, after = mine.scales[OVERFLOW - 1 : OVERFLOW + 1]
        if not after < 0.9 * before:
            found = f"the scale of rank {rank} is {before:,.0f} before, and {after:,.0f} after"
            raise Mistake(where, found, f"scaler.update() makes it smaller: {SCALER}")
        if not torch.equal(mine.weights, ranks[0].weights):
            raise Mistake(where, f"the weights of rank {rank} end as others than those of rank 0", SCALER)
    yield f"{where}: the step is left out on all ranks, and the scale falls from {before:,.0f} to {after:,.0f}"


def _names(types: set[Any]) -> str:
    return " and ".join(sorted(str(each).removeprefix("torch.") for each in types)) or "nothing"
