"""Finds the headers that a source includes, whose hashes are part of its key in the cache."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import CompileError

# Files may hold any bytes, so they are read and hashed with this error handler.
_ANY_BYTES = "surrogateescape"
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(.*)$", re.MULTILINE)


class Headers:
    """Reads each header once, for the keys of many sources."""

    def __init__(self) -> None:
        self._texts: dict[Path, str | None] = {}
        self._hashes: dict[Path, str] = {}
        self._closures: dict[tuple[str, ...], list[tuple[str, str]]] = {}

    def of(self, source: str, include_dirs: Sequence[Path]) -> list[tuple[str, str]]:
        """Returns (path, hash) of all headers that a source includes, directly or not, in order.

        Ignores conditions (#if). A header that is not found is taken for one of the compiler's own,
        which the compiler's version in the key covers.
        """
        spelled = _INCLUDE.findall(source)
        known = *spelled, "in", *map(str, include_dirs)
        if known not in self._closures:
            found = sorted(self._included(spelled, include_dirs))
            self._closures[known] = [(str(path), self._hash(path)) for path in found]
        return self._closures[known]

    def _included(self, spelled: Sequence[str], include_dirs: Sequence[Path]) -> set[Path]:
        found: set[Path] = set()
        pending: list[tuple[Sequence[str], Path | None]] = [(spelled, None)]
        while pending:
            includes, folder = pending.pop()
            for each in includes:
                match = re.match(r'"([^"]+)"|<([^>]+)>', each)
                if match is None:
                    raise CompileError(
                        f"cannot follow #include {each.strip()}: name the file, because the cache "
                        "must hash every header"
                    )
                near = [folder] if folder is not None and match[1] else []
                for directory in (*near, *include_dirs):
                    path = Path(os.path.normpath(directory / (match[1] or match[2])))
                    if path in found:
                        break
                    text = self._text(path)
                    if text is not None:
                        found.add(path)
                        pending.append((_INCLUDE.findall(text), path.parent))
                        break
        return found

    def _text(self, path: Path) -> str | None:
        if path not in self._texts:
            self._texts[path] = path.read_text(errors=_ANY_BYTES) if path.is_file() else None
        return self._texts[path]

    def _hash(self, path: Path) -> str:
        if path not in self._hashes:
            text = self._text(path) or ""
            self._hashes[path] = hashlib.sha256(text.encode(errors=_ANY_BYTES)).hexdigest()
        return self._hashes[path]
