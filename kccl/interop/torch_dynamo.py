"""Keeps Dynamo from tracing methods that PyTorch calls while a compiled model runs."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

_Method = TypeVar("_Method", bound=Callable[..., Any])

_set_strategy: Callable[..., None] | None = None
try:
    _NEVER = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
    )
    _set_strategy = eval_frame.set_code_exec_strategy
except (AttributeError, TypeError):
    # In this version of PyTorch Dynamo is told in another way: use the public, slower one.
    pass


def untraced(method: _Method) -> _Method:
    """Marks a method so that Dynamo runs it, and what it calls, without tracing it. Returns it.

    DistributedDataParallel calls the process group while its compiled model runs, and Dynamo traces
    every Python function that is called meanwhile. It cannot trace the group's attributes, nor
    calls of C.
    """
    # torch.compiler.disable would import Dynamo now, which takes as long as to import PyTorch. It
    # and torch._disable_dynamo wrap the method, and each call of the wrapper takes 5 us and more.
    if _set_strategy is None:
        return cast(_Method, torch._disable_dynamo(method))
    of_code: Any = method
    _set_strategy(of_code.__code__, _NEVER)
    # So Dynamo breaks the graph at a call of the method in a function that it traces.
    of_code._torchdynamo_disable = True
    of_code._torchdynamo_disable_msg = "KCCL makes the call when the program runs"
    return method
