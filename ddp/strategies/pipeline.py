"""Runs a model whose stages are on different ranks, by a schedule of micro-batches (`ddp/collectives/pipelines.py`).

    pipe = ddp.Pipeline([make_first, make_second], schedule="1f1b")       # a rank calls its own function only
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = pipe.step(inputs, targets, F.cross_entropy, micro_size=8)      # inputs on stage 0, targets on the last one
    optimizer.step()

    stage 0   inputs ─▶ forward ── activation ──▶┐              ┌── gradient ──▶ backward ─▶ p.grad
    stage 1                                      └─▶ forward ─▶ loss ─▶ backward

A rank goes through the rounds of its stage. It posts the sends of a round when the round begins; they are in flight
while it computes. Before it waits for a neighbour's message, it posts the receive of the one after it, which then
travels while the stage computes, too. So a round waits for its receives only, and there is one spare buffer for each
neighbour. This completes whatever the checker has proven, whose sends wait (note "a send waits" there).

    an activation   is held with its graph until its backward, and freed before the stage waits for the next message
    a gradient      is freed when the next one has been sent, or the step ends

Note "forms". A receiver must know a tensor's shape and dtype. The shape of the batch, `micro_size`, a digest of the
schedule, and the numbers of pipeline and step travel down all stages at the beginning of a step, while the first stage
computes. The form of an activation travels ahead of the first micro-batch whose inputs have its shape, once in a run:
of the first one, of a shorter last one, and again if the inputs change. A gradient has its activation's form.

Note "the mean". `loss` returns the mean over a micro-batch, as torch's losses do. Each mean is weighted by its share of
the batch's samples, so gradients are those of the mean over the batch, also if the last micro-batch is shorter.

Note "one rank". With a world size of 1 all stages run on this rank, each by the same rounds, and the result has the
same bits: each stage adds up its gradients in the order of its backwards, and each forward draws its random numbers
from the stream of (seed, step, micro-batch, stage). A later stage that is seeded like one process would draw other
ones. The weights of a stage are drawn from the stream of (seed, stage).

Note "replicas". With d times as many ranks as stages there are d chains: ranks s·d … s·d + d − 1 are replicas of stage
s, and chain c consists of the c-th of each. Each chain has its own share of the batch, and at the end of a step the
replicas of a stage average their gradients: the mean over the chains. Give each of them as many samples.

Tied weights, such as an embedding that is also the last layer, are two parameters of two stages. Make them equal at the
beginning, and add up their gradients after each step: `comm.subgroup([first, last]).all_reduce(weight.grad)`. One
process adds the parts in another order, so its gradient differs in the last bits.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ddp.collectives.pipelines import ALIASES, PIPELINES, Algorithm, Compute, Op, bubble, check, digest, rounds_of
from ddp.collectives.schedule import Recv, ScheduleError, Send
from ddp.comm.communicator import Communicator, Message
from ddp.comm.objects import all_gather_object
from ddp.comm.session import current
from ddp.comm.watch.call import recorded
from ddp.errors import CheckpointError, ConfigError, PeerLost, did_you_mean
from ddp.optim.norms import gradient_norm, total_norm
from ddp.process.streams import preserved, seed_generators, stream_seed
from ddp.replica.bucketed import BucketedDataParallel

_NUM_MADE: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
Make = Callable[[], nn.Module]
Named = str | Algorithm
Loss = Callable[[Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """A step, as all stages of a chain know it.

    Attributes:
        shape: of the inputs, [num_samples, …].
        first_micro: number of the chain's first micro-batch among those of all chains.
        inputs, targets: by micro-batch, on the first and on the last stage; else empty.
    """

    number: int
    shape: tuple[int, ...]
    micro_size: int
    first_micro: int
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    loss: Loss

    def shape_of(self, micro: int) -> tuple[int, ...]:
        """Returns the shape of a micro-batch's inputs."""
        return min(self.micro_size, self.shape[0] - micro * self.micro_size), *self.shape[1:]


