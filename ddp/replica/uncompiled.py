"""Keeps torch.compile away from the bookkeeping around a module that it may compile.

Hooks and collectives act on this process, not on tensors alone, so no graph can hold them. A marked function is called
as it is, and so is all that it calls; the graph of the code around it ends there. The marks are those that
`torch.compiler.disable` sets. Calling that function would import the compiler, which takes seconds, even where nobody
compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])
NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(function: Function) -> Function:
    """Marks a function, as a decorator."""
    eval_frame.set_code_exec_strategy(function.__code__, NEVER)  # where it is called from Python or from autograd
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where its caller is compiled
    return function
