"""The libraries of the extra `engine`, loaded when first used."""

from importlib import import_module
from typing import Any

import kccl


def library(name: str) -> Any:
    """A module of a library that only the engine needs, as in "safetensors".

    Raises:
        kccl.Error: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise kccl.Error(
            f"the engine needs {name.split('.')[0]}, which cannot be imported ({error}): "
            f"{kccl.install_command('engine')}"
        ) from error
