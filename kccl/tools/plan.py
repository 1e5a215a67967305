"""Implements `kccl plan`, which shows the algorithm that a call takes, and why."""

import argparse
import sys
from functools import partial
from pathlib import Path

from .. import topology
from ..backends.openers import most_ranks
from ..base import abi, arguments, dtypes, env
from ..base.errors import InvalidArgument
from ..bench import names
from ..bench.harness.collective import parse_size
from ..plan import choice, spec, specs
from ..plan.grouped import GroupedPlanner
from ..plan.grouping import Grouping
from ..plan.tuning import discovered, told_of_machine, tuning_for
from .predicted import MESSAGE, show
from .screen import fitted

_POSITION = 512  # the default position of a token
# The options that apply to collectives, and those that apply to decode and scaling.
_OF_COLLECTIVES = ("bytes", "dtype", "n", "machine", "backend")
_TAKEN = {"decode": ("machine", "model", "position", "n", "plot"), "scaling": ("bytes", "plot")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    planned = sorted({each.collective for each in specs.SPECS})
    parser.add_argument(
        "collective",
        type=partial(_planned, among=planned),
        metavar="collective",
        help=f"{', '.join(planned)}; send_recv, with --machine; decode, for a token's time with "
        "--model; or scaling, for all_reduce over 2 to 576 GPUs, or a barrier without --bytes",
    )
    parser.add_argument(
        "--bytes", metavar="SIZE", help="message size, as in 8K (0); of scaling 0 is a barrier"
    )
    parser.add_argument("--dtype", type=names.dtype_name, help="element type (float32)")
    parser.add_argument(
        "-n", type=int, metavar="N", help="number of ranks (2; with --machine its GPUs)"
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="predict the times on a recorded machine of `kccl topo --machines`; decode without it "
        "compares them",
    )
    parser.add_argument("--model", metavar="M", help=f"of decode: {', '.join(topology.models())}")
    parser.add_argument("--position", type=int, metavar="P", help="of decode: the token's (512)")
    parser.add_argument(
        "--plot", type=Path, metavar="F", help="of scaling and decode: draw the prediction"
    )
    parser.add_argument(
        "--backend", choices=spec.EVERYWHERE, help="where they run (host; not with --machine)"
    )


def _planned(text: str, among: list[str]) -> str:
    """Returns the name of what is planned: a collective, send_recv, decode, or scaling."""
    if text in ("decode", "scaling", MESSAGE):
        return text
    return names.collective_name(text, among=among)


def _check(args: argparse.Namespace) -> None:
    """Refuses options that have no effect on what is planned.

    Raises:
        InvalidArgument: Such an option was given.
    """
    takes = _TAKEN.get(args.collective, _OF_COLLECTIVES)
    if args.machine is not None:
        takes = tuple(name for name in takes if name != "backend")
    options = dict.fromkeys((*_OF_COLLECTIVES, *sum(_TAKEN.values(), ())))
    wrong = [name for name in options if getattr(args, name) is not None and name not in takes]
    if wrong:
        what = args.collective + (" --machine" if "machine" in takes and args.machine else "")
        raise InvalidArgument(
            f"`kccl plan {what}` takes {', '.join(map(_flag, takes))}: leave out "
            f"{' and '.join(map(_flag, wrong))}"
        )


def _flag(name: str) -> str:
    return "-n" if name == "n" else f"--{name}"


def main(args: argparse.Namespace) -> int:
    """Prints the plan, in lines that fit a terminal's window.

    Raises:
        InvalidArgument: An argument is wrong.
    """
    _check(args)
    if args.collective == "decode":
        from .projected import show_decode

        position = _POSITION if args.position is None else args.position
        return show_decode(args.machine, args.model, position, args.n, args.plot)
    backend = args.backend or "host"
    most = most_ranks(backend)
    ranks = 2 if args.n is None else args.n
    if args.machine is None and not 1 <= ranks <= most:
        raise InvalidArgument(f"-n is {ranks}, must be 1 to {most} on backend {backend!r}")
    try:
        nbytes = parse_size(args.bytes or "0")
    except ValueError as error:
        raise InvalidArgument(f"--bytes: {error}") from error
    if args.collective == "scaling":
        from .scaling import show_study

        return show_study(nbytes, args.plot)
    if args.collective == "barrier" and nbytes:
        raise InvalidArgument(f"--bytes is {args.bytes}, must be 0: a barrier has no message")
    dtype = None if args.collective == "barrier" else dtypes.of(args.dtype or "float32")
    arguments.whole_elements("--bytes", nbytes, dtype)
    if args.machine is not None:
        return show(args.machine, args.collective, nbytes, dtype, args.n)
    if args.collective == MESSAGE:
        raise InvalidArgument(f"{MESSAGE} has one kernel, so nothing is planned: add --machine")
    variables = env.read()
    planner: choice.Planner | GroupedPlanner
    if ranks <= abi.MAX_WORLD_SIZE:
        planner = choice.Planner(backend, ranks, variables, can_attach=True)
    else:
        # Groups the ranks as kccl.init() groups ranks that are not pinned.
        groups = topology.groups(None, None, ranks, abi.MAX_WORLD_SIZE)
        planner = GroupedPlanner(backend, Grouping(groups), 0, variables)
    plan = planner(args.collective, nbytes, dtype)
    told = plan.explain()
    machine = tuning_for(backend, variables.tuning).machine_of(min(ranks, abi.MAX_WORLD_SIZE))
    if machine:
        told = f"{told}\n{told_of_machine(machine, discovered())}"
    print(fitted(told, sys.stdout, hanging=4))
    return 0
