"""Loads the libraries of the extras `engine` and `serve` when they are first used."""

from importlib import import_module
from typing import Any

import kccl


def library(name: str, extra: str = "engine") -> Any:
    """Imports and returns a module of a library that only the engine needs, for example
    "safetensors".

    Args:
        name: The module.
        extra: The extra that installs the library, for the error.

    Raises:
        kccl.Error: The library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise kccl.Error(
            f"the engine needs {name.split('.')[0]}, which cannot be imported ({error}): "
            f"{kccl.install_command(extra)}"
        ) from error
