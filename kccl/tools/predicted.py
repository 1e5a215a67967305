"""Implements `kccl plan --machine`: predicts the time of each algorithm on a recorded machine."""

import sys

from .. import topology
from ..base import env
from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.choice import Planner
from ..plan.spec import Request
from ..plan.specs import BY_NAME
from ..plan.tuning import told_of_machine, tuning_for
from ..topology.parts import Device, Link, figures
from .screen import fitted
from .topo import recorded

# Prefixes of the names of machines on which predicted token times were compared with records.
_COMPARED = ("h100-", "h200-")


def show(
    name: str, collective: str, nbytes: int, dtype: Dtype | None, world_size: int | None
) -> int:
    """Prints the algorithms by their predicted time on a recorded machine.

    Args:
        name: The machine's name.
        collective: The collective's name.
        nbytes: Bytes of the message.
        dtype: Its element type; None for a barrier.
        world_size: Number of ranks. None: all GPUs, but at most MOST_PREDICTED_RANKS.

    Raises:
        InvalidArgument: The machine is unknown, or the model cannot predict the call on it.
    """
    machine = recorded(name)
    ranks = _ranks(name, machine, world_size)
    if ranks > topology.MOST_PREDICTED_RANKS:
        from .scaling import show_chain

        return show_chain(name, machine, collective, nbytes, ranks, estimated(machine))
    names = [each for each in topology.PREDICTED if BY_NAME[each].collective == collective]
    if not names:
        predicted = {BY_NAME[each].collective for each in topology.PREDICTED}
        known = sorted(each for each in predicted if not each.startswith("grid"))
        raise InvalidArgument(f"--machine predicts {', '.join(known)} only, not {collective}")
    backend = "hip" if "AMD" in (topology.Graph(machine).gpus[0].name or "") else "cuda"
    request = Request(collective, nbytes, ranks, backend, dtype)
    reasons = {each: BY_NAME[each].why_not(request) for each in names}
    calls = [
        topology.Call(algorithm=each, nbytes=nbytes, world_size=ranks)
        for each, why in reasons.items()
        if why is None
    ]
    try:
        found = topology.ranked(machine, calls)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    size = "" if collective == "barrier" else f" of {nbytes:,} bytes"
    part = topology.PREDICTION_ERROR
    lines = [f"{collective}{size} over {ranks} ranks on {name}: a prediction, in a GPU graph"]
    for us, call in found:
        low, high = us * (1 - part), us * (1 + part)
        lines.append(f"  {call.algorithm}: {us:.2f} us ({low:.2f} to {high:.2f})")
    lines += [f"  not {each}: {why}" for each, why in reasons.items() if why is not None]
    plan = Planner(backend, ranks, env.read(), can_attach=True)(collective, nbytes, dtype)
    lines.append(f"KCCL takes {plan.name}: {plan.reason}.")
    of_table = tuning_for(backend, env.read().tuning).machine_of(ranks)
    if of_table:
        lines.append(told_of_machine(of_table, machine))
    lines.append(f"The constants are fitted to H200 GPUs; {part:.0%} is the error there.")
    lines += estimated(machine)
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return 0


def estimated(machine: topology.Machine) -> list[str]:
    """Returns a sentence for each estimate among the figures of the machine's devices and links."""
    parts: list[Device | Link] = [*machine.devices, *machine.links]
    used = {figure.source for part in parts for _, figure in figures(part)}
    weak = [each for each in machine.sources if each.kind == "estimated" and each.id in used]
    return [f"Estimated: {each.text}. The error may be larger." for each in weak]


def _ranks(name: str, machine: topology.Machine, world_size: int | None) -> int:
    """Returns the number of ranks of a prediction, from the -n that was given or None.

    Raises:
        InvalidArgument: The machine has no GPUs, or too few for `world_size`.
    """
    gpus = topology.Graph(machine).gpus
    if not gpus:
        raise InvalidArgument(f"{name} has no GPUs, and predictions are for GPUs")
    if world_size is not None and not 1 <= world_size <= len(gpus):
        raise InvalidArgument(
            f"{name}: there are {world_size} ranks, must be 1 to {len(gpus)}: a GPU each"
        )
    return min(len(gpus), topology.MOST_PREDICTED_RANKS) if world_size is None else world_size


def show_decode(name: str | None, model: str | None, position: int, world_size: int | None) -> int:
    """Prints the predicted time of a token, and what others published of the model.

    Args:
        name: The recorded machine's name.
        model: The name of the recorded shape.
        position: The token's position.
        world_size: Number of ranks. None: all GPUs, but at most MOST_PREDICTED_RANKS.

    Raises:
        InvalidArgument: An argument is missing or wrong, or the model cannot predict it.
    """
    shapes = topology.models()
    if name is None or model not in shapes:
        given = "" if model in shapes else f"; --model is {model!r}"
        raise InvalidArgument(f"decode needs --machine, and --model of {', '.join(shapes)}{given}")
    if position < 0:
        raise InvalidArgument(f"--position is {position}, must be 0 or more")
    machine, shape = recorded(name), shapes[model]
    ranks = _ranks(name, machine, world_size)
    try:
        us, bound = topology.predict_token(machine, shape, position, ranks)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    part = topology.DECODE_ERROR
    gigabytes = shape.bytes_per_token(position) / 1e9
    # Only dense models on these GPUs were compared with records. For others the error is unknown.
    is_compared = name.startswith(_COMPARED) and not shape.is_sparse
    told = "not compared with any record"
    if is_compared:
        told = f"{us * (1 - part):,.0f} to {us * (1 + part):,.0f}"
    lines = [
        f"decode of {model} at position {position:,} over {ranks} ranks on {name}: a prediction",
        f"  {1e6 / us:,.0f} tok/s ({us:,.0f} us a token, {told})",
        f"  bound {1e6 / bound:,.0f} tok/s: {gigabytes:.2f} GB a token from memory",
        f"Shape: {shape.source}.",
        f"The constants are fitted to dense models on H200 GPUs; {part:.0%} is the error there.",
        *estimated(machine),
        *(f"Published: {each}." for each in shape.published),
    ]
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return 0
