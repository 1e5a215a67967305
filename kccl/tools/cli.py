"""The command `kccl`: what a person asks of the library from a shell.

Every command also works under `mpirun -n N`: there only rank 0 prints. What a command needs is
imported when it runs, so that `kccl --version` costs an interpreter and no more.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from .. import cmake_dir, include_dir
from ..base import errors, extras
from ..ranks import launchers
from . import streams
from .parser import USAGE_ERROR, Parser, complain
from .screen import console

DESCRIPTION = "Collectives for messages so small that latency is everything."
_FAILED = 1
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
        The exit code: 2 for a wrong argument and for any kccl.Error, 1 where standard output, the
        memory or a library fails; each is one line on stderr. 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    has_output = not streams.set_up()
    rank = 0
    is_table = False
    try:
        rank = launchers.rank_of(os.environ)
        with streams.silence(rank != 0):
            args, code = _parsed(arguments)
        command: Command | None = None if args is None else args.entry
        if not has_output and (command.has_output if command else code == 0):
            _complain(rank, "standard output is closed: redirect it, as in > /dev/null")
            return _FAILED
        if args is not None and command is not None and (rank == 0 or command.is_collective):
            is_table = command.run in _OF_TABLES
            code = command.run(args)
        sys.stdout.flush()
        return code
    except errors.Error as error:
        _complain(rank, str(error))
        return USAGE_ERROR
    except KeyboardInterrupt:
        if rank == 0 and sys.stderr.isatty():
            # Behind the terminal's ^C.
            print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        streams.drop_output()
        # Who reads a table may have had enough. Elsewhere the rest is missed.
        return 0 if is_table else _BROKEN_PIPE
    except MemoryError as error:
        _complain(rank, f"there is not enough memory{f': {error}' if str(error) else ''}")
        return _FAILED
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        _complain(rank, "cannot start a thread: raise ulimit -u or -v, or use fewer ranks")
        return _FAILED
    except ImportError as error:
        _complain(rank, extras.missing(error))
        return _FAILED
    except OSError as error:
        of_output = streams.of_output(error)
        if of_output is None:
            raise
        streams.drop_output()
        _complain(rank, str(of_output))
        return _FAILED


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace | None, int]:
    """The arguments, and 0; or None and the exit code, after help or a complaint."""
    try:
        return _parser(arguments).parse_args(arguments), 0
    except SystemExit as end:
        return None, int(end.code or 0)


def _complain(rank: int, message: str) -> None:
    complain(f"rank {rank}: {message}" if rank != 0 else message)


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        help: One line.
        add_arguments: Fills its parser.
        run: Does it, returns the exit code.
        is_collective: All ranks run it; else rank 0 alone.
        has_output: What it does is of no use without standard output.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    is_collective: bool = False
    has_output: bool = True


class _Version(argparse.Action):
    # Not argparse's own: that wants the version, and so a search of installed packages, always.
    def __call__(self, *_: object) -> NoReturn:
        from .. import __version__

        print(f"kccl {__version__}")
        raise SystemExit(0)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="kccl", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    named = next((word for word in arguments if not word.startswith("-")), "")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in _COMMANDS.items():
        if name == "bench" and list(arguments[:2]) == [name, "decode"]:
            command = _BENCH_DECODE
        one = commands.add_parser(
            name, prog=f"kccl {name}", help=command.help, description=command.help
        )
        one.set_defaults(entry=command, parser=one)
        # The arguments of a command may need imports that the others do without.
        if name == named:
            command.add_arguments(one)
    return parser


# ---- topo ------------------------------------------------------------------------------------


def _topo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe", action="store_true", help="measure core-to-core latencies")
    parser.add_argument(
        "--cpus", type=int, metavar="N", help="probe at most N CPUs, spread over the machine (all)"
    )
    parser.add_argument("--plot", type=Path, metavar="F", help="draw them; implies --probe")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def _topo(args: argparse.Namespace) -> int:
    from ..topology import check_plot, discover, plot, table

    machine = discover()
    if args.plot:
        _draw(check_plot, args.plot)
    if args.probe or args.plot:
        from .probe import probed

        machine = probed(machine, args.cpus)
    tables = sys.stderr if args.json else sys.stdout
    console(tables).print(table(machine))
    if args.plot:
        _draw(partial(plot, machine), args.plot)
    if args.json:
        print(json.dumps(machine.to_dict(), allow_nan=False), flush=True)
    return 0


def _draw(draw: Callable[[Path], None], path: Path) -> None:
    """Calls what draws into a file."""
    try:
        draw(path)
    except ImportError as error:
        raise errors.BackendError(
            f"--plot needs matplotlib ({error}): {extras.install('bench')}"
        ) from error
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise errors.InvalidArgument(f"cannot write {path}: {told}") from error


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
        seed = 0 if args.seed is None else args.seed
        codes = run_threads(lambda comm: cli.main(args, comm), world_size, backend="sim", seed=seed)
        return int(max(codes))
    with init(args.backend) as comm:
        return cli.main(args, comm)


def _bench_decode_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.decode import cli

    parser.prog = "kccl bench decode"
    parser.usage = f"{parser.prog} [options]"
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
            return USAGE_ERROR
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
    from . import plan

    plan.add_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    from . import plan

    return plan.main(args)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main(as_json=args.json)


def _warm_arguments(parser: argparse.ArgumentParser) -> None:
    from . import warm

    warm.add_arguments(parser)


def _warm(args: argparse.Namespace) -> int:
    from . import warm

    return warm.main(args)


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
    "run": Command(
        "start ranks without MPI", _run_arguments, _run, is_collective=True, has_output=False
    ),
    "plan": Command("which algorithm a call takes, and why", _plan_arguments, _plan),
    "doctor": Command("what runs on this machine, and what does not", _doctor_arguments, _doctor),
    "warm": Command("compile the kernels for GPUs ahead of time", _warm_arguments, _warm),
    "include-dir": Command("the folder for -I", lambda parser: None, _include_dir),
    "cmake-dir": Command("the folder for CMake's kccl_DIR", lambda parser: None, _cmake_dir),
}

if __name__ == "__main__":
    raise SystemExit(main())
