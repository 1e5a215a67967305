"""Finds the source lines of code addresses, by the debug information of kernels' libraries."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .library import Library, library_at

_TOOLS = ("addr2line", "llvm-addr2line")
# Headers with primitives that make the accesses. A report names the callers of these functions.
_PRIMITIVES = ("mem", "platform", "coop")
_CSRC = "csrc/"
_HEADERS = f"{_CSRC}include/kccl/"
# How the paths of KCCL's own files begin. "csrc/" alone would match other projects' files, too.
_OWN = (_HEADERS, f"{_CSRC}sim/module.inc")
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Frame:
    """A function in a stack of inlined calls.

    Attributes:
        function: Its name.
        file: Path of its source; relative to the folder above csrc for KCCL's own files.
        line: Line in that file.
    """

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Symbols:
    """Source lines of code addresses. Keeps what it has looked up."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Frame, ...]] = {}

    def look_up(self, sites: Iterable[int]) -> None:
        """Looks up many return addresses at once, since each start of the tool is slow."""
        by_library: dict[Library, list[int]] = {}
        for site in set(sites) - set(self._known):
            found = library_at(site)
            if found is None:
                self._known[site] = ()
            else:
                by_library.setdefault(found, []).append(site)
        for found, its_sites in by_library.items():
            self._known |= zip(its_sites, _frames(found, its_sites), strict=True)

    def frames(self, site: int) -> tuple[Frame, ...]:
        """Returns the functions at a return address, innermost first; () if they are unknown."""
        self.look_up([site])
        return self._known[site]

    def is_of_library(self, site: int) -> bool:
        """Tells whether a return address is in KCCL's own source. True if its source is unknown."""
        frames = [frame for frame in self.frames(site) if not _is_primitive(frame)]
        return not frames or frames[0].file.startswith(_CSRC)

    def line(self, site: int) -> str:
        """Returns the source line of a return address, and the line in the user's source that
        called it.
        """
        if site == 0:
            return "an unknown line"
        frames = [frame for frame in self.frames(site) if not _is_primitive(frame)]
        if not frames:
            return f"{_offset(site)} ({_why_no_lines()})"
        inner, outer = frames[0], frames[-1]
        # In KCCL's own kernels the outermost function is a wrapper, so it is not named.
        is_called = outer.file != inner.file and not outer.file.startswith(_CSRC)
        return f"{inner}, called in {outer}" if is_called else str(inner)

    def is_of_user(self, site: int) -> bool:
        """Tells whether a return address is known to be in a function outside of KCCL's source."""
        return any(not frame.file.startswith(_OWN) for frame in self.frames(site))

    def user_line(self, site: int) -> str:
        """Returns the innermost line outside of the library that led to a return address.

        Returns the library's own line if there is none.
        """
        for frame in self.frames(site):
            if not frame.file.startswith(_OWN):
                return str(frame)
        return self.line(site)


def _is_primitive(frame: Frame) -> bool:
    path = Path(frame.file)
    return frame.file.startswith(_HEADERS) and path.stem.split("_")[0] in _PRIMITIVES


def _offset(site: int) -> str:
    found = library_at(site)
    return f"{site:#x}" if found is None else f"{found.path.name}+{site - found.begin:#x}"


def _why_no_lines() -> str:
    if _tool() is None:
        return f"source lines need {' or '.join(_TOOLS)}: install binutils or LLVM"
    return "its source line is unknown"


@lru_cache(maxsize=1)
def _tool() -> str | None:
    return next(filter(None, map(shutil.which, _TOOLS)), None)


def _frames(found: Library, sites: Sequence[int]) -> list[tuple[Frame, ...]]:
    tool = _tool()
    if tool is None:
        return [()] * len(sites)
    # Asks for the byte before the return address, which is within the call.
    asked = "".join(f"{site - 1 - found.begin:#x}\n" for site in sites)
    done = subprocess.run(
        [tool, "-a", "-i", "-f", "-C", "-e", str(found.path)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    groups: list[list[str]] = []
    for line in done.stdout.splitlines():
        # -a prints each address before its functions.
        if line.startswith("0x"):
            groups.append([])
        else:
            groups[-1].append(line)
    if done.returncode != 0 or len(groups) != len(sites):
        return [()] * len(sites)
    return [tuple(_parse(group)) for group in groups]


def _parse(lines: Sequence[str]) -> Iterable[Frame]:
    for function, position in zip(lines[::2], lines[1::2], strict=False):
        file, _, line = position.partition(" (")[0].rpartition(":")
        if line.isdigit() and not file.startswith("??"):
            yield Frame(function.partition("(")[0], _shortened(file), int(line))


def _shortened(file: str) -> str:
    path = os.path.normpath(file)
    _, found, rest = path.rpartition(f"/{_CSRC}")
    return f"{_CSRC}{rest}" if found else path
