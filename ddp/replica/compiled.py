"""The compiled replica: one process, and several devices that JAX finds, such as TPUs. A step is one compiled program.

    host       parameters, buffers ──▶ every device        batches ──▶ each device its shard of the step
    devices    forward, backward, all-reduce by a schedule of this package (`collectives/compiled.py`)
    host       means in `p.grad`, device 0's buffers ──▶ the strategy clips and updates, as ever

torchax runs the task's own code on JAX arrays while `jax.jit` looks on. All devices run one program, so shares are
filled up to the longest, and each device takes the branch of a `lax.switch` that cuts them to the lengths of its own.
So a loss and a BatchNorm see the share alone, and no mask. A device without samples takes a branch that gives zeros.

A program is compiled for all lengths of a step's shares, once. It takes the keys of random numbers as an argument,
because a traced generator would draw the same numbers in each step.

Note "nothing is believed". A tracer drops what it does not see, such as statistics that a layer writes; and a number of
the program's own stays what it was. So before the first step torch computes a share on the host, too, and everything
must agree; and again before the steps 2, 4, 8, … If the model draws random numbers, without its dropout; if it still
does, in evaluation mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torchax import interop
from torchax.ops.mappings import t2j_dtype
from torchax.tensor import OperatorNotFound
from torchax.view import View

from ddp.collectives.compiled import AXIS, all_reduce
from ddp.collectives.schedule import Schedule
from ddp.errors import ConfigError, UnusedParameters, first_line
from ddp.gradients.totals import BASE, Totals
from ddp.process.stack import users_frame
from ddp.process.streams import GeneratorStates, preserved
from ddp.process.terminal import log
from ddp.replica.broadcast import BufferSnapshot, BufferSync, check_trainable
from ddp.replica.replica import Replica
from ddp.units import counted

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator

MANY_PROGRAMS = 8
TOLERANCE = 1e-3  # of what a device computes, relative to the host's result; of half precision more
EACH, ALL = PartitionSpec(AXIS), PartitionSpec()
INSTEAD = "take strategy=auto, or change the model"

Arrays = dict[str, Any]  # by name of a parameter or buffer
Loss = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


class Share(NamedTuple):
    """The samples of one device in one part of a step.

    Attributes:
        seed: of its random numbers.
    """

    batch: Any
    seed: int


class Form(NamedTuple):
    """The form of a share. Devices whose shares have one form take the same branch.

    Attributes:
        leaves: of each leaf of the batch, its shape; or the value, if it is no tensor.
    """

    spec: tree.TreeSpec
    leaves: tuple[Any, ...]


EMPTY = Form(tree.tree_structure(()), ())  # of a device without samples


class CompiledDataParallel(Replica):
    """Computes each step of a model on several devices of JAX. Its forward is the module's own, on the host.

    Args:
        module: on the CPU.
        schedule: of the all-reduce; name: that it is known by.
        devices: of JAX.
        comm: of this process, which is alone.
        find_unused_parameters: some parameters may have no gradient, always the same.

    Raises:
        ConfigError: no parameter needs a gradient; or the module has what cannot be compiled, such as a hook.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        schedule: Schedule,
        devices: Sequence[Any],
        comm: Communicator,
        find_unused_parameters: bool = False,
        name: str = "ring",
    ) -> None:
        check_trainable(list(module.named_parameters()))
        check_module(module)
        super().__init__(module, comm, BufferSync(comm, module, "none"))
        self.num_devices, self._finds_unused, self._name = len(devices), find_unused_parameters, name
        self._reduce, self._mesh = all_reduce(schedule, len(devices)), Mesh(np.array(devices), (AXIS,))
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._alone: dict[Any, Callable[..., Any]] = {}  # of a share, on one device
        self._num_computed, self._unused = 0, set[str]()  # steps; and parameters without a gradient
        self._loss_of: Loss | None = None
        self._drops = True  # dropout does what it says
        self._trained: dict[str, nn.Parameter] = {}  # those that need a gradient, in the order of a vector

    # --- a step ------------------------------------------------------------------------------------------------------

    def compute(self, loss: Loss, parts: Sequence[Sequence[tuple[Any, int] | None]], votes: Totals) -> None:
        """Makes a step: `p.grad` becomes the mean over all samples, and buffers those of device 0.

        Args:
            loss: returns the sum of the losses of a batch, and their number. Another one is compiled anew.
            parts: by micro-batch and device, a batch with the seed of its random numbers; None: there are no samples.
            votes: of this process, on how the run goes on.

        Raises:
            ConfigError: a step cannot be compiled, or a device computes another result than torch on the host.
            UnusedParameters: parameters get no gradient.
        """
        if self._loss_of is not loss:  # another fit's
            self._programs, self._alone, self._num_computed, self._loss_of = {}, {}, 0, loss
        shares = [[None if each is None else Share(*each) for each in part] for part in parts if any(part)]
        if not shares:  # no sample could be read
            self._end_step(Totals(num_stopping=votes.num_stopping, num_ending=votes.num_ending))
            return
        self._trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):  # TPUs take bfloat16 by themselves
            self._num_computed += 1
            if self._num_computed.bit_count() == 1:
                self._look(next(share for share in shares[0] if share is not None))
            weights, frozen, buffers = jax.device_put(self._values(), NamedSharding(self._mesh, ALL))
            state: Any = None  # of all devices, after the parts so far
            for number, part in enumerate(shares, 1):
                forms, *given = self._stacked(part)
                program = self._program(forms, is_first=number == 1, is_last=number == len(shares))
                try:
                    state = program(weights, frozen, buffers if number == 1 else None, state, *given)
                except jax.errors.JaxRuntimeError:  # of a compiled program, such as for want of memory
                    raise
                except Exception as error:  # of a share unlike the first one
                    raise _not_compiled(error) from error
            means, totals, buffers = state
            means = np.array(means)
            loss_sum, high, low = np.asarray(totals, np.float64).tolist()
            is_finite = math.isfinite(loss_sum) and np.isfinite(means).all()  # else the step will not be made
            self._hand_out(means, buffers if is_finite else {})
        self._end_step(Totals.read((loss_sum, high, low, votes.num_stopping, votes.num_ending)))

    def _values(self) -> tuple[Any, Arrays, Arrays]:
        """Returns the trained parameters, as one vector that can count samples; those that are frozen; and buffers."""
        frozen = {name: each for name, each in self.module.named_parameters() if name not in self._trained}
        weights = torch.cat([each.detach().reshape(-1) for each in self._trained.values()])
        buffers = {name: array_of(each) for name, each in self.module.named_buffers()}
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return array_of(weights), {name: array_of(each) for name, each in frozen.items()}, buffers

    def _stacked(self, part: Sequence[Share | None]) -> tuple[list[Form], Any, Any, Any]:
        """Returns the forms of the shares; and by device its batch, filled up, the number of its form, and its seed.

        Raises:
            ConfigError: shares have other parts, or parts of other types.
        """
        shares = [share for share in part if share is not None]
        columns = list(zip(*(tensor_leaves(share.batch) for share in shares), strict=False))
        specs = {tree.tree_structure(share.batch) for share in shares}
        if len(specs) > 1 or any(len({(leaf.dtype, leaf.dim()) for leaf in column}) > 1 for column in columns):
            raise ConfigError("the samples of some devices have other parts, or parts of other types, than the rest")
        arrays = []
        for column in columns:
            sizes = zip(*(leaf.shape for leaf in column), strict=True)
            whole, leaves = torch.zeros(len(part), *map(max, sizes), dtype=column[0].dtype), iter(column)
            for place, share in zip(whole, part, strict=True):
                if share is not None:
                    leaf = next(leaves)
                    place[tuple(map(slice, leaf.shape))] = leaf
            arrays.append(array_of(whole))
        by_device = [EMPTY if share is None else form_of(share.batch) for share in part]
        forms = list(dict.fromkeys(by_device))
        which = np.array([forms.index(form) for form in by_device])
        seeds = np.array([0 if share is None else share.seed for share in part], np.uint64)
        return forms, *jax.device_put((arrays, which, seeds), NamedSharding(self._mesh, EACH))

    @torch.no_grad()
    def _hand_out(self, means: np.ndarray[Any, Any], buffers: Arrays) -> None:
        """Writes the means to `p.grad`, and the buffers to the module."""
        for name, gradient in self._cut(torch.from_numpy(means)).items():
            if name not in self._unused:
                self._trained[name].grad = gradient.to(self._trained[name].dtype)
        for name, value in buffers.items():
            self.module.get_buffer(name).copy_(torch.from_numpy(np.array(value)))

    def _cut(self, vector: Any) -> dict[str, Any]:
        """Returns what a vector, of torch or JAX, has for each parameter that is trained, in its shape."""
        found, start = {}, 0
        for name, parameter in self._trained.items():
            found[name] = vector[start : start + parameter.numel()].reshape(tuple(parameter.shape))
            start += parameter.numel()
        return found

    # --- the program -------------------------------------------------------------------------------------------------

    def _program(self, forms: Sequence[Form], *, is_first: bool, is_last: bool) -> Callable[..., Any]:
        """Returns the compiled program for a part of a step."""
        modes = tuple(each.training for each in self.module.modules())
        key = modes, tuple(self._trained), tuple(forms), is_first, is_last
        if key not in self._programs:
            self._programs[key] = jax.jit(
                jax.shard_map(
                    partial(self._on_device, list(forms), is_last),
                    mesh=self._mesh,
                    in_specs=(ALL, ALL, ALL, EACH, EACH, EACH, EACH),
                    out_specs=ALL if is_last else EACH,
                    check_vma=False,  # the schedule makes all devices' sums equal, which JAX cannot know
                )
            )
            if len(self._programs) == MANY_PROGRAMS + 1:
                log.warning(
                    "more than %d programs have been compiled, one for each combination of lengths in a step, and of "
                    "values that are no tensors, such as names: pad samples to a few lengths, and leave names out",
                    MANY_PROGRAMS,
                )
        return self._programs[key]

    def _on_device(
        self, forms: Sequence[Form], is_last: bool, weights: Any, frozen: Arrays, buffers: Arrays | None,
        state: Any, arrays: Sequence[Any], which: Any, seed: Any,
    ) -> Any:  # fmt: skip
        """Computes a part of a step on one device. Of the last part, returns the means, the totals, and the buffers."""
        before = None
        if state is not None:
            before, buffers = jax.tree.map(lambda each: each[0], state)
        branches = [partial(self._of_share, form, frozen) for form in forms]
        given = weights, buffers, [each[0] for each in arrays], seed[0]
        mine, buffers = lax.switch(which[0], branches, *given) if len(branches) > 1 else branches[0](*given)
        mine = mine if before is None else before + mine
        if not is_last:
            return jax.tree.map(lambda each: each[None], (mine, buffers))
        total = self._reduce(mine)
        count = total[-2].astype(jnp.float64) * BASE + total[-1].astype(jnp.float64)
        return total[:-3] / jnp.where(count == 0, 1, count).astype(total.dtype), total[-3:], buffers

    def _of_share(
        self, form: Form, frozen: Arrays, weights: Any, buffers: Any, arrays: Sequence[Any], seed: Any
    ) -> tuple[Any, Arrays]:
        """Returns a share's gradients as one vector, with its loss and its count in two elements; and its buffers."""
        if form is EMPTY:
            return jnp.zeros(len(weights) + 3, weights.dtype), buffers
        gradient_of = jax.value_and_grad(self._loss, has_aux=True)
        trained = {name: each.astype(t2j_dtype(self._trained[name].dtype)) for name, each in self._cut(weights).items()}
        (loss, (count, buffers)), gradients = gradient_of(trained, frozen, buffers, form, arrays, seed)
        high = jnp.floor(count / BASE)
        parts = [*(gradients[name] for name in trained), loss, high, count - high * BASE]  # JAX sorts names
        return jnp.concatenate([jnp.ravel(each).astype(weights.dtype) for each in parts]), buffers

    def _loss(
        self, trained: Arrays, frozen: Arrays, buffers: Arrays, form: Form, arrays: Sequence[Any], seed: Any
    ) -> tuple[Any, tuple[Any, Arrays]]:
        """Returns the sum of a share's losses; its count; and its buffers afterwards."""
        env, rest, before = torchax.default_env(), iter(arrays), GeneratorStates.now()
        with env, env.override_property(prng=jax.random.key(seed)):
            tensors = interop.torch_view({**trained, **frozen, **buffers})
            leaves = [
                interop.torch_view(next(rest)[tuple(map(slice, each))]) if isinstance(each, tuple) else each
                for each in form.leaves
            ]
            with _reparametrize_module(self.module, tensors, tie_weights=True), RunningStatistics():
                loss, count = self._loss_and_count(tree.tree_unflatten(leaves, form.spec))
            loss, count, after = interop.jax_view((loss, count, {name: tensors[name] for name in buffers}))
        if GeneratorStates.now() != before:
            raise ConfigError(
                "model or loss draws random numbers on the host, which would be the same in each compiled step: draw "
                f"them where the samples are, as torch.rand_like(x) or torch.rand(…, device=x.device), or {INSTEAD}"
            )
        return jnp.reshape(loss, ()), (jnp.reshape(jnp.asarray(count, jnp.float64), ()), after)

    # --- a look at a share -------------------------------------------------------------------------------------------

    def _look(self, share: Share) -> None:
        """Computes a share by torch on the host, too, and compares (note "nothing is believed").

        Raises:
            ConfigError: the share cannot be compiled, or results differ; the message names the first one.
            UnusedParameters: parameters get no gradient.
        """
        modes = [(each, each.training) for each in self.module.modules()]
        try:
            with preserved():
                expected, draws = self._on_host(share)
                self._unused = {name for name in self._trained if f"the gradient of {name}" not in expected}
                if draws:  # JAX draws other numbers than torch
                    self._drops = False
                    expected, draws = self._on_host(share)
                if draws:
                    self.module.eval()
                    expected, draws = self._on_host(share)
            found = self._compiled_alone(share)
        finally:
            self._drops = True
            for module, training in modes:
                module.training = training
        if self._unused and not self._finds_unused:
            raise UnusedParameters(
                f"no gradient for {', '.join(sorted(self._unused))}: let each take part in the loss, freeze it by "
                "requires_grad=False, or set replica.find_unused_parameters (ddp.Averaging(find_unused_parameters=…))"
            )
        if draws:
            if self._num_computed == 1:
                log.warning("no step is compared with torch's: the model draws random numbers in evaluation mode, too")
            return
        losses = [value for what, value in expected.items() if not what.startswith("the buffer")]
        if not all(each.isfinite().all() for each in losses):  # the step will not be made
            return
        norms = {what: wide(value).nan_to_num(0, 0, 0).norm() for what, value in expected.items()}
        gradients = [norm for what, norm in norms.items() if what.startswith("the gradient")]
        least = torch.stack(gradients).norm() / 100  # smaller ones may be rounding errors, of a bias before a BatchNorm
        for what, value in expected.items():
            norm = max(norms[what], least * what.startswith("the gradient"), torch.tensor(1e-9))  # it may be 0
            mine, theirs = wide(found[what]), wide(value)
            difference = float((mine - theirs).masked_fill(mine == theirs, 0).norm() / norm)  # masks have infinities
            digits = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
            if not difference <= max(TOLERANCE, 4 * digits):
                raise ConfigError(
                    f"{what} differs by {difference:.0e} from what torch computes on the host in step "
                    f"{self.num_steps + 1}: the compiled step leaves out something that the model does, or a number "
                    f"of yours has changed since it was compiled, where a buffer would do; {INSTEAD}"
                )

    def _on_host(self, share: Share) -> tuple[dict[str, Tensor], bool]:
        """Returns loss, gradients and buffers of a share by name, as torch has them; and if it draws numbers."""
        buffers, before = BufferSnapshot(self.module), GeneratorStates.now()
        self.module.zero_grad(set_to_none=True)
        loss, _ = self._loss_and_count(tree.tree_map_only(Tensor, Tensor.clone, share.batch))  # it may be changed
        loss.backward()
        found = {"the loss": loss.detach()}
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                found[f"the gradient of {name}"] = parameter.grad
        found |= {f"the buffer {name}": each.clone() for name, each in self.module.named_buffers()}
        self.module.zero_grad(set_to_none=True)
        buffers.restore()
        return found, GeneratorStates.now() != before

    def _loss_and_count(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns what the loop's function does, in a look perhaps without dropout."""
        assert self._loss_of is not None
        with nullcontext() if self._drops else WithoutDropout():
            return self._loss_of(self, batch)

    def _compiled_alone(self, share: Share) -> dict[str, Tensor]:
        """Returns the same, as one device computes it."""
        weights, frozen, buffers = self._values()
        form, modes = form_of(share.batch), tuple(each.training for each in self.module.modules())
        key = form, modes, tuple(self._trained), self._drops
        program = self._alone.setdefault(key, jax.jit(partial(self._of_share, form)))
        try:
            arrays = list(map(array_of, tensor_leaves(share.batch)))
            vector, after = program(frozen, weights, buffers, arrays, np.uint64(share.seed))
        except Exception as error:
            raise _not_compiled(error) from error
        vector = torch.from_numpy(np.array(vector))
        found = {f"the gradient of {name}": gradient for name, gradient in self._cut(vector).items()}
        found |= {f"the buffer {name}": torch.from_numpy(np.array(value)) for name, value in after.items()}
        return {"the loss": vector[-3], **found}

    # --- what this replica does not do: its forward is the host's, and averages nothing ------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def prepare(self, *, in_forward: bool = False) -> None:
        pass

    @property
    def _awaits_backward(self) -> bool:
        return False

    def _watch_outputs(self, outputs: Any) -> None:
        pass

    def _finish(self) -> None:
        pass

    def in_words(self) -> list[str]:
        device = self._mesh.devices.flat[0]
        devices = f"{counted(self.num_devices, 'device')} of JAX ({device.device_kind})"
        why = "" if device.platform == "tpu" else ", because it finds no TPU"
        return [f"gradients are computed on {devices}{why}, and added up by a compiled {self._name}"]


IN_PLACE = re.compile(r".*[^_]_|__setitem__|__i(?!nvert).*__")  # names of operations that change a tensor


class RunningStatistics(TorchFunctionMode):
    """Updates the running mean and variance of BatchNorm layers, which torchax leaves as they are.

    It also takes a tensor of the program's own to the devices where it meets one that is there.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not IN_PLACE.fullmatch(function.__name__):
            args, kwargs = _on_devices((args, kwargs))
        found = function(*args, **kwargs)
        if function is F.batch_norm:
            self._update(*args, **kwargs)
        return found

    def _update(
        self,
        inputs: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        *_: Any,
        training: bool = False,
        momentum: float = 0.1,
        **others: Any,
    ) -> None:
        if training and mean is not None and variance is not None:
            dims = [0, *range(2, inputs.dim())]
            mean.copy_((1 - momentum) * mean + momentum * inputs.mean(dims))
            variance.copy_((1 - momentum) * variance + momentum * inputs.var(dims))


DROPOUTS: dict[Any, tuple[str, int]] = {  # a function, with the name and the place of its probability
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout), ("p", 1)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), ("p", 1)),
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}


class WithoutDropout(TorchFunctionMode):
    """Drops nothing, so that layers can be compared while they train."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            name, place = DROPOUTS[function]
            if len(args) > place:
                args = *args[:place], 0.0, *args[place + 1 :]
            else:
                kwargs = {**kwargs, name: 0.0}
        return function(*args, **kwargs)


def _on_devices(values: Any) -> Any:
    """Returns values with their tensors on devices if any of them is there, such as a loss's weights of classes."""
    kinds = torchax.tensor.Tensor, View
    if len({isinstance(each, kinds) for each in tensor_leaves(values)}) < 2:
        return values
    to_xla = torchax.default_env().to_xla
    return tree.tree_map_only(Tensor, lambda each: each if isinstance(each, kinds) else to_xla(each), values)


def form_of(batch: Any) -> Form:
    """Returns the form of a batch.

    Raises:
        ConfigError: a part of it is neither a tensor nor a value that can be compared.
    """
    leaves, spec = tree.tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and type(leaf).__hash__ is None:
            raise ConfigError(
                f"a batch has a {type(leaf).__name__}, which a compiled step cannot take: make it tensors in tuples, "
                "lists or dictionaries (collate)"
            )
    return Form(spec, tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves))


