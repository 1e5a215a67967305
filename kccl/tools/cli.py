"""The command `kccl`: what a person asks of the library from a shell.

Every command also works under `mpirun -n N`: there only rank 0 prints. What a command needs is
imported when it runs, so that `kccl --version` costs an interpreter and no more.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from .. import cmake_dir, include_dir
from ..base import errors
from ..ranks import launchers

_USAGE_ERROR = 2
# As a shell says of a command that signal 2 or 13 ended.
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_SIM_RANKS = 2
_JSON_HELP = "print one JSON document; tables go to stderr"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; the process's own when None.

    Returns:
        The exit code: 2 for a wrong argument and for any kccl.Error, which is one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank = 0
    is_table = False
    try:
        rank = launchers.rank_of(os.environ)
        with _silence(rank != 0):
            args = _parser(arguments).parse_args(arguments)
            command: Command = args.entry
            is_table = command.run in _OF_TABLES
            if rank != 0 and not command.is_collective:
                return 0
        return command.run(args)
    except SystemExit as end:  # argparse, after help or a complaint
        return int(end.code or 0)
    except errors.Error as error:
        where = f"rank {rank}: " if rank != 0 else ""
        print(f"kccl: {where}{error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Who reads a table may have had enough. Elsewhere the rest is missed.
        return 0 if is_table else _BROKEN_PIPE


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        help: One line.
        add_arguments: Fills its parser.
        run: Does it, returns the exit code.
        is_collective: All ranks run it; else rank 0 alone.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    is_collective: bool = False


class _Version(argparse.Action):
    # Not argparse's own: that wants the version, and so a search of installed packages, always.
    def __call__(self, *_: object) -> NoReturn:
        from .. import __version__

        print(f"kccl {__version__}")
        raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"kccl: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(_USAGE_ERROR)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="kccl", description="Collectives whose latency is everything.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    named = next((word for word in arguments if not word.startswith("-")), "")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in _COMMANDS.items():
        if name == "bench" and list(arguments[:2]) == [name, "decode"]:
            command = _BENCH_DECODE
        one = commands.add_parser(name, help=command.help, description=command.help)
        one.set_defaults(entry=command)
        # The arguments of a command may need imports that the others do without.
        if name == named:
            command.add_arguments(one)
    return parser


@contextmanager
def _silence(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


# ---- topo ------------------------------------------------------------------------------------


def _topo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe", action="store_true", help="measure core-to-core latencies")
    parser.add_argument(
        "--cpus", type=int, metavar="N", help="probe at most N CPUs, spread over the machine (all)"
    )
    parser.add_argument("--plot", type=Path, metavar="F", help="draw them; implies --probe")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def _topo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..topology import discover, plot, table

    machine = discover()
    if args.probe or args.plot:
        from .probe import probed

        machine = probed(machine, args.cpus)
    tables = sys.stderr if args.json else sys.stdout
    Console(file=tables, highlight=False, markup=False, soft_wrap=True).print(table(machine))
    if args.plot:
        try:
            plot(machine, args.plot)
        except ImportError as error:
            raise errors.BackendError(
                f"--plot needs matplotlib ({error}): pip install 'kccl[bench]'"
            ) from error
        except (OSError, ValueError) as error:
            raise errors.InvalidArgument(f"cannot write {args.plot}: {error}") from error
    if args.json:
        print(json.dumps(machine.to_dict(), allow_nan=False), flush=True)
    return 0


# ---- bench -----------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench import cli

    cli.add_arguments(parser)


def _bench(args: argparse.Namespace) -> int:
    from ..bench import cli
    from ..start import init, run_threads

    if args.compare is not None:
        return cli.compare(args) if launchers.rank_of(os.environ) == 0 else 0
    if args.backend == "sim":
        launcher = launchers.launcher_of_several(os.environ)
        if launcher:
            raise errors.InvalidArgument(
                "--backend sim runs all ranks in one process: leave out "
                f"{launcher}, and give --ranks"
            )
        world_size = args.ranks or _SIM_RANKS
        codes = run_threads(
            lambda comm: cli.main(args, comm), world_size, backend="sim", seed=args.seed
        )
        return int(max(codes))
    with init(args.backend) as comm:
        return cli.main(args, comm)


def _bench_decode_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.decode import cli

    parser.usage = "kccl bench decode [options]"
    cli.add_arguments(parser)


def _bench_decode(args: argparse.Namespace) -> int:
    from ..bench.decode import cli

    return cli.main(args)


# ---- run -------------------------------------------------------------------------------------


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kccl run -n N [options] -- command ..."
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="S", help="end all ranks after S seconds")
    parser.add_argument(
        "--kill-on-error", action="store_true", help="when a rank fails, end the others"
    )
    parser.add_argument("--pin", action="store_true", help="pin rank i to the i-th allowed core")
    parser.add_argument("--label", action="store_true", help="put the rank before each line")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every rank runs")
    parser.epilog = (
        "The exit code is that of the first rank that failed, and 128 + s after signal s. Without "
        "--kill-on-error the other ranks go on."
    )


def _run(args: argparse.Namespace) -> int:
    from . import run

    launcher = launchers.launcher_of_several(os.environ)
    if launcher:
        if launchers.rank_of(os.environ) != 0:
            return _USAGE_ERROR
        raise errors.InvalidArgument(
            f"kccl run starts the ranks itself: leave out either {launcher} or kccl run"
        )
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return run.run(
        command,
        args.n,
        timeout=args.timeout,
        kills_on_error=args.kill_on_error,
        pins=args.pin,
        labels=args.label,
    )


# ---- generate --------------------------------------------------------------------------------


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    from ..engine import generate

    generate.add_arguments(parser)


def _generate(args: argparse.Namespace) -> int:
    from ..engine import generate

    return generate.main(args)


# ---- plan, doctor, warm, include-dir, cmake-dir ----------------------------------------------


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench import names
    from ..plan import specs

    planned = sorted({spec.collective for spec in specs.SPECS})
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
        "--backend", choices=specs.EVERYWHERE, default="host", help="where they run (host)"
    )


def _plan(args: argparse.Namespace) -> int:
    from ..base import abi, arguments, dtypes, env
    from ..bench.harness.collective import parse_size
    from ..plan import choice, specs, tuning

    if not 1 <= args.n <= abi.MAX_WORLD_SIZE:
        raise errors.InvalidArgument(f"-n is {args.n}, must be 1 to {abi.MAX_WORLD_SIZE}")
    try:
        nbytes = parse_size(args.bytes)
    except ValueError as error:
        raise errors.InvalidArgument(f"--bytes: {error}") from error
    dtype = None if args.collective == "barrier" else dtypes.of(args.dtype)
    arguments.whole_elements("--bytes", nbytes, dtype)
    variables = env.read()
    request = specs.Request(args.collective, nbytes, args.n, args.backend, dtype)
    table = tuning.tuning_for(args.backend, variables.tuning)
    print(choice.choose(request, table, preferred=variables.algorithm).explain())
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main(as_json=args.json)


def _warm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=int, nargs="+", required=True, metavar="N", help="numbers of ranks, as in 2 4"
    )
    parser.add_argument("-d", nargs="+", metavar="TYPE", help="element types (all)")
    parser.add_argument("--op", nargs="+", metavar="OP", help="operators (all)")
    parser.add_argument("--arch", default="", help="as in sm_90a (that of the first GPU here)")
    parser.epilog = (
        "They are found by programs with the same KCCL_CACHE, the same KCCL in the same folder, "
        "and the same NVRTC."
    )


def _warm(args: argparse.Namespace) -> int:
    from ..base import abi, dtypes
    from ..gpu import driver
    from ..jit import cache
    from ..plan import specs
    from . import warm

    for count in args.n:
        if not 1 <= count <= abi.MAX_WORLD_SIZE:
            raise errors.InvalidArgument(f"-n is {count}, must be 1 to {abi.MAX_WORLD_SIZE}")
    for op in args.op or ():
        if op not in specs.OPS:
            raise errors.InvalidArgument(f"--op is {op!r}, must be one of {', '.join(specs.OPS)}")
    types = [dtypes.of(name).name for name in args.d or warm.ELEMENT_TYPES]
    wanted = warm.instances(args.n, types, args.op or specs.OPS)
    try:
        arch = args.arch or driver.device(0).arch
    except errors.BackendError as error:
        raise errors.BackendError(f"{error}; or name the architecture: --arch sm_90a") from error
    print(f"{len(wanted)} kernels for {arch} in {cache.cache_folder()}", flush=True)
    began = time.monotonic()
    warm.warm(wanted, arch)
    print(f"{time.monotonic() - began:.1f} s")
    return 0


def _include_dir(args: argparse.Namespace) -> int:
    print(include_dir())
    return 0


def _cmake_dir(args: argparse.Namespace) -> int:
    print(cmake_dir())
    return 0


_BENCH_DECODE = Command(
    "measure how fast the engine decodes",
    _bench_decode_arguments,
    _bench_decode,
    is_collective=True,
)
_OF_TABLES = (_topo, _bench, _bench_decode, _plan, _doctor)
_COMMANDS = {
    "topo": Command("what this machine is made of", _topo_arguments, _topo),
    "bench": Command(
        "measure a collective, or decoding", _bench_arguments, _bench, is_collective=True
    ),
    "generate": Command(
        "generate text with a model", _generate_arguments, _generate, is_collective=True
    ),
    "run": Command("start ranks without MPI", _run_arguments, _run, is_collective=True),
    "plan": Command("which algorithm a call takes, and why", _plan_arguments, _plan),
    "doctor": Command("what runs on this machine, and what does not", _doctor_arguments, _doctor),
    "warm": Command("compile the kernels for GPUs ahead of time", _warm_arguments, _warm),
    "include-dir": Command("the folder for -I", lambda parser: None, _include_dir),
    "cmake-dir": Command("the folder for CMake's kccl_DIR", lambda parser: None, _cmake_dir),
}

if __name__ == "__main__":
    raise SystemExit(main())
