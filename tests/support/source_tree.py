"""The repository as text, for the tests of layers and names."""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
# Folders of the checkout that hold no source of ours.
_SKIPPED = {".git", "build", "dist", "out", "node_modules", "__pycache__"}

When = Literal["module", "function", "annotation"]


def source_files(folder: str, *suffixes: str) -> list[Path]:
    """Files under a folder of the repository, each once: symbolic links are not followed."""
    found = []
    for top, folders, names in os.walk(ROOT / folder):
        parent = Path(top)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED
            and not name.startswith(".")
            and not name.endswith(".egg-info")
            and not (parent / name).is_symlink()
        )
        found += [parent / name for name in sorted(names) if name.split(".")[-1] in suffixes]
    # cffi writes its translation unit beside setup.py when it builds in place.
    return [path for path in found if not path.name.startswith("kccl._")]


def python_files(folder: str) -> list[Path]:
    return source_files(folder, "py")


def replace_once(text: str, old: str, new: str, where: object) -> str:
    """A text with another in place of `old`, which occurs once. where: for the message."""
    assert text.count(old) == 1, f"{where} has changed: this is not there once: {old}"
    return text.replace(old, new)


def without_comments(path: Path) -> str:
    """C++ text without comments; strings stay."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


@cache
def include_graph() -> dict[Path, set[Path]]:
    """The repository's files that each file of csrc includes.

    A file that the build writes, as kernel_table.inc, is named as if it lay beside its reader.
    """
    return {
        path: {
            (path.parent / target).resolve()
            for target in re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE)
        }
        for path in source_files("csrc", "cuh", "h", "hpp", "inc", "cpp")
    }


@cache
def python_imports(path: Path) -> tuple[tuple[str, When], ...]:
    """What a file imports, as absolute names, and when it imports each."""
    parents = list(path.parent.relative_to(ROOT).parts)
    if parents and parents[0] in ("bench", "engine", "topology"):
        parents = ["kccl", *parents]

    def visit(node: ast.AST, when: When) -> Iterator[tuple[str, When]]:
        for child in ast.iter_child_nodes(node):
            now: When = when
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                now = "function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                now = "annotation"
            elif isinstance(child, ast.Import):
                yield from ((alias.name, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = parents[: len(parents) - child.level + 1] if child.level else []
                prefix = ".".join([*base, *(child.module or "").split(".")]).strip(".")
                if child.module is None or prefix == "kccl":
                    yield from ((f"{prefix}.{alias.name}", when) for alias in child.names)
                else:
                    yield prefix, when
            yield from visit(child, now)

    return tuple(visit(ast.parse(path.read_text()), "module"))


def identifiers(path: Path) -> set[str]:
    """Every identifier that occurs in a file; comments and strings do not count."""
    if path.suffix == ".py":
        tree = ast.parse(path.read_text())
        names: set[str] = set()
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    names.add(value)
        return names
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', "", without_comments(path))
    return set(re.findall(r"[A-Za-z_]\w*", text))
