"""Copies of the engine's kernels, for tests that change them."""

import shutil
from pathlib import Path

from kccl.engine.monokernel.source import KERNELS

# The kernels include it by its place beside their folder.
ABI = (KERNELS.parent / "abi.inc").resolve()


def copy_kernels(parent: Path) -> Path:
    """Copies the kernels, and abi.inc beside them; returns the kernels' folder."""
    folder = parent / "kernels"
    shutil.copytree(KERNELS, folder)
    shutil.copy(ABI, parent)
    return folder
