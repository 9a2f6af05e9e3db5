"""Programs whose numbers, errors or speed direct gradients must not change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ddp
from ddp.replica import direct

SIZE = 16
LossOf = Callable[[Any, Tensor], Tensor]


class Program(nn.Module):
    """Runs a function as the forward of some layers."""

    def __init__(self, forward: LossOf, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self._forward = nn.ModuleList(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self.layers, x)


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


def column() -> nn.Linear:
    return nn.Linear(1, 1 << 16)


def steps(replica: ddp.DistributedDataParallel, *shape: int, num_steps: int = 3) -> list[Tensor]:
    """Returns the losses and gradients of some steps."""
    seen = list[Tensor]()
    for step in range(num_steps):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = replica(x).square().mean()
        loss.backward()
        gradients = [x.grad, *(each.grad for each in replica.parameters())]
        seen += [loss.detach(), *(each.clone() for each in gradients if each is not None)]
        replica.zero_grad()
    return seen


def equals_without(forward: LossOf, *shape: int, layers: Callable[[], nn.Module] = linear) -> None:
    """Compares three steps with those of a replica without direct gradients, bit by bit."""
    seen = []
    for is_direct in (True, False):
        torch.manual_seed(0)
        net = Program(forward, layers(), layers())
        seen.append(steps(ddp.DistributedDataParallel(net, direct_gradients=is_direct), *shape))
    assert all(map(torch.equal, *seen))


def results_changed_in_place(_comm: ddp.Communicator) -> None:
    """An activation in place, or a residual sum, after a layer with inputs of three or four dimensions."""
    for shape in ((6, SIZE), (2, 3, SIZE), (2, 1, 3, SIZE)):
        equals_without(lambda layers, x: layers[1](torch.relu_(layers[0](x))).add_(x), *shape)


def biases_that_are_broadcast(_comm: ddp.Communicator) -> None:
    """A bias of one number, of one row, or of a row for each sample."""
    for where in (slice(1), None):
        equals_without(lambda layers, x, w=where: layers[1](F.linear(x, layers[0].weight, layers[0].bias[w])), 6, SIZE)
    equals_without(lambda layers, x: F.linear(x, layers[0].weight, layers[1](x) + layers[0].bias), 6, SIZE)


def inputs_that_are_transposed(_comm: ddp.Communicator) -> None:
    """Autograd computes the transposed gradient of a transposed matrix, and takes a single column for one."""
    equals_without(lambda layers, x: layers[1](torch.tanh(layers[0](x)).t().contiguous().t()), 300, SIZE)
    equals_without(lambda layers, x: layers[0](x) - layers[1](x * 2), 1, 1, layers=column)


def transposed_inputs_changed_in_place(_comm: ddp.Communicator) -> None:
    """Autograd has saved a copy of them."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        hidden = layers[0](x) * 2
        return hidden.add_(layers[1](hidden.transpose(0, 1)).transpose(0, 1))

    equals_without(forward, 2, SIZE, SIZE)


def a_first_layer_that_was_stepped_since(_comm: ddp.Communicator) -> None:
    """Its backward does not need its weight, so a step may come between forward and backward; of others it must not."""
    replica = ddp.DistributedDataParallel(nn.Sequential(linear(), linear()))
    optimizer = torch.optim.SGD(replica.module[0].parameters())
    steps(replica, 6, SIZE)
    first, second = (replica(torch.ones(6, SIZE)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    second.backward()
    third = replica(torch.ones(6, SIZE)).sum()
    with torch.no_grad():
        replica.module[1].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.backward()
    replica.release()


def a_mode_of_the_user(_comm: ddp.Communicator) -> None:
    """One that replaces `F.linear`, around the replica, and adds a factor that is trained."""
    factor = nn.Parameter(torch.ones(SIZE, SIZE))

    class Adapter(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is F.linear:
                args = (args[0], args[1] * factor, *args[2:])
            return function(*args, **(kwargs or {}))

    replica = ddp.DistributedDataParallel(nn.Sequential(linear(), linear()))
    for _ in range(2):
        factor.grad = None
        with Adapter():
            replica(torch.ones(6, SIZE)).sum().backward()
        assert factor.grad is not None


def a_frozen_encoder(_comm: ddp.Communicator) -> None:
    """In evaluation mode torch computes it by fused kernels, which return zeros for samples that are masked."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            layer[0].requires_grad_(False).eval()
        mask = torch.arange(x.shape[1]).expand(x.shape[:2]) > 4
        return layers[0][1](layers[0][0](x.detach(), src_key_padding_mask=mask)) + layers[1][1](x)

    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=True)
        encoder = nn.TransformerEncoder(layer.requires_grad_(False), 2)
        return nn.Sequential(encoder, linear())

    equals_without(forward, 3, 7, SIZE, layers=layers)


def differences_in_flight(_comm: ddp.Communicator) -> None:
    """The inner steps of local SGD with a delay run while buckets hold differences of parameters."""
    inputs = torch.randn(48, SIZE, generator=torch.Generator().manual_seed(1))
    seen = []
    for is_direct in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(linear(), linear())
        rounds = ddp.LocalSGD(every=6, delay=2, direct_gradients=is_direct)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        how: dict[str, Any] = {"loss": F.mse_loss, "global_batch": 4, "epochs": 3, "folder": None}
        ddp.fit(net, (inputs, inputs), optimizer, strategy=rounds, **how)
        seen.append(nn.utils.parameters_to_vector(net.parameters()))
    assert torch.equal(*seen)


# --- all of them -----------------------------------------------------------------------------------------------------


CASES = [
    results_changed_in_place,
    biases_that_are_broadcast,
    inputs_that_are_transposed,
    transposed_inputs_changed_in_place,
    a_first_layer_that_was_stepped_since,
    a_mode_of_the_user,
    a_frozen_encoder,
    differences_in_flight,
]


def all_cases() -> None:
    comm = ddp.init(abort_s=20)
    direct.LARGE_BYTES = 0
    run_cases(CASES, comm, [])
    with suppress(RuntimeError):
        ddp.shutdown()


@pytest.mark.quick(1)
def test_all_cases_on_two_ranks() -> None:
    run_ranks(all_cases, 2)
