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
from .machines import estimated, ranks_on
from .scaling import show_chain
from .screen import fitted
from .topo import recorded

MESSAGE = "send_recv"
"""What is predicted, but not planned: it has one kernel."""


def show(
    name: str, collective: str, nbytes: int, dtype: Dtype | None, world_size: int | None
) -> int:
    """Prints the algorithms by their predicted time on a recorded machine.

    Args:
        name: The machine's name.
        collective: The collective's name, or send_recv.
        nbytes: Bytes of the message.
        dtype: Its element type; None for a barrier.
        world_size: Number of ranks. None: all GPUs, but at most MOST_PREDICTED_RANKS; or 2 for
            send_recv.

    Raises:
        InvalidArgument: The machine is unknown, or the model cannot predict the call on it.
    """
    machine = recorded(name)
    is_message = collective == MESSAGE
    ranks = ranks_on(name, machine, 2 if is_message and world_size is None else world_size)
    if is_message and ranks < 2:
        raise InvalidArgument(f"{name}: there is 1 rank, must be 2 or more: a message has two ends")
    if ranks > topology.MOST_PREDICTED_RANKS:
        return show_chain(name, machine, collective, nbytes, ranks)
    names = [each for each in topology.PREDICTED if BY_NAME[each].collective == collective]
    backend = "hip" if "AMD" in (topology.Graph(machine).gpus[0].name or "") else "cuda"
    reasons: dict[str, str | None] = dict.fromkeys(names)
    if not is_message:
        request = Request(collective, nbytes, ranks, backend, dtype)
        reasons = {each: BY_NAME[each].why_not(request) for each in names}
    calls = [
        topology.Call(algorithm=each, nbytes=nbytes, world_size=ranks)
        for each, why in reasons.items()
        if why is None
    ]
    try:
        figures = topology.figures_of(machine, ranks)
        found = topology.ranked(machine, calls)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    size = "" if collective == "barrier" else f" of {nbytes:,} bytes"
    where = f"to the farthest of {ranks} GPUs" if is_message else f"over {ranks} ranks"
    lines = [f"{collective}{size} {where} on {name}: a prediction, in a GPU graph"]
    for us, call in found:
        part = topology.error_of(figures, call)
        low, high = us * (1 - part), us * (1 + part)
        lines.append(f"  {call.algorithm}: {us:.2f} us ({low:.2f} to {high:.2f})")
    lines += [f"  not {each}: {why}" for each, why in reasons.items() if why is not None]
    if not is_message:
        plan = Planner(backend, ranks, env.read(), can_attach=True)(collective, nbytes, dtype)
        lines.append(f"KCCL takes {plan.name}: {plan.reason}.")
        of_table = tuning_for(backend, env.read().tuning).machine_of(ranks)
        if of_table:
            lines.append(told_of_machine(of_table, machine))
    lines.append(_trust(collective, figures, calls))
    lines += estimated(machine, figures.sources)
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return 0


def _trust(collective: str, figures: topology.Figures, calls: list[topology.Call]) -> str:
    """Says how large the errors of predictions are, and why."""
    told = (
        f"The constants are fitted to H200 GPUs; 90 % of the recorded calls are within "
        f"{topology.PREDICTION_ERROR:.0%}."
    )
    assumed = f"{topology.UNMEASURED_ERROR:.0%} are assumed"
    recorded = [topology.is_recorded(call) for call in calls]
    if not figures.is_measured:
        alone = all(call.world_size == 1 for call in calls)
        missing = "latencies within this GPU" if alone else "latencies of this machine's links"
        told += f" But the {missing} have not been measured, so {assumed} here."
    elif not any(recorded):
        told += f" But no record has such calls of {collective} on GPUs, so {assumed} here."
    elif not all(recorded):
        told += f" Where no record has so many bytes and ranks, {assumed}."
    if collective == MESSAGE:
        told += (
            " Records have two H200, both ways at once. One of the constants is from the time of 8 "
            "bytes, and the others are predicted within 24 %. 256 KiB was measured with older code "
            "only, and took 24 % less than predicted (bench/LOG.md, 2026-11-30)."
        )
    return told
