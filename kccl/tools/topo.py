"""Implements `kccl topo`, which shows the devices and links of this or a recorded machine."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .. import topology
from ..base import env, errors, extras
from .screen import console, fitted, say

_JSON_HELP = "print one JSON document; tables go to stderr"
# The share of the probed CPUs that other programs may have.
_BUSY_SHARE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the command's parser."""
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure GPUs by kernels; without GPUs, core-to-core latencies",
    )
    parser.add_argument(
        "--cpus",
        type=int,
        metavar="N",
        help="probe at most N CPUs, spread over the machine, and no GPUs",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="F",
        help="draw GPUs and links; without GPUs the CPUs' latencies, which implies --probe",
    )
    parser.add_argument(
        "-n",
        type=int,
        metavar="N",
        help="place N ranks: a core each if there are so many, groups, the order of peers",
    )
    parser.add_argument(
        "--place",
        choices=topology.BLOCK_PATTERNS,
        metavar="PATTERN",
        help="place the blocks of a GPU's kernel: %(choices)s",
    )
    parser.add_argument("--lanes", type=int, metavar="L", help="lanes that the blocks serve (1)")
    parser.add_argument(
        "--layout",
        choices=topology.BLOCK_LAYOUTS,
        help="of -n (KCCL_LAYOUT) or --place (topology)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--machines", action="store_true", help="list the recorded machines")
    which.add_argument("--machine", metavar="NAME", help="show a recorded machine, not this one")
    which.add_argument(
        "--from",
        type=Path,
        dest="file",
        metavar="F",
        help="show the machine of a file: lstopo's XML, or the JSON of --json",
    )
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def main(args: argparse.Namespace) -> int:
    """Shows a machine, or the list of recorded machines.

    Raises:
        InvalidArgument: There is no such recorded machine, or a file cannot be written.
        BackendError: The machine cannot be probed.
    """
    tables = console(sys.stderr if args.json else sys.stdout)
    _check(args)
    if args.machines:
        found = topology.recorded()
        tables.print(topology.machines_table(found))
        if args.json:
            _print_json({name: machine.to_dict() for name, machine in found.items()})
        return 0
    is_here = args.machine is None and args.file is None
    if args.file is not None:
        machine = _read(args.file)
    elif args.machine is not None:
        machine = recorded(args.machine)
    else:
        machine = topology.with_gpus(topology.discover())
    if args.plot:
        draw(topology.check_plot, args.plot)
    is_probed = args.probe or (args.plot and not topology.Graph(machine).gpus)
    if args.cpus is not None and not (is_here and is_probed):
        raise errors.InvalidArgument("--cpus is for a probe of this machine's CPUs: add --probe")
    told: tuple[str, ...] = ()
    if is_here and is_probed:
        machine, told = _probed(machine, args.cpus)
    shown = [] if args.n is None else [_ranks(machine, args.n, args.layout or env.read().layout)]
    if args.place is not None:
        lanes = 1 if args.lanes is None else args.lanes
        shown.append(_blocks(machine, args.place, lanes, args.layout or "topology"))
    tables.print(topology.table(machine, topology.recorded()))
    for sentence in told:
        say(tables, sentence, "yellow", hanging=4)
    for text in shown:
        print(fitted(text, tables.file, hanging=4), file=tables.file)
    if args.plot:
        draw(partial(topology.plot, machine), args.plot)
    if args.json:
        _print_json(machine.to_dict())
    return 0


def _probed(
    machine: topology.Machine, cpus: int | None
) -> tuple[topology.Machine, tuple[str, ...]]:
    """Returns the machine with measurements of its GPUs, or of its CPUs if it has no GPUs or `cpus`
    is given; and remarks for the user.
    """
    from ..gpu import num_devices

    if cpus is None:
        reason = ""
        try:
            has_gpus = num_devices() > 0
        except errors.BackendError as error:
            has_gpus, reason = False, f": {error}"
        if has_gpus:
            from . import gpu_probe

            machine = gpu_probe.probed(machine)
            told = _ills(machine)
            left = num_devices() - gpu_probe.MOST_GPUS
            if left > 0:
                told.append(
                    f"{left} more GPUs are not probed, only the first {gpu_probe.MOST_GPUS}"
                )
            return machine, tuple(told)
        if topology.Graph(machine).gpus:
            raise errors.BackendError(
                f"this process cannot use the machine's GPUs{reason}. --cpus N probes CPUs instead"
            )
    from ..bench.harness.others import Others
    from .probe import probed

    most = len(machine.cpus) if cpus is None else cpus
    try:
        others = Others(lambda mine: [mine], topology.spread(machine, most))
    except OSError:
        others = None  # A container may hide /proc/stat.
    machine = probed(machine, cpus)
    told = _ills(machine)
    if others is not None and (share := others.share()) > _BUSY_SHARE:
        told.append(
            f"looks ill: other programs had {share:.0%} of these CPUs' time meanwhile, and the "
            "latencies may be too long: end them, and probe again"
        )
    return machine, tuple(told)


