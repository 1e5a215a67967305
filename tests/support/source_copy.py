"""A copy of the checkout, in which a test may build."""

import re
import shutil
from pathlib import Path

from source_tree import ROOT, replace_once

_NOT_SOURCE = (".*", "build", "dist", "out", "*.egg-info", "*.so", "__pycache__", "kccl._*.cpp")


def copy_source(folder: Path) -> None:
    """Copies the checkout's sources, without what was built from them, into a new folder."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))


def copy_objects(folder: Path) -> None:
    """Gives a copy the checkout's objects, so that only what a test changes is compiled anew."""
    for built in ("objects", "generated"):
        shutil.copytree(ROOT / "build" / built, folder / "build" / built)


def keep_one_type(folder: Path) -> None:
    """Leaves float32 as a copy's only element type, and a sum as its only operator with kernels of
    its own. They compile in a twentieth of the time.
    """
    dtypes = folder / "kccl/base/dtypes.py"
    text = dtypes.read_text()
    one = re.sub(r"^ALL = \([^)]*\)", "ALL = (float32,)", text, flags=re.MULTILINE)
    assert one != text
    dtypes.write_text(one)
    table = folder / "kccl/csrc/host/kernel_table.py"
    right = 'for op in ("sum", "prod", "min", "max", "avg")'
    table.write_text(replace_once(table.read_text(), right, 'for op in ("sum",)', table.name))


def do_not_optimise(folder: Path) -> None:
    """Lets a copy compile without optimisation what has to be compiled."""
    setup = folder / "setup.py"
    right = "compile_one(obj, src, ext, *args)"
    quick = 'compile_one(obj, src, ext, cc_args, [*flags, "-O0"], pp_opts)'
    text = replace_once(setup.read_text(), right, quick, "setup.py")
    # A precompiled header is for files with its own flags.
    setup.write_text(replace_once(text, "if not is_zig and f", "if False and f", "setup.py"))