def tensor_leaves(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order of its leaves."""
    return [leaf for leaf in tree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def wide(tensor: Tensor) -> Tensor:
    """Returns a tensor in 64 bits."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def array_of(tensor: Tensor) -> Any:
    """Returns a tensor on the CPU as an array of NumPy, perhaps in the same memory."""
    if tensor.dtype is torch.bfloat16:  # which NumPy does not have by itself
        return tensor.detach().contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.detach().numpy()


def devices_of(num_devices: int | None) -> list[Any]:
    """Returns devices of JAX: TPUs or GPUs where there are any, or else as many of the CPU as are asked for.

    Args:
        num_devices: None: all.

    Raises:
        ConfigError: there are fewer.
    """
    if num_devices is not None:
        with suppress(RuntimeError):  # JAX runs already
            jax.config.update("jax_num_cpu_devices", num_devices)
    devices = list(jax.devices())
    if num_devices is not None and num_devices > len(devices):
        raise ConfigError(
            f"cluster.workers={num_devices}: a worker of strategy=tpu is a device, and JAX finds "
            f"{counted(len(devices), 'device')} ({devices[0].device_kind}): take at most {len(devices)}"
        )
    return devices[:num_devices]


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def check_module(module: nn.Module) -> None:
    """Raises ConfigError if a step of this module would leave something out, such as a hook."""
    for name, each in module.named_modules():
        if vars(each).get("_compiled_call_impl") is not None or "_orig_mod" in each._modules:
            raise ConfigError(
                f"{name or 'the model'} ({type(each).__name__}) is compiled by torch.compile, and JAX compiles whole "
                "steps: give it as it was before"
            )
        if any(vars(each).get(kind) for kind in HOOKS):
            raise ConfigError(
                f"{name or 'the model'} ({type(each).__name__}) has a hook, which a compiled step would not call: "
                f"remove it, or {INSTEAD}"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():  # whose gradient in JAX is the conjugate of torch's
            raise ConfigError(f"{name} is complex, and a compiled step adds up real numbers: {INSTEAD}")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(f"{name} has a hook, which a compiled step would not call: remove it, or {INSTEAD}")


def _not_compiled(error: Exception) -> ConfigError:
    """Returns the error to be raised for one of the compiler's."""
    if isinstance(error, ConfigError):
        return error
    frame = users_frame(error)
    where = "" if frame is None else f" ({frame.filename}, line {frame.lineno}: {frame.line})"
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return ConfigError(
            f"model and loss ask for a value{where}, and a compiled step has none: leave item(), int() and `if` on "
            f"tensors out, or {INSTEAD}"
        )
    if isinstance(error, OperatorNotFound):
        return ConfigError(f"a compiled step has no {first_line(error)}{where}: {INSTEAD}")
    what = f"{type(error).__name__}: {first_line(error)}"  # torch has computed the same on the host before
    return ConfigError(f"the step cannot be compiled ({what}){where}: {INSTEAD}")
