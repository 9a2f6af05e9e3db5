"""Sends small Python objects over a communicator, as plain values and tensors, by ordinary collectives.

It is for rare, small objects: names in an error, random states of a checkpoint. An object travels as

    8 bytes        the length of the text
    text           JSON: numbers, texts, lists; anything else as {"is": its form, "of": what it is made of}
    bytes          of all tensors and byte strings, one after another

A receiver creates only objects of the types in this module's tables. Pickle would run code of the sender.
"""

from __future__ import annotations

import builtins
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddp import errors
from ddp.process import gpu

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator

Result = TypeVar("Result")
HEAD_BYTES, FEW_BYTES = 8, 2040


class Form(NamedTuple):
    """The conversion of a type's values to a list and back."""

    type: type
    to_list: Callable[[Any], list[Any]]
    from_list: Callable[[list[Any]], Any]


def _pairs(values: dict[Any, Any]) -> list[Any]:
    return list(map(list, values.items()))


def _dtype(name: list[Any]) -> torch.dtype:
    found = getattr(torch, name[0])
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[0]!r} is not a dtype")
    return found


_FORMS = {
    "tuple": Form(tuple, list, tuple),
    "set": Form(set, list, set),
    "dict": Form(dict, _pairs, dict),
    "OrderedDict": Form(OrderedDict, _pairs, OrderedDict),
    "Counter": Form(Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "Size": Form(torch.Size, list, torch.Size),
    "complex": Form(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "dtype": Form(torch.dtype, lambda dtype: [str(dtype).removeprefix("torch.")], _dtype),
    "device": Form(torch.device, lambda device: [str(device)], lambda name: torch.device(*name)),
    "path": Form(Path, lambda path: [str(path)], lambda name: Path(*name)),
}
_ERRORS = {
    name: found
    for module in (builtins, errors)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Exception)
}


def all_gather_object(comm: Communicator, value: Any, *, label: str = "") -> list[Any]:
    """Returns every rank's object, by rank. Tensors come back on the CPU, and named tuples as tuples.

    Raises:
        TypeError: objects of this type cannot be sent.
    """
    found = comm.all_gather(gpu.sent(packed(value), comm.device), label=label)
    return [unpacked(data) for data in _arrived(comm, found)]


def broadcast_object(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Returns the root's object on every rank, as `all_gather_object` does; ignores that of the others."""
    return unpacked(_broadcast(comm, packed(value if comm.rank == root else None), root))


def gather_object(comm: Communicator, value: Any) -> list[Any]:
    """Returns every rank's object on rank 0, as `all_gather_object` does; elsewhere an empty list."""
    data = comm.gather(gpu.sent(packed(value), comm.device))
    return [unpacked(each) for each in _arrived(comm, data)] if data else []


def scatter_object(comm: Communicator, values: Sequence[Any] | None) -> Any:
    """Returns rank 0's object for this rank; ignores the others' `values`. With None on rank 0, returns None."""
    values = [None] * comm.world_size if values is None else values
    data = [gpu.sent(packed(value), comm.device) for value in values] if comm.rank == 0 else None
    return unpacked(_arrived(comm, [comm.scatter(data)])[0])


def send_object(comm: Communicator, value: Any, dst: int, *, label: str) -> None:
    """Sends an object to rank `dst`, which calls `recv_object`: each tensor from where it is, without a copy."""
    parts: list[Tensor] = []
    head = packed(_plain(value, parts))
    for each in (torch.tensor([head.numel()]), head, *parts):
        comm.send(each, dst, label=label)


def recv_object(comm: Communicator, src: int, *, label: str) -> Any:
    """Returns the object that rank `src` sends; its tensors are on the CPU."""

    def taken(num_bytes: int) -> Tensor:
        return comm.recv(torch.empty(num_bytes, dtype=torch.uint8), src, label=label)

    [num_bytes] = comm.recv(torch.zeros(1, dtype=torch.int64), src, label=label).tolist()
    return _made(unpacked(taken(num_bytes)), taken)


def _broadcast(comm: Communicator, data: Tensor, root: int) -> Tensor:
    """Returns the root's bytes: in one message with their number, if they are few, as most requests and replies are."""
    message = torch.zeros(HEAD_BYTES + FEW_BYTES, dtype=torch.uint8, device="cpu")
    if comm.rank == root:
        message[:HEAD_BYTES].view(torch.int64)[0] = len(data)
        message[HEAD_BYTES:][: len(data)] = data[:FEW_BYTES]
    [message] = _arrived(comm, [comm.broadcast(gpu.sent(message, comm.device), root, label="an object")])
    num_bytes = int(message[:HEAD_BYTES].view(torch.int64)[0])
    if num_bytes <= FEW_BYTES:
        return message[HEAD_BYTES:][:num_bytes]
    if comm.rank == root:
        data = gpu.sent(data, comm.device)
    else:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=comm.device)
    return _arrived(comm, [comm.broadcast(data, root, label="a large object")])[0]


def _arrived(comm: Communicator, data: list[Tensor]) -> list[Tensor]:
    """Returns the results of a collective in tensors, on the CPU."""
    if comm.device.type != gpu.KIND:
        return data
    found = [gpu.leaving(each) for each in data]
    comm.to_host(data[0][:1]).read()  # waits for the collective, and raises its error if it was aborted
    return found


def on_rank_zero(comm: Communicator, work: Callable[[], Result], *, label: str) -> Result:
    """Does `work` on rank 0 while the others wait as long as rank 0 is alive. Returns its result on every rank.

    For long work by one rank for all, such as writing or reading a checkpoint, where a slow disk would exceed a
    collective's deadline. An exception of `work` is raised on every rank, so that none waits in vain; on other ranks it
    is a RuntimeError, unless its class belongs to this package or to Python's builtins.
    """
    outcome, raised = torch.empty(0, dtype=torch.uint8), None
    if comm.rank == 0:
        try:
            outcome = packed(("done", work()))
        except Exception as error:
            outcome, raised = packed(("raised", *error_values(error))), error
    comm.peers.wait_for_rank_zero(label)
    how, *rest = unpacked(_broadcast(comm, outcome, 0))
    if how == "raised":
        raise raised or error_of(*rest, where="rank 0")
    result: Result = rest[0]
    return result


# --- an exception ----------------------------------------------------------------------------------------------------


def error_values(error: Exception) -> tuple[str, list[Any] | None, str]:
    """Returns class, arguments and text of an exception; no arguments if these, or its class, cannot be sent."""
    name, arguments = type(error).__name__, None
    if _ERRORS.get(name) is type(error):
        with suppress(TypeError):
            packed(given := list(error.__reduce__()[1]))
            arguments = given
    return name, arguments, errors.safe_str(error)


def error_of(name: str, arguments: list[Any] | None, text: str, *, where: str) -> Exception:
    """Returns the exception with these `error_values`, or a RuntimeError if there are no arguments."""
    return RuntimeError(f"{name} on {where}: {text}") if arguments is None else _ERRORS[name](*arguments)


# --- an object as bytes ----------------------------------------------------------------------------------------------


def packed(value: Any) -> Tensor:
    """Returns the object as bytes, on the CPU.

    Raises:
        TypeError: objects of this type cannot be sent.
    """
    parts: list[Tensor] = []
    text = json.dumps(_plain(value, parts)).encode()
    head = len(text).to_bytes(HEAD_BYTES, "little") + text
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *parts])


