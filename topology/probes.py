"""Measures latencies between CPUs by a ping-pong that the caller passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations
from statistics import median

from .model import Machine

MIN_SAMPLES = 5
"""Fewest ping-pongs of a pair that give a useful median."""


def core_to_core(
    machine: Machine,
    ping_pong: Callable[[int, int], float],
    cpus: Iterable[int] | None = None,
    *,
    num_samples: int = MIN_SAMPLES,
    on_progress: Callable[[int, int], None] | None = None,
) -> Machine:
    """Measure the one-way latency of every ordered pair of logical CPUs.

    Args:
        machine: The machine this process runs on.
        ping_pong: `ping_pong(cpu_a, cpu_b)` returns the one-way latency in microseconds of a
            message from `cpu_a` to `cpu_b`. It pins its own threads, and averages over as many
            rounds as its clock needs.
        cpus: Ids of the logical CPUs to measure. Default: the online CPUs in the affinity mask.
        num_samples: Calls for each ordered pair, at least `MIN_SAMPLES`. The median is kept.
        on_progress: Called after each `ping_pong` as `on_progress(calls_done, calls_in_all)`.

    Returns:
        The machine with `core_to_core_us` set. It is None for pairs that are not in `cpus`.

    Raises:
        ValueError: `cpus` names a CPU twice, one that is not online or not allowed, or fewer
            than two; `num_samples` is too small; or `ping_pong` returned no positive number.
    """
    if num_samples < MIN_SAMPLES:
        raise ValueError(f"num_samples is {num_samples}, must be at least {MIN_SAMPLES}")
    chosen = _usable(machine) if cpus is None else _checked(machine, cpus)
    if len(chosen) < 2:
        raise ValueError(f"core-to-core latency needs two CPUs, got {len(chosen)}")

    pairs = list(permutations(chosen, 2))
    samples: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    # Measures all pairs in each round, and not one pair after another. So a burst of noise spoils
    # one sample of many pairs, which their medians tolerate, and not all samples of one pair.
    for num_rounds in range(num_samples):
        for num_pairs, pair in enumerate(pairs, start=1):
            latency_us = float(ping_pong(*pair))
            if not (math.isfinite(latency_us) and latency_us > 0):
                raise ValueError(f"ping_pong{pair} returned {latency_us} microseconds")
            samples[pair].append(latency_us)
            if on_progress is not None:
                on_progress(num_rounds * len(pairs) + num_pairs, num_samples * len(pairs))

    # Rounded to picoseconds: further digits are noise, and people read the records.
    medians = {pair: round(median(values), 6) for pair, values in samples.items()}
    ids = machine.online_cpus
    return replace(
        machine, core_to_core_us=tuple(tuple(medians.get((a, b)) for b in ids) for a in ids)
    )


def spread(machine: Machine, most: int) -> tuple[int, ...]:
    """Return at most `most` of the CPUs that core_to_core() measures, evenly spread by id."""
    usable = _usable(machine)
    count = max(0, min(most, len(usable)))
    return tuple(usable[i * len(usable) // count] for i in range(count))


def _usable(machine: Machine) -> tuple[int, ...]:
    if machine.allowed_cpus is None:
        return machine.online_cpus
    return tuple(cpu for cpu in machine.online_cpus if cpu in machine.allowed_cpus)


def _checked(machine: Machine, cpus: Iterable[int]) -> tuple[int, ...]:
    chosen = tuple(cpus)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"cpus names a CPU twice: {chosen}")
    for cpu in chosen:
        if cpu not in machine.online_cpus:
            raise ValueError(f"CPU {cpu} is not online; online are {machine.online_cpus}")
        if machine.allowed_cpus is not None and cpu not in machine.allowed_cpus:
            raise ValueError(
                f"CPU {cpu} is outside the affinity mask; allowed are {machine.allowed_cpus}"
            )
    return chosen