# --- what travels between two ranks ----------------------------------------------------------------------------------

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
NUM_SENT, OF_BATCH = 32, "shape of the batch, before the activation"  # numbers in a message about a shape; its label
Form = tuple[int, list[int]]
"""The dtype of a tensor, as its number in DTYPES, and its shape."""


class Edge:
    """The messages between this stage and a neighbouring one on another rank.

    Args:
        rank: the neighbour's.
        stages: this one, and the neighbour.
    """

    def __init__(self, comm: Communicator, rank: int, stages: tuple[int, int]) -> None:
        self._comm, self._rank, self._stages = comm, rank, stages
        self._gives, self._takes = ("activation", "gradient")[:: 1 if stages[1] > stages[0] else -1]
        # Of an activation, by the shape of its micro-batch's inputs. Both ends learn a form at the same message.
        self._forms: dict[tuple[int, ...], Form] = {}
        self._sent: dict[int, list[Message]] = {}  # by micro-batch
        self._coming: deque[tuple[Message, list[int]]] = deque()

    def send_form(self, number: int, shape: Sequence[int], micro: int, what: str = "shape") -> None:
        """Begins to send a number and a shape."""
        if len(shape) >= NUM_SENT:
            raise ConfigError(f"a tensor has {len(shape)} dimensions, more than a pipeline takes: flatten some")
        numbers = [number, *shape, *[-1] * (NUM_SENT - 1 - len(shape))]
        self._post(torch.tensor(numbers, device=self._comm.device), micro, what)

    def recv_form(self, micro: int, what: str = "shape") -> Form:
        """Returns the number and the shape that the neighbour sends."""
        message = torch.empty(NUM_SENT, dtype=torch.int64, device=self._comm.device)
        numbers = self._comm.recv(message, self._rank, label=self._label(what, micro, -1)).tolist()
        return numbers[0], [each for each in numbers[1:] if each >= 0]

    def begin(self, step: Step, incoming: Sequence[int]) -> None:
        """Begins a step in which these micro-batches come from the neighbour, in this order."""
        self._step, self._incoming = step, deque(incoming)
        self._post_receives(1)

    def give(self, tensor: Tensor, micro: int) -> None:
        """Begins to send an activation down, or a gradient up."""
        form, key = (DTYPES.index(tensor.dtype), list(tensor.shape)), self._step.shape_of(micro)
        if key not in self._forms:
            self._forms[key] = form
            self.send_form(*form, micro)
        elif self._forms[key] != form:
            found, (dtype, shape) = f"{_kind(tensor)} for inputs {list(key)} in micro-batch {micro}", self._forms[key]
            raise ConfigError(f"stage {self._stages[0]} returns {found}, and before it was {shape} of {DTYPES[dtype]}")
        self._post(tensor.view(-1), micro, self._gives)

    def _post(self, tensor: Tensor, micro: int, what: str) -> None:
        message = self._comm.send(tensor, self._rank, async_op=True, label=self._label(what, micro))
        self._sent.setdefault(micro, []).append(message)

    def settle(self, keep: Container[int] = (), num_newest: int = 0) -> None:
        """Returns once the neighbour has received all micro-batches but some and the newest, and drops them."""
        for micro in [each for each in list(self._sent)[: len(self._sent) - num_newest] if each not in keep]:
            for message in self._sent.pop(micro):
                message.wait()

    def take(self) -> Tensor:
        """Returns the next micro-batch from the neighbour, once it is here."""
        self._post_receives(2)  # the one after it, too, which then travels while this stage computes
        if not self._coming:
            self._forms[self._step.shape_of(self._incoming[0])] = self.recv_form(self._incoming[0])
            self._post_receives(1)
        message, shape = self._coming.popleft()
        return cast(Tensor, message.wait()).view(shape)

    def _post_receives(self, num_coming: int) -> None:
        """Posts receives of the next micro-batches, as far as their forms are known, until so many are posted."""
        while self._incoming and len(self._coming) < num_coming:
            form = self._forms.get(self._step.shape_of(self._incoming[0]))
            if form is None:
                return
            flat = torch.empty(math.prod(form[1]), dtype=DTYPES[form[0]], device=self._comm.device)
            label = self._label(self._takes, self._incoming.popleft(), -1)
            self._coming.append((self._comm.recv(flat, self._rank, async_op=True, label=label), form[1]))

    def _label(self, what: str, micro: int, direction: int = 1) -> str:
        sender, receiver = self._stages[::direction]
        return f"{what} of micro-batch {micro} from stage {sender} to stage {receiver}"


