"""Finds the collectives for PyTorch. Each is one file in this folder.

Each file has
- GROUP_METHODS: PyTorch's name of a method of a process group -> the method of ProcessGroup.
- The collective's functions in kccl.interop.torch, if there are some. Each calls a custom op, which
  takes only tensors, numbers and strings, so that torch.compile can trace it. Dynamo traces the
  function that is marked register_fake. When the program runs, the op itself is called or captured.
"""

import importlib
import pkgutil
from types import ModuleType

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> ModuleType:
    """Returns the module of one collective."""
    return importlib.import_module(f".{name}", __name__)
