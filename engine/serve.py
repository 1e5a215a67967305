"""The command `kccl serve`: an HTTP server for OpenAI's API and a web page, with one engine."""

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import kccl

from .api import Engine
from .commands import screen
from .commands.options import add_engine_arguments, ngrams_in
from .commands.processes import Processes, Restarter, measured
from .executors.requests import integer
from .serving.sessions import Sessions

__all__ = ["add_arguments", "main"]

_PREFIXES = 4
# No more than _PREFIXES, so that the KV cache is not larger for them.
_SLOTS = 4
_QUEUE = 256
_MOST_CONNECTIONS = 512
# The most connections that the operating system queues until the server accepts them: listen()'s
# backlog.
_BACKLOG = 2048
# After SIGTERM, requests in progress have _DRAIN_S seconds to end. A connection that has had no
# request for _KEEP_S seconds is closed.
_DRAIN_S, _KEEP_S = 30, 15
_ORIGIN = re.compile(r"(https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?)/?", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="P", help="port; 0: any free one (8000)"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="F",
        help="file of keys, one a line; a request must give one of them",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what requests call the model; repeatable (the model's own)",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        default=_PREFIXES,
        metavar="N",
        help=f"conversations whose keys and values are kept ({_PREFIXES})",
    )
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help=f"requests, 1 to 8, that are answered at a time; on hip only 1 "
        f"({_SLOTS} on host, else 1)",
    )
    parser.add_argument(
        "--queue", type=int, default=_QUEUE, metavar="N", help=f"most requests that wait ({_QUEUE})"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name that requests may use; repeatable",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="an origin whose pages may ask, as in https://example.com; repeatable",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="make ranks processes, and start them anew when one is lost; rank 0 is the server's",
    )
    parser.add_argument(
        "--compare",
        metavar="URL",
        help="another server, as in http://127.0.0.1:8001, which the page asks the same, before "
        "this one; it must be started with --allow-origin of this page",
    )


def main(args: argparse.Namespace) -> int:
    """Runs the command; every rank calls it. Rank 0 serves HTTP, and the others run the requests
    that rank 0 submits.

    Returns:
        The exit code.
    """
    # Imported before the model is read, which takes longest. So the error for a missing package,
    # which names it, comes at once.
    from .serving.http.app import application
    from .serving.http.service import Settings

    console = screen.console(is_quiet=bool(kccl.launched_rank()))
    keys = _keys(args.api_key_file)
    compare = _origin(args.compare)
    queue = integer("--queue", args.queue)
    if queue < 1:
        raise kccl.InvalidArgument(f"--queue is {queue}, must be at least 1")
    listening = None if kccl.launched_rank() else _listen(args.host, args.port)
    given = {"model": args.model, "backend": args.backend, "blocks": args.blocks}
    given |= {"context": args.context, "dtype": args.dtype, "prefixes": args.prefixes}
    given |= {"weights": args.weights, "drafts": args.drafts, "ngrams": ngrams_in(args)}
    given |= {"packed_cache": args.packed_cache}
    given["slots"] = slots_for(args.backend, args.slots)
    say = partial(screen.tell, console)
    with ExitStack() as stack:
        processes: Processes | None = None
        with screen.progress(console) as progress:
            if args.restart:
                _check_restart()
                processes = stack.enter_context(Processes(args.n or 1, given, say))
                engine = processes.open(measures=True, progress=progress)
            else:
                engine = Engine(**given, ranks=args.n, progress=progress)
        stack.enter_context(engine)
        engine.sessions.limit = queue
        # Raises now, not at the first request, if the model has no tokenizer.
        engine.tokenizer.decode([])
        bandwidth = measured(engine)
        if listening is None:
            # This is not rank 0. It ignores the signals and ends when rank 0 does.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            engine.sessions.follow()
            return 0
        for notice in engine.notices:
            say(notice)
        names = tuple(args.served_model_name) or (_name_of(args.model),)
        engine.sessions.start()
        app = application(
            engine,
            Settings(names=names, bandwidth=bandwidth, compare=compare),
            hosts=[args.host, *args.allow_host],
            origins=args.allow_origin,
            keys=keys,
        )
        service = app.state.service
        if processes is not None:
            service.restarts = True
            stack.enter_context(Restarter(processes, engine, told=service.replace, tell=say))
        _serve(app, lambda: service.engine.sessions, listening, say)
    return 0


def slots_for(backend: str, slots: int | None) -> int:
    """Returns Engine's `slots` for the argument --slots, None if it is not given. Then devices
    have one, because there the number that fits depends on the model.
    """
    if slots is None:
        return _SLOTS if backend == "host" else 1
    return integer("--slots", slots)


def _check_restart() -> None:
    """Raises InvalidArgument if a launcher has started the ranks."""
    if kccl.launched_rank() is not None:
        raise kccl.InvalidArgument(
            "--restart starts the ranks itself, and a launcher has started this one: leave out the "
            "launcher, and give their number by -n"
        )


def _name_of(model: str) -> str:
    """Returns the name that requests use for a model: the last part of a path, or the whole name of
    a repository.
    """
    return os.path.basename(os.path.abspath(model)) if os.path.exists(model) else model


def _keys(path: Path | None) -> list[str]:
    """Returns the API keys in a file.

    Raises:
        InvalidArgument: The file cannot be read, or has no key.
    """
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise kccl.InvalidArgument(f"--api-key-file {path} cannot be read: {error}") from error
    if not (found := list(filter(None, keys))):
        raise kccl.InvalidArgument(f"--api-key-file {path} is empty, must have a key a line")
    return found


def _origin(url: str | None) -> str:
    """Returns the origin of --compare's server, without a slash at its end. Returns "" for None.

    Raises:
        InvalidArgument: The text is no origin. The page's Content-Security-Policy contains it, so
            other text could change the policy.
    """
    if url is None:
        return ""
    found = _ORIGIN.fullmatch(url)
    if found is None:
        raise kccl.InvalidArgument(
            f"--compare is {url!r:.200}, must be as in http://127.0.0.1:8001, without a path"
        )
    return found[1]


def _listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens at an address.

    Raises:
        InvalidArgument: The address or the port is wrong, in use or not permitted.
    """
    if not 0 <= port < 1 << 16:
        raise kccl.InvalidArgument(f"--port is {port}, must be from 0 to {(1 << 16) - 1}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # With SO_REUSEADDR two sockets can bind one port until one of them listens. So listen() is
        # called here, where a port that is in use raises an error before the model is read.
        listening.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise kccl.InvalidArgument(
            f"--host {host} --port {port}: cannot listen there: {why}"
        ) from error
    return listening


def _serve(
    app: Any, sessions: Callable[[], Sessions], listening: socket.socket, say: Callable[[str], None]
) -> None:
    """Answers requests until SIGINT or SIGTERM. Then waits up to _DRAIN_S seconds for those that
    have begun.
    """
    import uvicorn

    from .serving.http.server import Connection, Server, ignore_signals

    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_S,
    )
    ignore_signals()
    sys.stderr.flush()
    Server(config, sessions, say, _DRAIN_S).run(sockets=[listening])
