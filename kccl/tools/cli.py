"""The command `kccl`.

Every command also works under `mpirun -n N`, where only rank 0 prints. A command imports what it
needs when it runs, so that `kccl --version` takes no longer than to start Python.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from .. import cmake_dir, include_dir
from ..base import errors, extras
from ..ranks import launchers
from . import streams
from .complaints import Complaints
from .parser import USAGE_ERROR, Parser

DESCRIPTION = "Collectives for messages so small that latency is everything."
_FAILED = 1
# 128 + s, a shell's exit code of a command that was ended by signal s: SIGINT and SIGPIPE.
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_SIM_RANKS = 2
_JSON_HELP = "print one JSON document; tables go to stderr"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; the process's own when None.

    Returns:
        The exit code. 2 for a wrong argument and for any kccl.Error; 1 if standard output cannot be
        written, memory runs out or a package is missing. In these cases one line is printed on
        stderr. 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    has_output = not streams.set_up()
    complaints = Complaints()
    try:
        code, complaint = _outcome(arguments, has_output, complaints)
        complaints.say(complaint)
        return code
    except KeyboardInterrupt:
        if launchers.rank_of(os.environ) == 0 and sys.stderr.isatty():
            # Ends the line on which the terminal has printed ^C.
            print(file=sys.stderr)
        return _INTERRUPTED
    finally:
        complaints.close()


def _outcome(
    arguments: Sequence[str], has_output: bool, complaints: Complaints
) -> tuple[int, str | None]:
    """Runs the command that the arguments name.

    Returns:
        The exit code, and this rank's error message or None.
    """
    is_table = False
    try:
        rank = launchers.rank_of(os.environ)
        with streams.silence(rank != 0):
            args, code = _parsed(arguments)
        command: Command | None = None if args is None else args.entry
        if not has_output and (command.has_output if command else code == 0):
            return _FAILED, "standard output is closed: redirect it, as in > /dev/null"
        if args is not None and command is not None and (rank == 0 or command.is_collective):
            is_table = command.run in _OF_TABLES
            if command.is_collective and command.run is not _run:
                complaints.meet(rank)
            code = command.run(args)
        sys.stdout.flush()
        return code, None
    except errors.Error as error:
        return USAGE_ERROR, str(error)
    except BrokenPipeError:
        streams.drop_output()
        # The reader has left early, as `head` does. That is no error if the output is a table.
        return 0 if is_table else _BROKEN_PIPE, None
    except MemoryError as error:
        return _FAILED, f"there is not enough memory{f': {error}' if str(error) else ''}"
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        return _FAILED, "cannot start a thread: raise ulimit -u or -v, or use fewer ranks"
    except ImportError as error:
        return _FAILED, extras.missing(error)
    except OSError as error:
        of_output = streams.of_output(error)
        if of_output is None:
            raise
        streams.drop_output()
        return _FAILED, str(of_output)


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace | None, int]:
    """Returns the parsed arguments and 0, or None and the exit code after help or an error."""
    try:
        args = _parser(arguments).parse_args(arguments)
        launcher = launchers.name_of(os.environ)
        if getattr(args, "backend", None) == "sim" and args.entry.is_collective and launcher:
            args.parser.error(f"--backend sim runs all ranks in one process: leave out {launcher}")
        return args, 0
    except SystemExit as end:
        return None, int(end.code or 0)


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        help: One line of help.
        add_arguments: Adds the command's arguments to its parser.
        run: Runs the command and returns the exit code.
        is_collective: Whether all ranks run it, and not rank 0 alone.
        has_output: Whether it is useless, so refused, if standard output is closed.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    is_collective: bool = False
    has_output: bool = True


class _Version(argparse.Action):
    # argparse's own action takes the version when the parser is made. Then every command would
    # search the installed packages for it.
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
        # Fills only the parser of the command that is named: the arguments of others may need
        # imports that take long.
        if name == named:
            command.add_arguments(one)
    return parser


# ---- bench -----------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench import cli

    cli.add_arguments(parser)


def _bench(args: argparse.Namespace) -> int:
    from ..bench import cli
    from ..bench.harness.interrupts import Interrupts
    from ..start import init, run_threads

    if args.compare is not None:
        return cli.compare(args) if launchers.rank_of(os.environ) == 0 else 0
    if args.backend == "sim":
        world_size = args.ranks or _SIM_RANKS
        seed = 0 if args.seed is None else args.seed
        with Interrupts():
            codes = run_threads(lambda comm: cli.main(args, comm), world_size, "sim", seed=seed)
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
    parser.add_argument(
        "--pin", action="store_true", help="pin each rank to an allowed core, near the others"
    )
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


# ---- generate, chat, serve -------------------------------------------------------------------


def _of_module(path: str, told: str, **facts: Any) -> Command:
    """Returns a command whose code is in module kccl.`path`, which is imported when it is used.

    `told` is its help, and `facts` are other attributes of Command.
    """

    def module() -> Any:
        return import_module(f"kccl.{path}")

    return Command(
        told,
        lambda parser: module().add_arguments(parser),
        lambda args: module().main(args),
        **facts,
    )


_of_engine = partial(_of_module, is_collective=True)


# ---- plan, doctor, warm, include-dir, cmake-dir ----------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main(as_json=args.json)


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
_PLAN = _of_module("tools.plan", "which algorithm a call takes, and why")
_TOPO = _of_module("tools.topo", "what this machine is made of")
_OF_TABLES = (_TOPO.run, _bench, _bench_decode, _PLAN.run, _doctor)
_COMMANDS = {
    "topo": _TOPO,
    "bench": Command(
        "measure a collective, or decoding", _bench_arguments, _bench, is_collective=True
    ),
    "generate": _of_engine("engine.generate", "generate text with a model"),
    "chat": _of_engine("engine.chat", "talk with a chat model"),
    "serve": _of_engine(
        "engine.serve", "answer requests of OpenAI's API, and show a page", has_output=False
    ),
    "quantize": _of_module(
        "engine.commands.quantize", "write a model with 8 or 4 bits a weight", has_output=False
    ),
    "drafts": _of_module(
        "engine.commands.drafts",
        "make a table of n-grams, from which drafts come",
        has_output=False,
    ),
    "run": Command(
        "start ranks without MPI", _run_arguments, _run, is_collective=True, has_output=False
    ),
    "plan": _PLAN,
    "doctor": Command("what runs on this machine, and what does not", _doctor_arguments, _doctor),
    "warm": _of_module("tools.warm", "compile the kernels for GPUs ahead of time"),
    "include-dir": Command("the folder for -I", lambda parser: None, _include_dir),
    "cmake-dir": Command("the folder for CMake's kccl_DIR", lambda parser: None, _cmake_dir),
}

if __name__ == "__main__":
    raise SystemExit(main())
