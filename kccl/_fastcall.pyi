"""The second module of the compiled extension: csrc/host/fastcall.cpp and the files it names."""

from collections.abc import Callable
from typing import Any

class Op:
    """A call made ready, to be made without a Python frame."""

    def __init__(
        self,
        address: int,
        result: Any,
        on_failure: Callable[[], None],
        stream: Callable[[], int] | None = None,
    ) -> None: ...
    def __call__(self) -> Any: ...
    def after(self, fill: Callable[[], object]) -> Any: ...
    def clock(self, iterations: int, address: int) -> None: ...

class Group:
    """The messages of a group of sends and receives."""

    def __init__(self, address: int, owner: Any, on_failure: Callable[[], None]) -> None: ...
    def __len__(self) -> int: ...
    def open(self) -> None: ...
    def close(self) -> None: ...
    def add(
        self, address: int, num_bytes: int, peer: int, tag: int, receives: bool, kept: Any
    ) -> None: ...
    def truncate(self, count: int) -> None: ...
    def run(self) -> None: ...
    def move_to(self, other: Group) -> None: ...
    def __call__(self) -> None: ...
    def drop(self) -> None: ...

class OneSided:
    """Makes put, get, signal, wait, send or recv; what it does not know goes to its `_slow`."""

    def learn(
        self,
        address: int,
        owner: Any,
        on_failure: Callable[[], None],
        num_positional: int,
        names: tuple[str, ...],
    ) -> None: ...
    def learn_window(
        self,
        window: Any,
        num_bytes: int,
        addresses: tuple[int, ...],
        dtype: Any,
        type: type | None,
    ) -> None: ...
    def learn_dtype(self, dtype: Any, type: type | None) -> None: ...
    def learn_group(self, group: Group) -> None: ...
    def forget_window(self, window: Any) -> None: ...
    def forget(self) -> None: ...

class Dispatcher:
    """Finds a call that was made before, and makes it; what it does not know goes to `slow`."""

    def __init__(
        self, slow: Callable[..., Any], options: tuple[str, str], is_positional: bool
    ) -> None: ...
    def learn(
        self,
        dtype: Any,
        type: type | None,
        device: tuple[int, int],
        num_bytes: int,
        values: tuple[Any, Any],
        out_bytes: int,
        own_offset: int,
        has_result: bool,
        lacks_x: bool,
        address: int,
        owner: Any,
        on_failure: Callable[[], None],
    ) -> None: ...
    def forget(self) -> None: ...
