"""What `kccl serve` costs beside engine.stream: python -m kccl.bench.serve --model smollm2

Both run on the same engine in turns, so that whatever else the machine does hits both. The client
is another process that only reads bytes. Its CPU time is told apart, because the cores are shared.
With --peer, another server with OpenAI's completions answers the same prompts in turn.
"""

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

from kccl.engine import Engine

# Tokens of a conversation's first turn, tokens that each later turn adds, and tokens of an answer.
_TURN, _ADDED, _ANSWER = 1000, 30, 20
_OTHERS = 3
_PROMPT = "Once upon a time, in a small village by the sea,"


class Seen(NamedTuple):
    """The timing of one stream, as its client sees it.

    Attributes:
        num_tokens: Number of events with a token.
        first_s: Seconds from the request to the first of these events.
        rest_s: Seconds from the first to the last of these events.
        cpu_s: CPU time of the client during the stream.
    """

    num_tokens: int
    first_s: float
    rest_s: float
    cpu_s: float


def _ask(address: tuple[str, int], body: bytes) -> Seen:
    """Sends a request to the server, and reads bytes until the stream's end."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cpu, began = time.process_time(), time.monotonic()
        connection.sendall(head.encode() + body)
        first = last = 0.0
        parts: list[bytes] = []
        while part := connection.recv(1 << 16):
            now = time.monotonic()
            parts.append(part)
            if b"data: {" in part:
                first, last = first or now, now
            if b"[DONE]" in part:
                break
        cpu = time.process_time() - cpu
    found = b"".join(parts)
    if b" 200 " not in found[:20] or b'"error"' in found:
        raise SystemExit(f"the server has answered {found[-500:].decode(errors='replace')}")
    return Seen(found.count(b"data: {"), first - began, last - first, cpu)


def _client(pipe: Pipe, address: tuple[str, int]) -> None:
    """Runs in the client's process: sends each request that comes through the pipe, until None."""
    while (body := pipe.recv()) is not None:
        pipe.send(_ask(address, body))


