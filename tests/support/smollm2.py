"""Where the file of SmolLM2-135M-Instruct is, which tests do not fetch."""

import os
from pathlib import Path

import pytest

from kccl.engine.files import models


def find_smollm2():
    """The file in the user's cache or in that of the tests; skips the test if it is in neither."""
    own = os.environ.pop("KCCL_CACHE")
    try:
        files = [models.smollm2_file(), Path(own) / "models" / models.smollm2_file().name]
    finally:
        os.environ["KCCL_CACHE"] = own
    found = [file for file in files if file.exists()]
    if not found:
        pytest.skip(f"{files[0]} is not there: `kccl generate --model smollm2` fetches it")
    return found[0]
