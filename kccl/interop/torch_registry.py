"""Registers communicators by name, because PyTorch's custom ops kccl::... can only take a name."""

from ..base.errors import Error, InvalidArgument
from ..comm import Communicator

DEFAULT = "default"
_registered: dict[str, Communicator] = {}


def register(comm: Communicator, name: str = DEFAULT) -> None:
    """Gives a communicator a name, for the functions of kccl.interop.torch in this process.

    The communicator stays referenced until unregister().

    Raises:
        InvalidArgument: Another communicator has this name.
    """
    if _registered.get(name, comm) is not comm:
        raise InvalidArgument(
            f"name is {name!r}, and another communicator is registered under it: call "
            f"unregister({name!r}) first"
        )
    _registered[name] = comm


def unregister(name: str = DEFAULT) -> None:
    """Removes a name. The communicator stays open. Idempotent."""
    _registered.pop(name, None)


def find(name: str) -> Communicator:
    """Returns the communicator that is registered under a name.

    Raises:
        Error: No communicator has this name.
    """
    if name not in _registered:
        known = ", ".join(map(repr, _registered)) or "none"
        raise Error(
            f"no communicator is registered as {name!r}, registered are: {known}; "
            "call kccl.interop.torch.register(comm) first"
        )
    return _registered[name]