def _ills(machine: topology.Machine) -> list[str]:
    """Returns a sentence for each sign of a fault in a probed machine."""
    return [f"looks ill: {each}" for each in topology.complaints(machine, topology.recorded())]


def recorded(name: str) -> topology.Machine:
    """Returns the recorded machine of a name.

    Raises:
        InvalidArgument: No recorded machine has this name.
    """
    from ..bench.names import did_you_mean

    found = topology.recorded()
    if name not in found:
        raise errors.InvalidArgument(
            f"--machine is {name!r}, must be one of {', '.join(found)}{did_you_mean(name, found)}"
        )
    return found[name]


def _read(path: Path) -> topology.Machine:
    """Returns the machine that a file describes, as lstopo's XML or as JSON of `kccl topo`."""
    try:
        told = path.read_text("utf-8")
        is_xml = told.lstrip().startswith("<")
        return topology.from_hwloc(told) if is_xml else topology.Machine.from_json(told)
    except OSError as error:
        raise errors.InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise errors.InvalidArgument(
            f"{path} describes no machine: it is neither lstopo's XML nor JSON: {error}"
        ) from error
    except ValueError as error:
        raise errors.InvalidArgument(f"{path} describes no machine: {error}") from error


def _print_json(document: object) -> None:
    print(json.dumps(document, allow_nan=False), flush=True)


def _check(args: argparse.Namespace) -> None:
    """Refuses options that have no effect beside the other options.

    Raises:
        InvalidArgument: Such an option was given.
    """
    one = {"--plot": args.plot, "--cpus": args.cpus, "-n": args.n, "--place": args.place}
    one |= {"--probe": args.probe or None, "--lanes": args.lanes, "--layout": args.layout}
    given = [name for name, value in one.items() if value is not None]
    if args.machines and given:
        raise errors.InvalidArgument(
            f"{given[0]} is for one machine, and --machines lists them all: leave out one of both"
        )
    if args.probe and (args.machine is not None or args.file is not None):
        name = "--machine" if args.file is None else "--from"
        raise errors.InvalidArgument(f"--probe measures this machine: leave out {name}")
    if args.lanes is not None and args.place is None:
        raise errors.InvalidArgument("--lanes is for --place, which places blocks: add it")
    if args.layout is not None and args.place is None and args.n is None:
        raise errors.InvalidArgument("--layout is for -n or --place: add one of them")


def _ranks(machine: topology.Machine, world_size: int, layout: str) -> str:
    """Describes where `world_size` ranks are placed, as `kccl run --pin` places them.

    Ranks run on a machine's CPUs if its CPUs are known, and otherwise on its GPUs.
    """
    from ..backends.openers import most_ranks

    if layout not in topology.LAYOUTS:
        known = ", ".join(topology.LAYOUTS)
        raise errors.InvalidArgument(f"--layout is {layout!r}, must be one of {known} with -n")
    cpus = None
    most = most_ranks("host")
    if machine.cpus:
        allowed = set(machine.online_cpus if machine.allowed_cpus is None else machine.allowed_cpus)
        if 1 <= world_size <= len(allowed):
            chosen = topology.place_cores(machine, [allowed] * world_size, layout)
            cpus = [{cpu} for cpu in chosen]
    else:
        most = min(most, len(topology.Graph(machine).gpus)) or most
    if not 1 <= world_size <= most:
        raise errors.InvalidArgument(f"-n is {world_size}, must be 1 to {most}")
    where = cpus if cpus is not None or not machine.cpus else [set[int]()] * world_size
    found = topology.place(machine, world_size, where, layout)
    lines = [found.explain()]
    if machine.core_to_core_us is not None and cpus is not None and world_size > 1:
        other = next(each for each in topology.LAYOUTS if each != layout)
        there = [{cpu} for cpu in topology.place_cores(machine, [allowed] * world_size, other)]

        def predicted(name: str, on: list[set[int]]) -> str:
            placed = topology.place(machine, world_size, on, name)
            return f"{topology.predict_barrier(machine, placed, on):.2f} us"

        lines.append(
            f"  predicted for the words of a barrier: {predicted(layout, cpus)}. In the layout "
            f"{other!r} {predicted(other, there)} on the CPUs that it chooses, and "
            f"{predicted(other, cpus)} on those above"
        )
    return "\n".join(lines)


def _blocks(machine: topology.Machine, pattern: str, lanes: int, layout: str) -> str:
    """Describes where the blocks of a kernel on the first GPU are placed."""
    try:
        return topology.place_blocks(machine, pattern, lanes=lanes, layout=layout).explain()
    except ValueError as error:
        raise errors.InvalidArgument(f"--place: {error}") from error


def draw(draw: Callable[[Path], None], path: Path) -> None:
    """Calls `draw` with the path of a file to draw into, and turns its errors into KCCL's.

    Raises:
        InvalidArgument: The file cannot be written.
        BackendError: matplotlib is missing.
    """
    try:
        draw(path)
    except ImportError as error:
        raise errors.BackendError(
            f"--plot needs matplotlib ({error}): {extras.install('bench')}"
        ) from error
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise errors.InvalidArgument(f"cannot write {path}: {told}") from error
