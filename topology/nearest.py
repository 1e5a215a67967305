"""Finds the recorded machine that is most similar to another one, and their differences."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .graph import Graph
from .model import Machine


def nearest(here: Machine, known: Mapping[str, Machine]) -> str:
    """Returns the name of the machine that differs least from `here`.

    It compares in this order: whether there are GPUs; their maker, model, links and number; and the
    host's architecture, CPU model, packages and cores.

    Raises:
        ValueError: No machine is known.
    """
    if not known:
        raise ValueError("no machine is known to compare with")
    return min(known, key=lambda name: (_distance(_facts(here), _facts(known[name])), name))


def differences(here: Machine, there: Machine) -> list[str]:
    """Returns a phrase for each fact in which a machine differs from a recorded one."""
    own, other = _facts(here), _facts(there)
    what = _OF_GPUS if other.get("GPUs") else _OF_HOSTS
    return [
        f"{name} {_word(own.get(name))} instead of {_word(other.get(name))}"
        for name in what
        if own.get(name) != other.get(name)
    ]


Facts = Mapping[str, str | int | None]
# The names of facts to compare. The most important come first.
_OF_GPUS = ("maker", "GPU", "links", "GPUs")
_OF_HOSTS = ("architecture", "CPU", "packages", "cores")


def _facts(machine: Machine) -> Facts:
    graph = Graph(machine)
    gpus = graph.gpus
    facts: dict[str, str | int | None] = {
        "GPUs": len(gpus),
        "architecture": machine.architecture,
        "CPU": machine.cpu_model,
        "packages": machine.num_packages,
        "cores": machine.num_cores,
    }
    if gpus:
        name = gpus[0].name
        kinds = {link.kind for gpu in gpus for _, link in graph.links_of(gpu.id)} - {"c2c"}
        best = next((kind for kind in ("nvlink", "xgmi", "pcie") if kind in kinds), None)
        facts |= {"maker": (name or "").split(" ")[0] or None, "GPU": name, "links": best}
    return facts


def _distance(one: Facts, other: Facts) -> tuple[float, ...]:
    """Returns the distance of two machines as a tuple, with the most important fact first."""
    parts: list[float] = [bool(one.get("GPUs")) != bool(other.get("GPUs"))]
    for name in (*_OF_GPUS, *_OF_HOSTS):
        a, b = one.get(name), other.get(name)
        if isinstance(a, int) and isinstance(b, int) and a and b:
            parts.append(abs(math.log2(a / b)))
        else:
            parts.append(float(a != b))
    return tuple(parts)


def _word(value: str | int | None) -> str:
    return "unknown" if value is None else str(value)
