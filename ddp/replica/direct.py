"""Direct gradients: the gradient of a large weight is computed in its bucket, and so is not copied there.

Autograd computes each gradient into memory of its own, and a bucket copies it. Where the gradient is a matrix product,
`torch.mm(…, out=…)` can write it into the bucket. Two workers on two cores that train an MLP with 25M parameters save a
copy of 100 MB in each step.

    forward      while the model runs, a mode of torch's functions is active (`DirectGradients`). It replaces each call
                 of `F.linear` with a large weight by `_Linear`, which computes the same
    backward     `_Linear` asks the replica for the weight's place in its bucket (`BucketedDataParallel.place_of`), and
                 computes the gradient there. If there is no place, it computes it as autograd does
    accumulate   autograd makes the result `p.grad` without copying it, and `Bucket.adopt` finds it in its place

Results have autograd's bits, except gradients of gradients: their terms are added in another order. The mode does not
see inside functions that call no `F.linear` in Python (`nn.MultiheadAttention`, `nn.LSTM`). It is not entered in a
program that has called `torch.compile`, because functions would not be compiled under it.

Note "alias". `_Linear` returns a new tensor over the place. Autograd adopts a gradient without a copy only if nothing
else refers to the tensor object; its memory may be shared. If a weight is used twice in a forward, its second gradient
finds that the first one still uses the place, and is computed elsewhere. Autograd adds the two, out of place.

Note "hooks". A hook on the weight may keep this rank's gradient, which must not become the mean later. So weights with
hooks are left to autograd. Hooks on nodes of the graph cannot be found in time: if one keeps a gradient, autograd
copies it, and the bucket leaves its memory to the program (`Bucket.spare_kept`).

Note "scratch". The first micro-batch's gradient is computed in its place, and those of later ones are added to it.
Autograd would take new memory for each of these, and each page of it costs a fault. One piece of memory serves them
all, one after another. (`addmm_` would also save the addition, but has other bits.)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ddp.gradients.bucket import num_users
from ddp.replica.autograd import uncompiled

if TYPE_CHECKING:
    from ddp.gradients.layout import Layout

_unsafe_view = torch.ops.aten._unsafe_view.default
LARGE_BYTES = 1 << 20  # below this, the copy costs less than the calls that save it

PlaceOf = Callable[[Tensor], Tensor | None]  # returns the place where a parameter's gradient may be computed now


def mode_for(place_of: PlaceOf, module: nn.Module, layout: Layout, *, is_on: bool | None) -> DirectGradients | None:
    """Returns the mode for forwards of a replica's module with this layout; None if it needs none.

    Args:
        place_of: a method of the replica.
        is_on: compute gradients directly; None: on CPUs, because no GPU has shown yet that it gains by it.
    """
    large = [slot for slot in layout.slots if slot not in layout.sparse and _is_large(slot.parameter, is_on)]
    if not large or any(map(_is_fused, module.modules())):
        return None
    return DirectGradients(place_of, {id(slot.parameter): slot.name for slot in large})


def _is_fused(module: nn.Module) -> bool:
    """Returns True for frozen attention, for which torch calls other kernels while no mode is active."""
    return isinstance(module, nn.MultiheadAttention) and not any(p.requires_grad for p in module.parameters())


def _is_large(weight: Tensor, is_on: bool | None) -> bool:
    is_matrix = weight.dim() == 2 and weight.is_contiguous() and weight.is_floating_point()
    is_here = weight.device.type == "cpu" if is_on is None else is_on
    return is_matrix and is_here and weight.nbytes >= LARGE_BYTES


class DirectGradients(TorchFunctionMode):
    """Replaces calls of `F.linear` in the forward of one replica.

    Args:
        names: of large weights, by id.
    """

    def __init__(self, place_of: PlaceOf, names: Mapping[int, str]) -> None:
        super().__init__()
        self._place_of, self.names, self._scratch = weakref.WeakMethod(place_of), names, torch.empty(0)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function, or computes the same by `_Linear`."""
        kwargs = kwargs or {}
        if function is F.linear and self._is_ordinary(*(given := _in_order(*args, **kwargs))):
            return _Linear.apply(*given, self)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    def _is_ordinary(self, bias: Any, x: Any, weight: Any) -> bool:
        """Returns True if autograd would record these arguments of `F.linear`, and nothing else takes part."""
        return (
            id(weight) in self.names
            and type(weight) is nn.Parameter
            and weight.requires_grad
            and weight.is_contiguous()
            and type(x) in _PLAIN
            and x.dtype is weight.dtype
            and x.dim() > 1
            and x.is_contiguous()  # of others autograd saves a copy, or computes the transposed gradient
            and x.stride(-2) > 1  # it takes one column for transposed
            and (bias is None or type(bias) in _PLAIN)
            and (bias is None or (bias.dtype, bias.shape) == (weight.dtype, weight.shape[:1]))
            and torch.is_grad_enabled()
            and all(type(mode) in _NEUTRAL for mode in _get_current_function_mode_stack())
            and not torch.is_autocast_enabled(weight.device.type)
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and torch._C._get_tracing_state() is None
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        )

    def memory_for(self, weight: Tensor) -> Tensor | None:
        """Returns uninitialized memory for a gradient that autograd will add to `p.grad`; None: autograd's own."""
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # note "hooks"
            return None
        if weight.grad is None:
            place_of = self._place_of()
            return None if place_of is None else place_of(weight)
        if self._scratch.nbytes < weight.nbytes or self._scratch.dtype != weight.dtype or num_users(self._scratch) != 2:
            self._scratch = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
        return self._scratch[: weight.numel()].view_as(weight)


