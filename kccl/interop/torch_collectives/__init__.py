"""The collectives for PyTorch, one file each, found in this folder.

A file has
- GROUP_METHODS: PyTorch's name of a method of a process group -> the method of ProcessGroup.
- The functions of kccl.interop.torch, if it has some. Each calls a custom op, which takes only
  tensors, numbers and strings, so torch.compile can trace it. It traces the function that is marked
  register_fake, and runs or captures the op itself.
"""

import importlib
import pkgutil
from types import ModuleType

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> ModuleType:
    """Returns the file of one collective."""
    return importlib.import_module(f".{name}", __name__)
