"""Checks that a model fits into memory before it is read."""

import kccl

from ..model.bounds import kv_bytes
from ..model.config import ModelConfig

_MIB, _GIB = 1 << 20, 1 << 30


def check_memory(
    comm: kccl.Communicator,
    weights: list[int],
    mine: list[int],
    config: ModelConfig,
    context: int,
    slots: int = 1,
    mapped: int = 0,
) -> None:
    """Checks that the memory which the ranks will use on this host fits into what the machine, the
    job's cgroup and the process limits leave. Collective: all ranks raise, or none.

    Args:
        comm: The communicator of all ranks.
        weights: The bytes of each rank's packed weights.
        mine: The ranks that are in this process.
        config: The model's configuration.
        context: The positions of a slot of the KV cache, whose keys and values are FP32.
        slots: The number of slots of the KV cache.
        mapped: The bytes of the largest file, which is mapped while it is read.

    Raises:
        kccl.Error: The model does not fit.
    """
    cache = slots * kv_bytes(config, context - 1, 4) if context else 0
    everyone = sum(weights) + cache
    of_process = sum(weights[rank] for rank in mine) + cache * len(mine) // len(weights)
    shortages = comm.gather_objects(_shortage(everyone, of_process, cache, mapped))
    told = next(filter(None, shortages), None)
    if told:
        raise kccl.Error(told)


def _shortage(everyone: int, of_process: int, cache: int, mapped: int) -> str:
    for room in kccl.memory_room(everyone + mapped):
        needed = of_process if room.is_of_process else everyone
        more = ""
        if room.counts_mapped and mapped:
            needed += mapped
            more = f"and {_shown(mapped)} for its largest file while that is read, "
        if needed > room.free:
            taken = (
                f", {_shown(room.promised)} of it promised to windows that nobody has written yet"
                if room.promised >= _MIB
                else ""
            )
            return (
                f"the model needs {_shown(needed)} of memory, {_shown(cache)} of it for the "
                f"context, {more}and {room.limit} has {_shown(room.nbytes)} left{taken}: "
                f"{room.cure}, or use a smaller context or model"
            )
    return ""


def _shown(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"