class Client:
    """A client that runs in another process."""

    def __init__(self, address: tuple[str, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_client, args=(theirs, address), daemon=True)
        self._process.start()

    def ask(self, ids: list[int], max_tokens: int) -> Seen:
        """Requests one greedy answer as a stream, and returns its timing."""
        body = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self._pipe.send(json.dumps(body).encode())
        seen: Seen = self._pipe.recv()
        return seen

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(None)
        self._process.join()


@contextmanager
def served(engine: Engine) -> Iterator[tuple[str, int]]:
    """Runs a server of an engine, as `kccl serve` starts it, and yields its address."""
    import uvicorn

    from kccl.engine.serving.http.app import application
    from kccl.engine.serving.http.server import Connection, Server
    from kccl.engine.serving.http.service import Settings

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application(engine, Settings(names=("model",))),
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    server = Server(config, lambda: engine.sessions, lambda _: None, 1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def _stream(engine: Engine, ids: list[int], max_tokens: int) -> Seen:
    """Times one greedy answer of the engine without a server."""
    began = time.monotonic()
    times = [time.monotonic() for _ in engine.stream(ids, max_tokens=max_tokens, temperature=0)]
    return Seen(len(times), times[0] - began, times[-1] - times[0], 0.0)


def _overhead(engine: Engine, client: Client, rounds: int, max_tokens: int) -> None:
    """Prints how much slower the server's streams and first tokens are than the engine's."""
    ids = engine.tokenizer.encode(_PROMPT)
    pairs = []
    for number in range(rounds + 1):
        own = _stream(engine, ids, max_tokens)
        seen = client.ask(ids, max_tokens)
        if own.num_tokens != seen.num_tokens or own.num_tokens < 2:
            raise SystemExit(f"{own.num_tokens} tokens, and {seen.num_tokens} by the server")
        if own.rest_s == 0 or seen.rest_s == 0:
            raise SystemExit(f"{own.num_tokens} tokens came at once: ask for more with --tokens")
        # Skips the first round, in which the prompt is not cached yet.
        if number:
            pairs.append((own, seen))
    wall = [seen.rest_s / own.rest_s - 1 for own, seen in pairs]
    net = [(seen.rest_s - seen.cpu_s) / own.rest_s - 1 for own, seen in pairs]
    first = [seen.first_s - own.first_s for own, seen in pairs]
    rates = [(own.num_tokens - 1) / own.rest_s for own, _ in pairs]
    theirs = [(seen.num_tokens - 1) / seen.rest_s for _, seen in pairs]
    middle = statistics.median
    print(f"{rounds} rounds of {pairs[0][0].num_tokens} tokens, medians:")
    print(
        f"  tokens a second      {middle(rates):9.1f} engine.stream  {middle(theirs):9.1f} server"
    )
    print(f"  overhead             {middle(wall):9.1%}, without the client's CPU {middle(net):.1%}")
    print(f"  first token later by {1e3 * middle(first):9.2f} ms")


def _beside(
    engine: Engine, ours: Client, theirs: Client, name: str, rounds: int, max_tokens: int
) -> None:
    """Prints the speeds of both servers, which answer in turn, with the prompt in their caches."""
    ids = engine.tokenizer.encode(_PROMPT)
    pairs = [(ours.ask(ids, max_tokens), theirs.ask(ids, max_tokens)) for _ in range(rounds + 1)]
    del pairs[0]
    for seen in (each for pair in pairs for each in pair):
        # Allows one event more than tokens, because some servers end with an event without a token.
        if seen.rest_s == 0 or not max_tokens <= seen.num_tokens <= max_tokens + 1:
            raise SystemExit(f"{seen.num_tokens} events, must be {max_tokens} or one more")
    middle = statistics.median
    rates = [[(max_tokens - 1) / seen.rest_s for seen in pair] for pair in pairs]
    ratio = middle(our / their for our, their in rates)
    print(f"beside {name}, {rounds} rounds of {max_tokens} tokens, medians:")
    print(f"  {'':<20} {'kccl':>9}  {'the other':>9}")
    ours_s, theirs_s = (middle(rate[which] for rate in rates) for which in range(2))
    print(f"  tokens a second      {ours_s:9.1f}  {theirs_s:9.1f}  {ratio:.2f} times")
    firsts = (1e3 * middle(pair[which].first_s for pair in pairs) for which in range(2))
    print("  first token, ms      {:9.2f}  {:9.2f}".format(*firsts))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return host, int(port)


def _turns(engine: Engine, client: Client, rounds: int) -> None:
    """Prints how much sooner than the first turn a second turn begins, and a turn after other
    conversations.
    """
    noise = random.Random(0)
    size = engine.config.vocab_size

    def some(number: int) -> list[int]:
        return [noise.randrange(size // 2, size) for _ in range(number)]

    second, later = [], []
    for _ in range(rounds):
        talk = some(_TURN)
        began = client.ask(talk, _ANSWER).first_s
        talk = talk + some(_ADDED)
        second.append(began / client.ask(talk, _ANSWER).first_s)
        for _ in range(_OTHERS):
            client.ask(some(_TURN), _ANSWER)
        talk = talk + some(_ADDED)
        later.append(began / client.ask(talk, _ANSWER).first_s)
    print(f"first token of a later turn behind {_TURN} tokens, {rounds} rounds, medians:")
    for name, ratios in (("second turn", second), (f"behind {_OTHERS} others", later)):
        print(f"  {name:<20} {statistics.median(ratios):9.1f} times sooner than the first")


def main() -> None:
    """Runs the benchmark of the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="M", help="as kccl serve's (smollm2)")
    parser.add_argument("-n", type=int, metavar="RANKS", help="ranks as threads (1)")
    parser.add_argument("--blocks", type=int, metavar="N", help="threads of each rank (all cores)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="(10)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    parser.add_argument(
        "--turns", type=int, default=3, metavar="N", help="conversations (3); 0: none"
    )
    parser.add_argument(
        "--peer",
        type=_address,
        metavar="HOST:PORT",
        help="another server of the same model, which answers in turn",
    )
    args = parser.parse_args()
    with (
        Engine(args.model, ranks=args.n, blocks=args.blocks, prefixes=_OTHERS + 1) as engine,
        served(engine) as address,
    ):
        client = Client(address)
        try:
            _overhead(engine, client, args.rounds, args.tokens)
            if args.peer:
                other = Client(args.peer)
                name = "{}:{}".format(*args.peer)
                try:
                    _beside(engine, client, other, name, args.rounds, args.tokens)
                finally:
                    other.close()
            if args.turns:
                _turns(engine, client, args.turns)
        finally:
            client.close()


if __name__ == "__main__":
    main()
