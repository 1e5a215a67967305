"""The threads of KCCL in this process."""

import threading

# They stay: one releases GPUs' memory, and the server's compile grammars.
_STAY = ("kccl-release", "kccl compiler")


def threads_of_kccl():
    """The names of those that should end with what began them."""
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("kccl") and not name.startswith(_STAY)]