# --- a stage ---------------------------------------------------------------------------------------------------------


class Stage:
    """One stage on this rank.

    Args:
        edges: by the neighbour's number, to those on other ranks.

    Attributes:
        losses: of the running step, each weighted by its share of the batch.
        most_held: the largest number of activations that the last step has held at a time.
    """

    def __init__(self, number: int, module: nn.Module, edges: Mapping[int, Edge], num_stages: int, seed: int) -> None:
        self.number, self.module, self.edges, self.seed = number, module, edges, seed
        self.is_first, self.is_last, self.most_held = number == 0, number == num_stages - 1, 0
        self.forget()

    def forget(self) -> None:
        """Drops all tensors of a step."""
        self.losses: list[Tensor] = []
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by micro-batch, what its forward took and returned
        self._received: dict[tuple[int, int], Tensor] = {}  # by neighbour and micro-batch
        self._leaving: dict[tuple[int, int], Tensor] = {}  # the same, until it is sent

    def play(self, step: Step, rounds: Iterable[tuple[Op, ...]], here: Mapping[int, Stage]) -> Iterator[None]:
        """Makes a step; yields whenever another stage of this rank has to compute first.

        Args:
            here: the stages on this rank, by number.
        """
        ops = [op for each in rounds for op in each]
        self.most_held, bare = 0, step._replace(inputs=(), targets=())  # an edge remembers the step
        for peer, edge in self.edges.items():
            edge.begin(bare, [op.chunks[0] for op in ops if isinstance(op, Recv) and op.peer == peer])
        for op in ops:
            if isinstance(op, Compute):
                what = f"ddp: stage {self.number} {op}"
                recorded(what, self._backward if op.backward else self._forward)(step, op.micro)
            elif isinstance(op, Send):
                tensor = self._leaving.pop((op.peer, op.chunks[0]))
                if op.peer in self.edges:
                    self.edges[op.peer].give(tensor, op.chunks[0])
                else:
                    here[op.peer]._received[self.number, op.chunks[0]] = tensor
            else:
                while op.peer not in self.edges and (op.peer, op.chunks[0]) not in self._received:
                    yield
                for edge in self.edges.values():  # before it waits, it drops what neighbours have received:
                    edge.settle(keep=self._held, num_newest=1)  # activations that came back, and gradients
                if op.peer in self.edges:
                    self._received[op.peer, op.chunks[0]] = self.edges[op.peer].take()
        for edge in self.edges.values():
            edge.settle()

    def _forward(self, step: Step, micro: int) -> None:
        inputs = step.inputs[micro] if self.is_first else self._received.pop((self.number - 1, micro)).requires_grad_()
        stream = stream_seed(self.seed, "dropout", step.number, step.first_micro + micro, self.number)
        seed_generators(stream, device=inputs.device)
        output = self.module(inputs)
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.layout is not torch.strided:
            what = "it must return one dense floating-point tensor"
            raise ConfigError(f"stage {self.number} returns {_kind(output)}: {what}")
        if self.is_last:
            output = step.loss(output, step.targets[micro])
            if not isinstance(output, Tensor) or output.numel() != 1:
                raise ConfigError(f"loss returns {_kind(output)}: it must return one number, the mean of a micro-batch")
            output = output.reshape(()) * (step.shape_of(micro)[0] / step.shape[0])
            self.losses.append(output.detach())
        else:
            self._leaving[self.number + 1, micro] = output.detach().contiguous()
        self._held[micro] = inputs, output
        self.most_held = max(self.most_held, len(self._held))

    def _backward(self, step: Step, micro: int) -> None:
        inputs, output = self._held.pop(micro)
        gradient = None if self.is_last else self._received.pop((self.number + 1, micro))
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if not self.is_first:
            found = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
            self._leaving[self.number - 1, micro] = found.contiguous()


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a{'' if value.layout is torch.strided else ' sparse'} tensor {list(value.shape)} of {value.dtype}"


