"""Keeps Dynamo from tracing methods that PyTorch calls while a compiled model runs."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Returns the method, marked so that Dynamo runs it without tracing it.

    DistributedDataParallel calls the process group while its compiled model runs, and Dynamo traces
    every Python function that is called meanwhile. It cannot trace the group's attributes, nor
    calls of C.
    """
    # torch.compiler.disable would import Dynamo now, which takes as long as to import PyTorch.
    # torch._disable_dynamo imports Dynamo at the first call of the method.
    return cast(_Method, torch._disable_dynamo(method))
