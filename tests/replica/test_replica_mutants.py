"""One-line mutants of the replicas die: each makes the case that is named beside it fail on some rank."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any, NamedTuple

import pytest
from ranks import RankFailed, run_ranks

import ddp

pytestmark = pytest.mark.slow  # because what is proven here is that other tests can fail


class Mutant(NamedTuple):
    """A line of a method, what becomes of it, and who must notice; `overlap`: when reductions are in the background."""

    method: str
    line: str
    becomes: str
    cases: str
    case: str
    overlap: bool = False


LIKE_TORCH, JOIN_AND_HOOKS, DIRECTLY = "test_like_torch", "test_join_and_hooks", "test_direct"
BACKWARD, FINALIZER = "replica.backward", "replica.step_finalizer.StepFinalizer"
DIRECT = "replica.direct"
UNITS, FLAT, IN_SLICES = "replica.units.Units", "replica.flat.Flat", "replica.in_slices.InSlices"
FULLY = "strategies.fully_sharded.FullySharded"
IN_UNITS = "test_units"
DROP_IN = "replica.drop_in.data_parallel.DistributedDataParallel"
MUTANTS = {
    "gradients are not synchronised": Mutant(
        "gradients.reducer.AllReduce._verb_for",
        "return self._comm.all_reduce if",
        "return (lambda memory, **_: memory) if",
        LIKE_TORCH,
        "outputs_of_many_kinds",
    ),
    "gradients are not synchronised in the background": Mutant(
        "gradients.reducer.AllReduce._verb_for",
        "return self._comm.all_reduce if",
        "return (lambda memory, **_: memory) if",
        LIKE_TORCH,
        "saved_loaded_and_copied",
        overlap=True,
    ),
    "sum instead of mean": Mutant(
        f"{BACKWARD}.Backward.begin",
        "self.layout, self.step, self._share = layout, step, share",
        "self.layout, self.step, self._share = layout, step, share._replace(divide_by=1)",
        LIKE_TORCH,
        "outputs_of_many_kinds",
    ),
    "unused parameters are ignored": Mutant(
        f"{BACKWARD}.Backward._missing",
        "return sorted(missing, key=lambda slot: slot.index)",
        "return []",
        LIKE_TORCH,
        "undefined_gradients",
    ),
    "a gradient that nobody has is made up": Mutant(
        f"{FINALIZER}._give_back",
        "slot.parameter.grad = had if had is None or slot.view is None else slot.view.copy_(had)",
        "slot.parameter.grad = slot.view",
        LIKE_TORCH,
        "control_flow_that_differs_by_rank",
    ),
    "a bucket goes before it is full": Mutant(
        f"{BACKWARD}.BucketReduction.check",
        "self.is_full = self.expected <= set(map(id, self.ready[self.num_before_begin :]))",
        "self.is_full = True",
        LIKE_TORCH,
        "a_layer_used_twice_beside_others_in_its_bucket",
    ),
    "what was ready in no_sync counts as ready": Mutant(
        f"{BACKWARD}.BucketReduction.__init__",
        "self.num_before_begin, self.is_full = len(self.ready), not self.expected",
        "self.num_before_begin, self.is_full = 0, not self.expected",
        LIKE_TORCH,
        "no_sync_nested_and_without_gradients",
    ),
    "no_sync is ignored": Mutant(
        "replica.replica.Replica.no_sync",
        "before, self.require_backward_grad_sync = self.require_backward_grad_sync, False",
        "before = True",
        LIKE_TORCH,
        "no_sync_nested_and_without_gradients",
    ),
    "no initial broadcast": Mutant(
        f"{DROP_IN}.__init__", "if init_sync:", "if False:", LIKE_TORCH, "without_initial_synchronisation"
    ),
    "a wrong order is kept": Mutant(
        f"{BACKWARD}.Backward._learn",
        "self.layout.plan(order, for_hook=self.layout.is_for_hook)",
        "self.layout.plan([], for_hook=self.layout.is_for_hook)",
        LIKE_TORCH,
        "the_order_is_learned",
    ),
    "buffers are not synchronised": Mutant(
        "replica.replica.Replica._before_forward",
        "syncs_buffers = may_sync and self._buffer_sync.is_active",
        "syncs_buffers = False",
        JOIN_AND_HOOKS,
        "buffers_of_every_mode",
    ),
    "a forward in evaluation mode synchronises no buffers": Mutant(
        "replica.replica.Replica._before_forward",
        "may_sync = self.require_forward_param_sync and",
        "may_sync = self.training and",
        JOIN_AND_HOOKS,
        "buffers_around_every_kind_of_forward",
    ),
    "a backward goes by the layout of the last forward": Mutant(
        "replica.bucketed.BucketedDataParallel._begin",
        "self._begin_step(layout)",
        "self._begin_step(self._layouts.current)",
        LIKE_TORCH,
        "all_forwards_then_all_backwards",
    ),
    "a forward that is repeated before its backward has begun counts": Mutant(
        "replica.replica.Replica._is_no_step",
        "self._awaits_backward",
        '(hasattr(self, "_is_in_backward") or self.backward.began_s > 0)',
        LIKE_TORCH,
        "checkpoints_around_the_replica",
    ),
    "a rank that ran out keeps the others' mean": Mutant(
        "replica.drop_in.join.Joining.give_back_own_gradients",
        "parameter.grad = gradient",
        "pass",
        JOIN_AND_HOOKS,
        "gradients_of_ranks_that_ran_out",
    ),
    "hooks are ignored": Mutant(
        f"{DROP_IN}.register_comm_hook",
        "self.backward.reducer = self._reducer",
        "pass",
        JOIN_AND_HOOKS,
        "what_a_hook_sees",
    ),
    "hooks do not wait for each other": Mutant(
        "replica.drop_in.in_backward.CommHook.reduce",
        "self._last.wait()",
        "pass",
        JOIN_AND_HOOKS,
        "hooks_follow_one_another",
    ),
    "join is ignored": Mutant(
        "replica.drop_in.join.Joining.around",
        "while self.shadow_step(replica):",
        "while False:",
        JOIN_AND_HOOKS,
        "uneven_inputs",
    ),
    "who shadows a step contributes its last gradient": Mutant(
        "replica.drop_in.join.Joining.shadow_step",
        "replica.zero_grad(set_to_none=True)",
        "pass",
        JOIN_AND_HOOKS,
        "uneven_inputs",
    ),
    "a gradient in its place is not returned": Mutant(
        f"{DIRECT}._of_weight",
        "else torch.mm(rows.t(), x, out=place)",
        "else (torch.mm(rows.t(), x, out=place), None)[1]",
        DIRECTLY,
        "without_biases",
    ),
    "a gradient in its place is the place itself": Mutant(
        "gradients.bucket.Bucket.place_for",
        "return self._aliases[number].detach()",
        "return slot.view",
        DIRECTLY,
        "without_biases",
    ),
    "a place is given though it is used": Mutant(
        "gradients.bucket.Bucket.place_for",
        "or is_used",
        "",
        DIRECTLY,
        "a_weight_of_two_layers",
    ),
    "a place is given though its bucket has been sent": Mutant(
        "replica.bucketed.BucketedDataParallel.place_of",
        "or self.backward.is_launched(index)",
        "",
        DIRECTLY,
        "a_gradient_that_comes_too_late",
    ),
    "a place is that of the last forward": Mutant(
        f"{DIRECT}.DirectGradients.memory_for",
        "return None if place_of is None else place_of(weight)",
        "return self.__dict__.setdefault(id(weight), place_of(weight))",
        DIRECTLY,
        "a_backward_of_an_earlier_layout",
    ),
    "a gradient is computed in place though a hook may keep it": Mutant(
        f"{DIRECT}.DirectGradients.memory_for",
        "if weight._backward_hooks or weight._post_accumulate_grad_hooks:",
        "if False:",
        DIRECTLY,
        "a_hook_that_keeps_this_ranks_gradient",
    ),
    "a gradient in its place that a node's hook keeps is overwritten": Mutant(
        f"{BACKWARD}.Backward._fill",
        "self.layout.settle([bucket])",
        "pass",
        DIRECTLY,
        "a_hook_on_a_node_that_keeps_this_ranks_gradient",
    ),
    "a hook keeps the scratch": Mutant(
        f"{DIRECT}.DirectGradients.memory_for",
        "or num_users(self._scratch) != 2",
        "",
        DIRECTLY,
        "micro_batches_whose_gradients_are_kept",
    ),
    "a gradient is computed though nobody asks for it": Mutant(
        f"{DIRECT}._of_weight",
        "if runs is False:",
        "if False:",
        DIRECTLY,
        "other_gradients_between_backward_and_step",
    ),
    "a gradient that is only captured is computed in place": Mutant(
        f"{DIRECT}._of_weight",
        "adds = runs and",
        "adds =",
        DIRECTLY,
        "other_gradients_between_backward_and_step",
    ),
    "units are not released for the next one": Mutant(
        f"{UNITS}._use", "self._release(other)", "pass", IN_UNITS, "memory"
    ),
    "what autograd saves of a unit stays in memory": Mutant(
        "replica.units.SavedPlaces._pack", "if found is None or", "if True or", IN_UNITS, "memory"
    ),
    "the place of what is saved is forgotten": Mutant(
        "replica.units.SavedPlaces._unpack", "saved.stride, saved.offset", "saved.stride, 0", IN_UNITS, "programs"
    ),
    "a unit is not gathered in backward": Mutant(
        "replica.units.SavedPlaces._unpack", "self._units.use(saved.unit)", "pass", IN_UNITS, "programs"
    ),
    "a unit is released in the middle of its forward": Mutant(
        f"{UNITS}._use", "and not each.num_running", "", IN_UNITS, "programs"
    ),
    "hooks of the program see nothing": Mutant(
        "replica.units.SavedPlaces._pack", "if outer is None else outer(tensor)", "", IN_UNITS, "programs"
    ),
    "an update is not gathered": Mutant(f"{FULLY}._step", "self.units.release()", "pass", IN_UNITS, "programs"),
    "a gradient that is NaN counts as the program's": Mutant(
        f"{FULLY}._take_gradient", "and not is_absent(gradient)", "", IN_UNITS, "programs"
    ),
    "the order of channels is forgotten": Mutant(
        f"{UNITS}.groups", "slot.strides = self.strides_of[id(slot.parameter)]", "pass", IN_UNITS, "programs"
    ),
    "a parameter that was frozen keeps its former slice": Mutant(
        f"{UNITS}.flat_of", "if each.bucket.ids == bucket.ids", "if each.bucket.ids >= bucket.ids", IN_UNITS, "programs"
    ),
    "a micro-batch takes the place of the one before": Mutant(
        f"{IN_SLICES}._take", "flat.gradient.add_(mine)", "flat.gradient.copy_(mine)", IN_UNITS, "micro_batches"
    ),
    "the last micro-batch alone is divided": Mutant(
        f"{IN_SLICES}.divisor", "return 1", "return divide_by", IN_UNITS, "micro_batches"
    ),
    "the sum of micro-batches is not divided": Mutant(
        f"{IN_SLICES}.complete", "divided_(bucket.gradients, int(divide_by))", "pass", IN_UNITS, "micro_batches"
    ),
    "what the program has dropped is in the sum": Mutant(
        f"{IN_SLICES}._drop", "del self._summed[bucket]", "pass", IN_UNITS, "micro_batches"
    ),
    "a released parameter stays readable": Mutant(
        f"{FLAT}.release", "slot.parameter.data = absent(slot.parameter, number)", "pass", IN_UNITS, "released"
    ),
    "a copy of released units is made": Mutant(
        "replica.units._Hook._refuse", "if self._units.is_guarded and", "if False and", IN_UNITS, "released"
    ),
    "what is written to released parameters is lost": Mutant(
        f"{FLAT}._taken", "self._refuse_written()", "pass", IN_UNITS, "written"
    ),
    "what a forward writes to parameters is lost": Mutant(
        f"{FLAT}.release", "self._refuse_written()", "pass", IN_UNITS, "written"
    ),
    "a step without zero_grad adds to nothing": Mutant(
        f"{IN_SLICES}.begin", "and is_absent(gradient)", "and False", IN_UNITS, "without_zero_grad"
    ),
}


def mutated(mutant: Mutant) -> tuple[Any, str, Any]:
    """The method's class, or the function's module; its name, and the mutant."""
    path = f"ddp.{mutant.method}"
    module_name, class_name, name = path.rsplit(".", 2)
    module = importlib.import_module(module_name)
    owner = getattr(module, class_name, None) or importlib.import_module(f"{module_name}.{class_name}")
    module = owner if inspect.ismodule(owner) else module
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    assert source.count(mutant.line) >= 1, f"{path} has no line {mutant.line!r} any more"
    scope: dict[str, Any] = {"__class__": owner}
    exec(compile(source.replace(mutant.line, mutant.becomes), path, "exec"), vars(module), scope)
    return owner, name, scope[name]


def run_case(mutant: Mutant | None, cases: str, case: str) -> None:
    if mutant is not None:
        setattr(*mutated(mutant))
    comm = ddp.init(abort_s=3)
    type(comm.plan).overlaps = property(lambda self: mutant is not None and mutant.overlap)
    getattr(importlib.import_module(cases), case)(comm)
    comm.barrier()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name: str) -> None:
    mutant = MUTANTS[name]
    mutated(mutant)  # it can be made; what dies in the ranks dies of what it does
    with pytest.raises(RankFailed):
        run_ranks(run_case, 3, mutant, mutant.cases, mutant.case, timeout_s=20)


@pytest.mark.parametrize("case", sorted({mutant.case for mutant in MUTANTS.values() if mutant.cases == IN_UNITS}))
def test_units_themselves_live(case: str) -> None:
    run_ranks(run_case, 3, None, IN_UNITS, case, timeout_s=40)
