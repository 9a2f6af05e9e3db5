"""Offers what the package calls of `torch.cuda`, for the stand-in: `torch.standin`, and `ddp.process.gpu.cuda`."""

from __future__ import annotations

import threading
import time
import uuid
from types import SimpleNamespace
from typing import Any

import torch
from gpu_standin.build import load

KIND = "standin"
num_devices, first_device = 0, 0  # how many this process sees, and which of the host's the first one is
default_generators: tuple[torch.Generator, ...] = ()  # empty before `init`, as CUDA's are


def is_available() -> bool:
    return num_devices > 0


def device_count() -> int:
    return num_devices


def is_initialized() -> bool:
    return bool(default_generators)


def init() -> None:
    global default_generators
    if not default_generators:
        default_generators = tuple(torch.ops.standin.generator(index) for index in range(num_devices))


_lazy_init = init  # torch calls this one before it makes a tensor


def _is_in_bad_fork() -> bool:
    return False


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return current_device() if device is None or device < 0 else device
    device = torch.device(device)
    if device.type != KIND:
        raise ValueError(f"Expected a {KIND} device, but got: {device}")
    return current_device() if device.index is None else device.index


def current_device() -> int:
    init()
    return load().device()


def set_device(device: Any) -> None:
    init()
    if not 0 <= (index := _index(device)) < num_devices:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    load().set_device(index)


class device:
    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def device_of(tensor: torch.Tensor) -> device:
    return device(tensor.device)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    number = uuid.uuid5(uuid.NAMESPACE_OID, str(first_device + _index(device)))
    return SimpleNamespace(name="stand-in", uuid=number, major=9, minor=0, total_memory=1 << 34)


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def can_device_access_peer(device: Any, peer: Any) -> bool:
    return _index(device) != _index(peer)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device=KIND, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device(KIND, _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=load().stream(index), device_index=index, device_type=PRIVATE_USE_1)


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=PRIVATE_USE_1)


PRIVATE_USE_1 = 20  # torch's number for the type


def set_stream(stream: torch.Stream) -> None:
    load().set_device(stream.device.index)
    load().set_stream(stream.device.index, stream.stream_id)


class stream:
    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            index = self.stream.device.index
            self.before = current_device(), index, load().stream(index)
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, index, stream = self.before
            load().set_stream(index, stream)
            load().set_device(device)


StreamContext = stream


def synchronize(device: Any = None) -> None:
    with torch.device(KIND, _index(device)):
        torch._C._accelerator_synchronizeDevice(_index(device))


def manual_seed(seed: int) -> None:
    init()
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    init()
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    init()
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    init()
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(num_devices)]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def empty_cache() -> None:
    pass


def _sleep(cycles: int) -> None:
    """Keeps the current stream busy for as long as a GPU of 2 GHz takes for so many cycles."""
    index = current_device()
    number = load().batch(index, load().stream(index), b"sleep", 0, None, None, None)

    def sleep() -> None:
        load().before_batch(number)
        time.sleep(cycles / 2e9)
        load().end_batch(number)
        load().forget_batch(number)

    threading.Thread(target=sleep, daemon=True).start()
