"""Programs that tests keep as text import only modules and names that exist.

Many of them run on GPUs only, where a stale import would be found late.
"""

import re
from importlib import import_module

from source_tree import ROOT, python_files

IMPORT = re.compile(
    r"^[ \"]*(?:from (kccl[\w.]*) import ([\w, ]+)|import (kccl[\w.]*))", re.MULTILINE
)


def has(module, name):
    """Whether a module has a name or a submodule; True where a big library is missing."""
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        return not error.name.startswith("kccl")


# A recipe makes it, in a copy of the tree.
MADE = {"kccl.engine.formats.swapped"}


def test_imports_of_kccl_exist():
    stale = []
    for path in python_files("tests"):
        for module, names, whole in IMPORT.findall(path.read_text()):
            wanted = re.split(r"[, ]+", re.sub(r" as \w+", "", names).strip(", "))
            if whole:
                module, _, name = whole.rpartition(".")
                wanted = [name]
            asked = wanted if module and module not in MADE else []
            missing = [name for name in asked if not has(module, name)]
            stale += [f"{path.relative_to(ROOT)}: {module}.{name}" for name in missing]
    assert stale == []
