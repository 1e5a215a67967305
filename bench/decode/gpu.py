"""Collects the facts about GPUs for a document: their names, driver, clocks, power, temperature."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import kccl
from kccl.engine import Engine

# How often the engine reads its weights while nvidia-smi runs. The reads take longer than
# nvidia-smi, so that it sees the clocks of busy GPUs.
_READS = 8
# The timeout of nvidia-smi in seconds. After it the record has no clocks, but the bench goes on.
_ANSWER_S = 30
_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def gpu_facts(engine: Engine) -> dict[str, Any]:
    """Returns the facts about GPUs for a document; {} on CPUs. Collective.

    Clocks and power are read while the engine reads its weights again and again.
    """
    names = engine.devices()
    if not any(names):
        return {}
    return {
        "gpus": names,
        f"{kccl.gpu.backend()}_driver": kccl.gpu.driver_version(),
        "gpu_state": _state(engine),
    }


def _state(engine: Engine) -> list[dict[str, str]] | str:
    """Returns the state of each GPU that this process may use, or why it is not known."""
    if kccl.gpu.backend() != "cuda":
        return "clocks and power are read of NVIDIA's GPUs only"
    command = shutil.which("nvidia-smi")
    if command is None:
        return "nvidia-smi is not installed"
    query = f"--query-gpu=uuid,{','.join(_FIELDS)}"
    asked = subprocess.Popen(
        [command, query, "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for _ in range(_READS):
        engine.bandwidth()
    try:
        text, _ = asked.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return f"nvidia-smi did not answer within {_ANSWER_S} s"
    if asked.returncode != 0:
        return text.strip()
    return states(text, [kccl.gpu.device(each).uuid for each in range(kccl.gpu.num_devices())])


def states(text: str, uuids: Sequence[str]) -> list[dict[str, str]] | str:
    """Returns the fields that nvidia-smi printed for these GPUs, or why there are none.

    Args:
        text: The output of nvidia-smi: a line for each GPU of the machine, which begins with "GPU-"
            and the UUID.
        uuids: The UUIDs of the GPUs, 32 hexadecimal digits each.
    """
    known = {}
    for line in text.strip().splitlines():
        uuid, *values = (word.strip() for word in line.split(","))
        known[uuid] = dict(zip(_FIELDS, values, strict=True))
    found = [known.get(f"GPU-{UUID(uuid)}") for uuid in uuids]
    return [each for each in found if each is not None] or "nvidia-smi lists none of the GPUs"
