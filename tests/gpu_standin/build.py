"""Builds the stand-in's C++ where a compiler is found, once for each version of it and of torch, and loads it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t
from pathlib import Path

import torch

HERE = Path(__file__).parent
BUILT = HERE / ".build"
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)

ON_HOST_WAIT = ctypes.CFUNCTYPE(None, c_char_p)
SIGNATURES = {
    "start": (None, c_int, ON_HOST_WAIT),
    "device": (c_int,),
    "set_device": (None, c_int),
    "stream": (c_int64, c_int),
    "set_stream": (None, c_int, c_int64),
    "new_stream": (c_int64,),
    "detect": (None, c_int, c_int),
    "late": (None, c_int),
    "reset": (None,),
    "count": (None, c_char_p),
    "fail": (None, c_char_p),
    "report": (c_char_p,),
    "batch": (c_int64, c_int, c_int64, c_char_p, c_int, POINTER(c_size_t), POINTER(c_int64), POINTER(c_int)),
    "before_batch": (None, c_int64),
    "end_batch": (None, c_int64),
    "wait_batch": (None, c_int64, c_int),
    "forget_batch": (None, c_int64),
}


def build() -> Path:
    """Compiles if nobody has yet; two processes at once compile once."""
    root = Path(torch.__file__).parent
    sources = sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.h"))
    name = hashlib.sha256(b"".join(each.read_bytes() for each in sources) + torch.__version__.encode()).hexdigest()[:16]
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target := BUILT / f"{name}.so").exists():
            assert COMPILER is not None
            half = BUILT / f"{name}.half"
            flags = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-isystem", str(root / "include")]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            subprocess.run(
                [COMPILER, *flags, abi, str(HERE / "standin.cpp"), "-o", str(half), *libraries], check=True
            )
            for old in BUILT.glob("*.so"):
                old.unlink()
            half.rename(target)
    return target


@functools.cache
def load() -> ctypes.CDLL:
    """Loads it into this process. Its functions let other threads go on, as ctypes' do."""
    library = ctypes.CDLL(str(build()))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, f"standin_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library