def unpacked(data: Tensor) -> Any:
    """Returns the object from the bytes of `packed`.

    Raises:
        ValueError, KeyError, RuntimeError, …: `packed` has not made these bytes.
    """
    end = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES].numpy().tobytes(), "little")
    rest = data[end:]

    def taken(num_bytes: int) -> Tensor:
        """Returns the next bytes, as a copy, because a view would keep all bytes alive."""
        nonlocal rest
        if len(rest[:num_bytes]) != num_bytes:
            raise ValueError(f"{num_bytes} bytes of a value, but {len(rest)} are left")
        found, rest = rest[:num_bytes].clone(), rest[num_bytes:]
        return found

    return _made(json.loads(data[HEAD_BYTES:end].numpy().tobytes()), taken)


def _made(plain: Any, taken: Callable[[int], Tensor]) -> Any:
    """Returns a value from its form for JSON; `taken` returns its next bytes."""
    if isinstance(plain, list):
        return [_made(each, taken) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if plain["is"] == "tensor":
        name, shape, strides, num_bytes = plain["of"]
        return taken(num_bytes).view(_dtype([name])).as_strided(shape, strides)
    if plain["is"] == "bytes":
        return taken(*plain["of"]).numpy().tobytes()
    return _FORMS[plain["is"]].from_list(_made(plain["of"], taken))


def _plain(value: Any, parts: list[Tensor]) -> Any:
    """Returns a value in a form for JSON, and appends its bytes to `parts`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), parts)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        dense = value.detach()
        if dense.device.type != "cpu" or not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
            dense = torch.empty_like(dense, device="cpu").copy_(dense)  # in its own memory format
        parts.append(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
        about = [str(value.dtype).removeprefix("torch."), list(dense.shape), list(dense.stride()), parts[-1].numel()]
        return {"is": "tensor", "of": about}
    if isinstance(value, (bytes, bytearray)):
        parts.append(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0).byte())
        return {"is": "bytes", "of": [len(value)]}
    if type(value) is list:
        return [_plain(each, parts) for each in value]
    if forms := [form for form, each in _FORMS.items() if isinstance(value, each.type)]:
        form = min(forms, key=lambda form: _FORMS[form].type is not type(value))  # a named tuple is sent as a tuple
        return {"is": form, "of": _plain(_FORMS[form].to_list(value), parts)}
    raise TypeError(f"an object of type {type(value).__qualname__} cannot be sent between ranks: use plain values")
