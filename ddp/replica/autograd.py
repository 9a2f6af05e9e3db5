"""Finds out from autograd when gradients are ready, when a backward ends, and which parameters it reaches.

An observer of a parameter (`backward.py`, `Observers`) reports that one gradient is ready. It cannot report the end of
backward: a callback that it queues with the autograd engine belongs to the innermost running backward, and under
re-entrant activation checkpointing that is a small backward inside the real one. Observers of the *outputs* of forward
run first and in the outermost backward; a callback queued there runs when the whole of it has ended.

An observer of an output also runs when a program computes other gradients than the parameters' (`torch.autograd.grad`,
a gradient penalty); `adds_to_all` and `accumulates` tell the two apart. `will_accumulate` finds out in advance which
parameters the running backward will reach.

Note "compile". Observers and collectives act on this process, not on tensors alone, so no graph can hold them. A
function that is marked `uncompiled` is called as it is, and so is all that it calls; the graph of the code around it
ends there. The marks are those that `torch.compiler.disable` sets. Calling that function would import the compiler,
which takes seconds, even if nothing is compiled.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import get_gradient_edge

from ddp.gradients.bucket import Slot

Function = TypeVar("Function", bound=Callable[..., Any])
NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(function: Function) -> Function:
    """Marks a function, as a decorator (note "compile")."""
    eval_frame.set_code_exec_strategy(function.__code__, NEVER)  # where it is called from Python or from autograd
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where its caller is compiled
    return function


@contextmanager
def without_compile_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Takes what torch.compile returned out of a model, which stays compiled, for the duration of the block.

    Its wrapper would put "_orig_mod" into the names of parameters, and so into a run's files. A wrapper with its own
    hooks stays.
    """
    compiled: dict[nn.Module, Any] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Module]] = []

    def unwrapped(wrapper: Any) -> Any:
        original = wrapper._modules.get("_orig_mod")
        if original is None or wrapper._forward_hooks or wrapper._forward_pre_hooks:
            return wrapper
        compiled.setdefault(original, original._compiled_call_impl)
        from torch._dynamo.external_utils import wrap_inline  # as torch.compile has done

        original._compiled_call_impl = wrapper.dynamo_ctx(wrap_inline(original._call_impl))
        return original

    try:
        for table in [each._modules for each in model.modules() if isinstance(each, nn.Module)]:
            for name, child in table.items():
                if child is not None and "_orig_mod" not in table and (inner := unwrapped(child)) is not child:
                    replaced.append((table, name, child))
                    table[name] = inner
        yield unwrapped(model)
    finally:
        for table, name, child in replaced:
            table[name] = child
        for original, before in compiled.items():
            original._compiled_call_impl = before


Begin = Callable[[bool], bool]  # given what `adds_to_all` returns; returns True if a step has begun


def watch_backward(outputs: Any, begin: Begin, end: Callable[[], None]) -> bool:
    """Calls `begin` when a backward reaches any of the outputs; `end` after that backward, if `begin` returned True.

    Args:
        outputs: of a forward (see `tensors_in`).
        begin: called once per output tensor that backward reaches.
        end: called once per `begin` that returned True.

    Returns:
        True if there is any output that a backward could begin at.
    """

    lock = threading.Lock()  # autograd reaches outputs on several devices in several threads

    @uncompiled
    def observe(_gradient: Tensor) -> None:
        refuse_compiled_autograd()
        with lock:
            has_begun = begin(adds_to_all())
        if has_begun:
            torch.autograd.Variable._execution_engine.queue_callback(end)

    in_graph = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    for tensor in in_graph:  # an observer of a leaf would stay forever
        tensor.register_hook(observe)
    return bool(in_graph)


def refuse_compiled_autograd() -> None:
    """Raises RuntimeError under compiled autograd, which calls no function at the end of a backward."""
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
        raise RuntimeError(
            "compiled autograd runs this backward, and a replica cannot average its gradients: set "
            "torch._dynamo.config.compiled_autograd = False, and call backward() outside of compiled_autograd._enable"
        )


def is_in_backward() -> bool:
    """Returns True if the calling thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


def adds_to_all() -> bool:
    """Returns True if the running backward adds to all gradients: it is no `autograd.grad`, and has no `inputs=`."""
    return bool(torch.autograd._is_checkpoint_valid())


def accumulates(parameters: Sequence[Tensor]) -> bool:
    """Returns True if the running backward adds to gradients of these: `autograd.grad` does not."""
    try:
        return bool(will_accumulate(parameters))
    except RuntimeError:  # autograd.grad with respect to parameters: it captures, and accumulates nothing
        return False


def will_accumulate(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns those parameters that the running backward will reach.

    Parameters inside re-entrant checkpoints are not seen: their part of the graph does not exist yet.
    """
    will_run = torch._C._will_engine_execute_node
    return [each for each in parameters if each.requires_grad and will_run(get_gradient_edge(each).node)]


def leaves_of(tensor: Tensor) -> Iterator[nn.Parameter]:
    """Yields the parameters that autograd has computed a tensor from."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set[Any]()
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf


def tensors_in(value: Any, *, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields every tensor inside: in mappings, sequences, dataclasses, and the attributes of other objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from tensors_in(part, seen=seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    state = object.__getstate__(value)  # its attributes; with slots, a tuple of them and of what is in the slots
    tables = state if isinstance(state, tuple) else (state,)
    return [part for table in tables if table is not None for part in table.values()]


# --- Gradients of gradients ------------------------------------------------------------------------------------------
#
# With create_graph, `p.grad` is part of a graph, and must stay out of its bucket: an all-reduce in place would change
# values that the graph has saved. Its value becomes the mean over ranks; its derivative stays this rank's own,
#
#     mean gradient  ḡ = ¹⁄w Σ gᵣ(θ)          a loss f(ḡ), the same on every rank
#     ∂f/∂θ = ¹⁄w Σ f′(ḡ) ∂gᵣ/∂θ              rank r computes f′(ḡ) ∂gᵣ/∂θ; the next backward's reduction averages them
#
# so a second backward, through the gradients, is watched like one through the outputs, and its result is right.


class _WithValue(torch.autograd.Function):
    """Puts another value in the same place of the graph."""

    @staticmethod
    def forward(_context: Any, _gradient: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def hand_out_differentiable(slots: Iterable[Slot], begin: Begin, end: Callable[[], None]) -> None:
    """Gives every gradient the mean's value, out of place, and watches backwards that go through them."""
    for slot in slots:
        gradient = slot.parameter.grad
        if gradient is not None and slot.view is not None and gradient is not slot.view:
            with torch.enable_grad():
                slot.parameter.grad = _WithValue.apply(gradient, slot.view)  # type: ignore[no-untyped-call]
            watch_backward(slot.parameter.grad, begin, end)
