"""What tests of the engine's kernels share."""

from pathlib import Path

import pytest
from kernel_copies import ABI

import kccl
from kccl.engine.monokernel.source import KERNELS


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """One folder with the library's headers and the kernels."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "kccl").symlink_to(Path(kccl.include_dir()) / "kccl")
    (tmp_path / "abi.inc").symlink_to(ABI)
    for path in KERNELS.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    return folder