# --- all of them -----------------------------------------------------------------------------------------------------


class Pipeline:
    """A model whose stages are on different ranks, or all on one. Collective.

    Args:
        stages: functions, one for each stage, in their order. Each returns a new module, from a tensor to a tensor. A
            rank calls that of its own stage only.
        schedule: "1f1b" (one_forward_one_backward), "gpipe", or a generator such as these; the same on every rank.
        seed: of the first weights, and of the random numbers in each forward.
        comm: the ranks, as many as stages, or a multiple (note "replicas"); or one, which runs all stages. All ranks by
            default.

    Attributes:
        module: this rank's stage; an `nn.Sequential` of all of them, if this is the only rank.
        stage, chain: this rank's stage, and the chain that it belongs to.
        num_steps: number of steps so far, on which random numbers depend. Set it when you resume.
        most_held: by stage on this rank, the largest number of activations that the last step has held at a time.

    Raises:
        ConfigError: the stages do not fit the ranks, or one is no function that makes a module.
    """

    def __init__(
        self, stages: Sequence[Make], *, schedule: Named = "1f1b", seed: int = 0, comm: Communicator | None = None
    ) -> None:
        self.comm, self.num_stages, self.num_steps = comm or current(), len(stages), 0
        self._algorithm, num_ranks = _algorithm(schedule), self.comm.world_size
        self._number = _NUM_MADE[self.comm] = _NUM_MADE.get(self.comm, 0) + 1
        if not stages or (num_ranks > 1 and num_ranks % self.num_stages):
            what = f"{len(stages)} stages on {num_ranks} ranks"
            raise ConfigError(f"{what}: give as many ranks as stages, a multiple of that, or one")
        self._is_alone, self.num_chains = num_ranks == 1, (width := max(1, num_ranks // self.num_stages))
        self.stage, self.chain = divmod(self.comm.rank, self.num_chains)
        numbers = range(self.num_stages) if self._is_alone else [self.stage]
        neighbours = set() if self._is_alone else {self.stage - 1, self.stage + 1} & set(range(self.num_stages))
        self._edges = {n: Edge(self.comm, n * width + self.chain, (self.stage, n)) for n in neighbours}
        modules = {number: _made(stages[number], number, seed, self.comm.device) for number in numbers}
        self.module = nn.Sequential(*modules.values()) if self._is_alone else modules[self.stage]
        self._by_number = nn.ModuleDict({str(number): module for number, module in modules.items()})
        self._stages = {n: Stage(n, module, self._edges, self.num_stages, seed) for n, module in modules.items()}
        groups = [self.comm.subgroup(range(first, first + width)) for first in range(0, num_ranks, width) if width > 1]
        self._replicas, self._is_out_of_step = groups[self.stage] if groups else None, False
        self._replica: BucketedDataParallel | None = None  # once a parameter needs a gradient

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, inputs: Tensor | None, targets: Tensor | None, loss: Loss, *, micro_size: int) -> Tensor | None:
        """Runs forward and backward of a batch in micro-batches, and adds gradients to `p.grad`. Collective.

        Args:
            inputs: [num_samples, …] on the first stage, None on the others.
            targets: [num_samples, …] on the last stage; ignored elsewhere.
            loss: of outputs and targets of a micro-batch; returns their mean. Called on the last stage.
            micro_size: samples of a micro-batch, the same on every rank; the last micro-batch may be shorter.

        Returns:
            The mean loss of the chain's batch on the last stage, without a graph; None elsewhere.

        Raises:
            ConfigError: inputs, targets or `micro_size` do not fit; the schedule is wrong for this number of
                micro-batches; a stage returns no tensor, or the loss is not one number.
            PeerLost: a stage was lost; the message names it, and the micro-batch that this stage was at.
            RuntimeError: the last step broke off on this rank, so its messages match the others' no more.
        """
        self._check(inputs, targets, loss, micro_size)
        if self._replicas and not self._replica and any(each.requires_grad for each in self.parameters()):
            self._replica = BucketedDataParallel(self.module, comm=self._replicas)
        self.num_steps += 1
        self._is_out_of_step = not self._is_alone  # until it ends
        try:
            with preserved():
                mean = self._play(inputs, targets, loss, micro_size)
        except PeerLost as lost:
            number = lost.rank // self.num_chains
            lost.label = f"step {self.num_steps}, stage {number} of {self.num_stages} is lost; {lost.label}"
            raise
        finally:
            for stage in self._stages.values():
                stage.forget()
        if self._replicas and self._replica:
            self._check_chains(self._replicas)
            self._replica.average_gradients()
        self._is_out_of_step = False
        return mean

    def _check(self, inputs: Tensor | None, targets: Tensor | None, loss: Loss, micro_size: int) -> None:
        """Refuses what does not fit this rank's stage."""
        where = f"on stage {self.stage} of {self.num_stages}"
        if self._is_out_of_step and not self.comm.is_broken:  # else it says by whose fault
            raise RuntimeError(f"the last step broke off {where}; the ranks are out of step: restart the program")
        if not torch.is_grad_enabled():
            raise ConfigError(f"step {where} inside of torch.no_grad(): it computes gradients; call it outside")
        if self.num_stages - 1 in self._stages and not callable(loss):
            raise ConfigError(f"loss={loss!r:.60} {where}: give a function of outputs and targets")
        if type(micro_size) is not int or micro_size < 1:
            raise ConfigError(f"micro_size={micro_size!r}: give the number of samples of a micro-batch, from 1 up")
        if 0 not in self._stages and inputs is not None:
            raise ConfigError(f"inputs {where}: only the first stage takes them; give None here")
        for name, tensor, number in (("inputs", inputs, 0), ("targets", targets, self.num_stages - 1)):
            if number in self._stages and not (isinstance(tensor, Tensor) and tensor.dim() and len(tensor)):
                raise ConfigError(f"{name} {where}: it takes a tensor [num_samples, …], and got {_kind(tensor)}")

    def _check_chains(self, replicas: Communicator) -> None:
        """Raises ConfigError, on every rank of a stage, if chains have different numbers of samples."""
        sizes = [int(each) for each in replicas.all_gather(torch.tensor([self._num_samples], device=replicas.device))]
        if len(set(sizes)) > 1:
            numbers = ", ".join(map(str, sizes))
            raise ConfigError(f"chains have {numbers} samples, and would all count the same: give each as many")

    def _play(self, inputs: Tensor | None, targets: Tensor | None, loss: Loss, size: int) -> Tensor | None:
        """Sends the shape of the batch down, and then goes through the rounds of this rank's stages."""
        before, after = self._edges.get(self.stage - 1), self._edges.get(self.stage + 1)
        mine = [self._number, self.num_steps]
        sent = before.recv_form(0, OF_BATCH) if before else (0, [*mine, size, *cast(Tensor, inputs).shape])
        *theirs, first_size = sent[1][:3]
        shape = sent[1][3:]
        self._num_samples = shape[0]
        num_micro = -(-shape[0] // first_size)
        plan = self._prove(num_micro)
        if after:
            after.send_form(plan, sent[1], 0, OF_BATCH)
        if theirs != mine:
            where = f"stage 0 is in step {theirs[1]} of pipeline {theirs[0]}, counted as they were made"
            here = f"stage {self.stage} in step {mine[1]} of pipeline {mine[0]}"
            raise ConfigError(f"{where}, and {here}: make and step all pipelines in one order on all ranks")
        if first_size != size:
            raise ConfigError(f"micro_size={size} on stage {self.stage}, {first_size} on stage 0: give all the same")
        if before and sent[0] != plan:
            raise ConfigError(f"stages {self.stage - 1} and {self.stage} have different schedules: give all the same")
        targets = targets if self.num_stages - 1 in self._stages else None
        if targets is not None and len(targets) != shape[0]:
            raise ConfigError(f"{len(targets)} targets for {shape[0]} inputs: give one for each")
        parts = [() if each is None else each.split(size) for each in (inputs, targets)]
        step = Step(self.num_steps, tuple(shape), size, self.chain * num_micro, parts[0], parts[1], loss)
        rounds = {number: rounds_of(self._algorithm, number, self.num_stages, num_micro) for number in self._stages}
        running = [stage.play(step, rounds[number], self._stages) for number, stage in self._stages.items()]
        while running:  # of several stages on this rank, each runs until it needs what another one has to compute
            running = [each for each in running if next(each, "ended") is None]
        self.most_held = [stage.most_held for stage in self._stages.values()]
        losses = [loss for stage in self._stages.values() for loss in stage.losses]
        return torch.stack(losses).sum() if losses else None

    def _prove(self, num_micro: int) -> int:
        """Refuses a wrong schedule, and warns of a large bubble. Returns the schedule's digest."""
        try:
            check(self._algorithm, self.num_stages, num_micro)
        except ScheduleError as error:
            raise ConfigError(f"schedule: {error}") from error
        if num_micro < self.num_stages and self.comm.rank == 0:
            few = f"fewer micro-batches ({num_micro}) than stages ({self.num_stages}), which"
            idle = f"idle for {float(bubble(self.num_stages, num_micro)):.0%} of the time; make micro_size smaller"
            warnings.warn(f"{few} {idle}", stacklevel=4)  # shown once
        return digest(self._algorithm, self.num_stages, num_micro)

    # --- between steps -----------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank, for its optimizer."""
        return self.module.parameters()

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the gradients of all stages together, in float64. Collective.

        To clip by it: `torch.nn.utils.clip_grads_with_norm_(pipe.parameters(), max_norm, pipe.gradient_norm())`.
        """
        norms = [gradient_norm(stage.module.parameters()).double().reshape(1) for stage in self._stages.values()]
        if not self._is_alone:
            norms = self.comm.all_gather(norms[0].to(self.comm.device))[:: self.num_chains]
        return total_norm(torch.cat(norms))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state of the `nn.Sequential` of all stages, on every rank: copies, if others are. Collective."""
        own: dict[str, Tensor] = self._by_number.state_dict()
        states = [own] if self._is_alone else all_gather_object(self.comm, own if self.chain == 0 else {})
        return {name: value for each in states for name, value in each.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's part of the state of an `nn.Sequential` of all stages.

        Raises:
            CheckpointError: it has another number of stages.
        """
        if stray := {name.partition(".")[0] for name in state} - set(map(str, range(self.num_stages))):
            raise CheckpointError(f"the state has a stage {min(stray)}: this pipeline has 0 to {self.num_stages - 1}")
        self._by_number.load_state_dict({n: v for n, v in state.items() if n.partition(".")[0] in self._by_number})


def _algorithm(schedule: Named) -> Algorithm:
    """Returns the schedule of this name, or the generator that was given."""
    found = schedule if callable(schedule) else PIPELINES.get(ALIASES.get(str(schedule), str(schedule)))
    if found is None:
        hint = did_you_mean(schedule, [*PIPELINES, *ALIASES])
        raise ConfigError(f"schedule={schedule!r}: take one of {', '.join(PIPELINES)}, or a generator.{hint}")
    return found


def _made(make: Make, number: int, seed: int, device: torch.device) -> nn.Module:
    """Returns a stage, whose weights are drawn from its own stream."""
    if isinstance(make, nn.Module) or not callable(make):
        raise ConfigError(f"stage {number} is {type(make).__name__}: give a function that makes it, without arguments")
    with preserved():
        seed_generators(stream_seed(seed, "init", number), device=device)
        module = make()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"stage {number}: its function returns {type(module).__name__}; it must return a module")
    return module
