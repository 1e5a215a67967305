"""Launches of users' kernels, and the arrays among their arguments: where these end, what they are
called, and when they are freed.
"""

import re
import weakref
from collections.abc import Sequence
from typing import Any

from ..base.abi import ffi
from .library import Entry

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class LaunchArrays:
    """Gives each array's name a number, by which findings refer to it, and notes which arrays have
    been freed.
    """

    def __init__(self) -> None:
        self._names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        # First address of an array -> its bytes and the number of its name. The latest launch's are
        # last.
        self._known: dict[int, tuple[int, int]] = {}
        # The arrays that have been freed. append() and pop() of a list are atomic: an array may be
        # freed at any moment, in any thread.
        self._freed: list[tuple[int, tuple[int, int, int]]] = []
        # The arrays whose end is watched: (rank, fields of the KcclSimArray).
        self._watched: set[tuple[int, tuple[int, int, int]]] = set()

    def name(self, number: int) -> str:
        """Returns the name with this number, as in "`x` (argument 2 of mine)"."""
        return self._names[number]

    def of_launch(
        self, rank: int, kernel: str, parameters: Sequence[str], arrays: Sequence[Any]
    ) -> Any:
        """Returns the KcclSimArrays of a launch.

        Args:
            rank: The machine's rank that launches.
            kernel: Name of the kernel.
            parameters: Names of its parameters; empty if they are not known.
            arrays: (position among the arguments, address, bytes, the array) of each.
        """
        made = ffi.new("KcclSimArray[]", len(arrays))
        for each, (position, address, nbytes, array) in zip(made, arrays, strict=True):
            of = f"argument {position} of {kernel}"
            number = self._number(f"`{parameters[position]}` ({of})" if parameters else of)
            each.address, each.num_bytes, each.name = address, nbytes, number
            self._known.pop(address, None)
            self._known[address] = nbytes, number
            self._watch(rank, array, (address, nbytes, number))
        return made

    def at(self, address: int) -> str:
        """Returns the name of an address, as in "byte 4 of `x` (argument 2 of mine)"; "" if it lies
        in no array.
        """
        for begin, (nbytes, number) in reversed(list(self._known.items())):
            if begin <= address < begin + nbytes:
                return f"byte {address - begin} of {self._names[number]}"
        return ""

    def take_freed(self) -> list[tuple[int, Any]]:
        """Returns (rank, KcclSimArray) of each array that has been freed since the last call."""
        taken = []
        while self._freed:
            rank, fields = self._freed.pop()
            taken.append((rank, ffi.new("KcclSimArray *", fields)))
        return taken

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def _watch(self, rank: int, array: Any, fields: tuple[int, int, int]) -> None:
        """Watches for the end of an array's memory. The array that owns it counts, not a view."""
        owner = array
        while type(getattr(owner, "base", None)) is type(array):
            owner = owner.base
        if getattr(owner, "base", None) is not None:
            return  # the memory belongs to no array object that can be watched
        if (rank, fields) in self._watched:
            return
        try:
            finalizer = weakref.finalize(owner, self._free, (rank, fields))
        except TypeError:
            return  # the end of such an object cannot be watched
        finalizer.atexit = False
        self._watched.add((rank, fields))

    def _free(self, which: tuple[int, tuple[int, int, int]]) -> None:
        self._watched.discard(which)
        self._known.pop(which[1][0], None)
        self._freed.append(which)


def parameters_of(source: str, kernel: str, count: int) -> tuple[str, ...]:
    """Returns the names of a kernel's parameters, as its source has them; () if they are not found.

    Args:
        source: The kernel's source text.
        kernel: Its name, or that of a template instance.
        count: Number of its parameters.
    """
    name = kernel.partition("<")[0].rpartition("::")[2].strip()
    text = _COMMENT.sub(" ", source)
    for found in re.finditer(rf"\bvoid\s+{re.escape(name)}\s*\(", text):
        names = [_last_word(each) for each in _split(text[found.end() :])]
        if len(names) == count and all(names):
            return tuple(names)
    return ()


def _split(text: str) -> list[str]:
    """Returns the texts between commas, up to the closing parenthesis; [] if there is none."""
    parts, depth = [""], 0
    for letter in text:
        if letter in "([{<":
            depth += 1
        elif letter == ")" and depth == 0:
            return parts
        elif letter in ")]}>":
            depth -= 1
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return []


def _last_word(declaration: str) -> str:
    """Returns the name that a declaration declares; "" if it has none."""
    words = re.findall(r"\w+", declaration.partition("=")[0])
    return words[-1] if len(words) > 1 else ""


def launch_of(
    rank: int,
    entry: Entry,
    data: bytes,
    *,
    grid: int,
    block: int,
    shared_bytes: int = 0,
    most_resident: int = 0,
    arrays: Any = None,
) -> tuple[Any, Any]:
    """Returns a KcclSimLaunch, and an object that keeps its arguments alive.

    Args:
        rank: The machine's rank that launches.
        entry: The kernel.
        data: Its arguments one after another, each aligned.
        grid, block: Number of blocks, and threads of each.
        shared_bytes: Bytes of dynamic shared memory of each block.
        most_resident: Most blocks of the launch that run at once; 0 for all.
        arrays: KcclSimArrays of the arrays among the arguments. With None the machine does not know
            where these end.
    """
    arguments_ = ffi.new("uint64_t[]", -(-len(data) // 8) or 1)
    ffi.memmove(arguments_, data, len(data))
    launch = ffi.new("KcclSimLaunch *")
    launch.entry = ffi.cast("void (*)(const void *)", entry.address)
    launch.arguments = arguments_
    launch.argument_bytes = len(data)
    launch.num_blocks = grid
    launch.threads_per_block = block
    launch.shared_bytes = shared_bytes
    launch.most_resident = most_resident
    launch.rank = rank
    if arrays is not None:
        launch.arrays, launch.num_arrays = arrays, len(arrays)
    return launch, (arguments_, arrays)