_PLAIN = Tensor, nn.Parameter
_NEUTRAL = DirectGradients, DeviceContext  # modes that leave `F.linear` as it is


def is_compiler_used() -> bool:
    """Returns True if the program has called torch.compile."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(compiler, "cached_backends", None)
    return compiler is not None and (backends is None or any(map(callable, backends.values())))


def _in_order(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Returns the arguments of `F.linear` as `_Linear` takes them."""
    return bias, input, weight


class _Linear(torch.autograd.Function):
    """`F.linear` for a bias [out] or None, inputs [..., in] and a weight [out, in].

    The bias stands first, as in autograd's own node: gradients become ready in this order.
    """

    @staticmethod
    def forward(context: Any, bias: Tensor | None, x: Tensor, weight: Tensor, mode: DirectGradients) -> Tensor:
        context.set_materialize_grads(False)
        # only the gradient of the inputs needs the weight, and so that it was not changed since
        context.save_for_backward(x, weight if context.needs_input_grad[1] else None)
        context.values = weight.detach()  # autograd's own node, too, is not reached by `weight.data = …`
        context.weight, context.mode = weight, mode
        result = F.linear(x, weight, bias)
        # a view that a function returns could not be changed in place
        return _unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    @uncompiled
    def backward(context: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        (x, _), weight = context.saved_tensors, context.weight
        values = weight if torch.is_grad_enabled() else context.values
        *runs_bias, runs_x, runs_weight = (_will_run(node) for node, _ in context.next_functions)
        rows = gradient.reshape(-1, weight.shape[0])  # [samples, out]
        try:
            return (
                rows.sum(0) if runs_bias and runs_bias[0] is not False else None,
                rows.mm(values).view_as(x) if runs_x is not False else None,
                _of_weight(context.mode, rows, x.reshape(-1, x.shape[-1]), weight, runs_weight),
                None,
            )
        except RuntimeError as error:
            error.add_note(f"in the backward of {context.mode.names.get(id(weight), 'a weight')}")
            raise


def _of_weight(mode: DirectGradients, rows: Tensor, x: Tensor, weight: Tensor, runs: bool | None) -> Tensor | None:
    """Returns the gradient of the weight, [out, in], in its place if there is one."""
    if runs is False:
        return None
    adds = runs and weight.dtype is rows.dtype and not torch.is_grad_enabled()
    place = mode.memory_for(weight) if adds and not torch._C._are_functorch_transforms_active() else None
    return rows.t().mm(x) if place is None else torch.mm(rows.t(), x, out=place)


def _will_run(node: Any) -> bool | None:
    """Returns True if the running backward will execute a node; None if it returns what would reach the node."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to a leaf
        return None
