"""Finds out from autograd when gradients are ready, when a backward ends, and which parameters it reaches.

An observer of a parameter (`Observers`) reports that one gradient is ready. It cannot report the end of backward: a
callback that it queues with the autograd engine belongs to the innermost running backward, and under re-entrant
activation checkpointing that is a small backward inside the real one. Observers of the *outputs* of forward run first
and in the outermost backward; a callback queued there runs when the whole of it has ended.

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
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.gradients.bucket import Slot
from ddp.process import gpu

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


# --- Observers of parameters -----------------------------------------------------------------------------------------
#
# A gradient is ready once all hooks on its parameter have run, because a hook may change it: clip it, say. Those hooks
# run in the order of their registration, and a program may register one at any time. So an observer is a hook on the
# node of the graph that adds to `p.grad`, as in torch's Reducer: it runs after the hooks on the parameter.
#
# A conversion (`model.double()`, or `model.cpu()` and back) gives a parameter another node, which has no observer. The
# next forward detects most conversions. One without a trace (there and back) makes gradients seem to be missing at the
# end of a backward: then the nodes are compared, which is slow.


class ObservedBackward(Protocol):
    """A backward, as observers of parameters see it (`backward.py`).

    Attributes:
        streams: those of a GPU on which gradients have become ready.
    """

    streams: set[torch.cuda.Stream]

    @property
    def is_running(self) -> bool:
        """Returns True from `begin` until the end of `finish`; forever, if the backward broke off."""

    def note(self, parameter: Tensor) -> bool:
        """Records that a gradient is ready. Returns False if no bucket waits for it."""

    def note_other(self, parameter: Tensor) -> bool:
        """Records a gradient that no bucket waits for. Returns False if it has no place in this backward."""


class Listener(Protocol):
    """A replica, as observers of parameters see it."""

    @property
    def backward(self) -> ObservedBackward:
        """The backward that is expected, or is running."""

    @property
    def waiting(self) -> object:
        """A forward that waits for its backward; None: there is none, or it is unknown."""

    def on_other_gradient(self, parameter: Tensor) -> None:
        """Handles a gradient that no bucket is waiting for, and that may begin a backward."""


Observer = Callable[[Callable[[], Any], nn.Parameter], Callable[[Any, Any], None]]
"""Makes the function that autograd calls, of what returns the replica, while it exists, and of a parameter."""


class Observers:
    """Lets autograd call a replica whenever the gradient of one of these parameters is ready.

    Parameters hold their observers, and may live longer than the replica: the model may be used by itself, or in
    another replica. So observers hold the replica weakly, and are removed with it. Those of a replica whose backward
    broke off are removed once another replica observes the same parameters, because a program may still hold the first.

    Args:
        observer: makes the function that autograd calls for a parameter (`backward.py`).
    """

    _all: ClassVar[weakref.WeakSet[Observers]] = weakref.WeakSet()

    def __init__(self, replica: Listener, parameters: Iterable[nn.Parameter], observer: Observer) -> None:
        self._of_replica, self._lock, self._observer = weakref.ref(replica), threading.RLock(), observer
        self._parameters = [p for p in parameters if (p.is_floating_point() or p.is_complex()) and not p.is_inference()]
        self._nodes: dict[nn.Parameter, Any] = {}  # holds them, because a parameter does not
        self._handles: list[RemovableHandle] = []
        for others in list(self._all):
            if others.are_useless and not others._nodes.keys().isdisjoint(self._parameters):
                others.remove()
        self._all.add(self)
        self.renew()
        weakref.finalize(replica, self.remove).atexit = False  # at exit parameters go, too

    @property
    def are_useless(self) -> bool:
        """Returns True if the replica no longer exists, or makes no further step."""
        return (replica := self._of_replica()) is None or replica.backward.is_running

    def renew(self) -> Sequence[nn.Parameter]:
        """Registers an observer on each node that has none. Returns the parameters of these nodes."""
        has_gpu = any(parameter.device.type == gpu.KIND for parameter in self._parameters)
        observer_of = self._locking_observer_of if has_gpu else partial(self._observer, self._of_replica)
        renewed = list[nn.Parameter]()
        for parameter in self._parameters:
            with _needing_gradient(parameter):
                node = get_gradient_edge(parameter).node
            if self._nodes.get(parameter) is not node:
                self._nodes[parameter] = node
                self._handles.append(node.register_hook(observer_of(parameter)))
                renewed.append(parameter)
        return renewed

    def _locking_observer_of(self, parameter: nn.Parameter) -> Callable[[Any, Any], None]:
        observe = self._observer(self._of_replica, parameter)

        @uncompiled
        def observe_alone(inputs: Any, outputs: Any) -> None:
            with self._lock:  # autograd has a thread for each GPU, and one for the CPU
                if parameter.device.type == gpu.KIND and (replica := self._of_replica()) is not None:
                    replica.backward.streams.add(gpu.cuda.current_stream(parameter.device))
                observe(inputs, outputs)

        return observe_alone

    def remove(self) -> None:
        """Removes all observers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


@contextmanager
def _needing_gradient(parameter: nn.Parameter) -> Iterator[None]:
    """Unfreezes a parameter for a block, so that it can be observed: it may be unfrozen later."""
    needs_gradient = parameter.requires_grad
    with torch.inference_mode(False):
        parameter.requires_grad_(True)
        try:
            yield
        finally:
            parameter.requires_grad_(needs_gradient)
