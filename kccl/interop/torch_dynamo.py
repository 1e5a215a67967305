"""Keeps Dynamo from tracing methods that PyTorch calls while a compiled model runs."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Method = TypeVar("_Method", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP


def untraced(method: _Method) -> _Method:
    """Marks a method so that Dynamo runs it, and what it calls, without tracing it. Returns it.

    DistributedDataParallel calls the process group while its compiled model runs, and Dynamo traces
    every Python function that is called meanwhile. It cannot trace the group's attributes, nor
    calls of C.
    """
    # torch.compiler.disable would import Dynamo now, which takes as long as to import PyTorch. It
    # and torch._disable_dynamo wrap the method, and each call of the wrapper takes 5 us and more.
    of_code: Any = method
    strategy = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
    eval_frame.set_code_exec_strategy(of_code.__code__, strategy)
    # So Dynamo breaks the graph at a call of the method in a function that it traces.
    of_code._torchdynamo_disable = True
    of_code._torchdynamo_disable_msg = "KCCL makes the call when the program runs"
    return method
