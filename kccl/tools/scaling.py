"""Prints predicted times of calls over more than 8 GPUs, on one machine or as a study of many."""

import sys
from functools import partial
from pathlib import Path

from .. import topology
from ..base.errors import InvalidArgument
from ..topology.tables import Titled
from .machines import estimated
from .screen import console, fitted
from .topo import draw

_NO_KERNEL = (
    "No chain of kernels on GPUs exists yet, and none has been measured: each step is taken to be "
    "a node of a GPU graph, and to write over the network as over NVLink."
)


def show_chain(
    name: str,
    machine: topology.Machine,
    collective: str,
    nbytes: int,
    world_size: int,
) -> int:
    """Prints the predicted steps of a call over more GPUs than one kernel can serve.

    Args:
        name: The recorded machine's name.
        machine: The machine.
        collective: The collective's name.
        nbytes: Bytes of the message.
        world_size: Number of ranks.

    Raises:
        InvalidArgument: The model cannot predict the call on it.
    """
    try:
        fabric = topology.fabric_of(machine)
        chain = topology.predict_chain(fabric, collective, nbytes, world_size)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    size = "" if collective == "barrier" else f" of {nbytes:,} bytes"
    used = {*fabric.near.sources, *(fabric.far.sources if fabric.far else ())}
    lines = [
        f"{collective}{size} over {world_size} ranks on {name}: a prediction, in a GPU graph",
        f"  {chain.us:.2f} us ({chain.low_us:.2f} to {chain.high_us:.2f})",
        *(f"  {line}" for line in chain.explain()),
        _NO_KERNEL,
        *estimated(machine, used),
    ]
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return 0


def show_study(nbytes: int, path: Path | None) -> int:
    """Prints the predicted times of all_reduce over 2 to 576 GPUs, and draws them.

    Args:
        nbytes: Bytes of the message; 0 for a barrier.
        path: File to draw into; None to draw nothing.

    Raises:
        InvalidArgument: The file cannot be written.
        BackendError: matplotlib is missing.
    """
    collective = "all_reduce" if nbytes else "barrier"
    title = f"all_reduce of {nbytes:,} bytes" if nbytes else "barrier"
    found = topology.study(collective, nbytes)
    if path is not None:
        draw(partial(topology.plot_scaling, found, title), path)
    columns = ["GPUs", *found]
    counts = sorted({count for chains in found.values() for count in chains})
    rows = [
        [str(count), *(_in_words(chains.get(count)) for chains in found.values())]
        for count in counts
    ]
    tables = console(sys.stdout)
    tables.print(Titled(f"{title}, us: a prediction", columns, rows, right=("GPUs",)))
    told = (
        "The times in brackets hold if each step takes 25 % less or more where records have such "
        "calls on such links, and 50 % less or more elsewhere. Constants are fitted to "
        "H200; the network's figures are estimates."
    )
    print(fitted(f"{told}\n{_NO_KERNEL}", sys.stdout, hanging=4))
    return 0


def _in_words(chain: topology.Chain | None) -> str:
    if chain is None:
        return ""
    return f"{chain.us:.1f} ({chain.low_us:.1f} to {chain.high_us:.1f})"
