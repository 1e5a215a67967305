"""`kccl plan`: which algorithm a call takes, and why."""

import argparse
import sys
from functools import partial

from ..base import abi, arguments, dtypes, env
from ..base.errors import InvalidArgument
from ..bench import names
from ..bench.harness.collective import parse_size
from ..plan import choice, spec, specs, tuning
from .screen import fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    planned = sorted({each.collective for each in specs.SPECS})
    parser.add_argument(
        "collective",
        type=partial(names.collective_name, among=planned),
        metavar="collective",
        help=", ".join(planned),
    )
    parser.add_argument("--bytes", default="0", metavar="SIZE", help="message size, as in 8K (0)")
    parser.add_argument(
        "--dtype", type=names.dtype_name, default="float32", help="element type (float32)"
    )
    parser.add_argument("-n", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument(
        "--backend", choices=spec.EVERYWHERE, default="host", help="where they run (host)"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the plan, in lines that fit a terminal's window.

    Raises:
        InvalidArgument: An argument is wrong.
    """
    if not 1 <= args.n <= abi.MAX_WORLD_SIZE:
        raise InvalidArgument(f"-n is {args.n}, must be 1 to {abi.MAX_WORLD_SIZE}")
    try:
        nbytes = parse_size(args.bytes)
    except ValueError as error:
        raise InvalidArgument(f"--bytes: {error}") from error
    if args.collective == "barrier" and nbytes:
        raise InvalidArgument(f"--bytes is {args.bytes}, must be 0: a barrier has no message")
    dtype = None if args.collective == "barrier" else dtypes.of(args.dtype)
    arguments.whole_elements("--bytes", nbytes, dtype)
    variables = env.read()
    request = spec.Request(args.collective, nbytes, args.n, args.backend, dtype)
    table = tuning.tuning_for(args.backend, variables.tuning)
    plan = choice.choose(request, table, preferred=variables.algorithm)
    print(fitted(plan.explain(), sys.stdout, hanging=4))
    return 0
