"""Bugs that tests plant in copies of the engine's kernels, and that the simulator must find."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_copies import copy_kernels

import kccl
from kccl.engine.monokernel import launching


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str) -> None:
    """Changes a text that a kernels' file has once, in a copy of the kernels."""
    kernels = copy_kernels(folder)
    monkeypatch.setattr(launching, "KERNELS", kernels)
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    (kernels / name).write_text(text.replace(right, wrong))


def hunt(seeds: int, is_right: Callable[[int], bool]) -> None:
    """Fails if no seed shows the bug, by an error of KCCL or by wrong results."""
    for seed in range(seeds):
        try:
            if not is_right(seed):
                return
        except kccl.CompileError:
            raise
        except kccl.Error:
            return
    pytest.fail(f"{seeds} seeds did not show it")
