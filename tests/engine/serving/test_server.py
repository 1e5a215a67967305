"""uvicorn's server as `kccl serve` has it: silent connections, and the end."""

import contextlib
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn

import kccl
from kccl.engine import Engine
from kccl.engine.serve import _listen, _name_of
from kccl.engine.serving.http.app import application
from kccl.engine.serving.http.server import Connection, Server
from kccl.engine.serving.http.service import Settings

LONG = {"prompt": "ab", "max_tokens": 1900, "logit_bias": {"1": -100, "2": -100}}


@pytest.fixture
def engine(chat_model):
    with Engine(chat_model, blocks=1, context=2048) as engine:
        yield engine


@contextlib.contextmanager
def serving(engine, *, keep_s=15, drain_s=600, buffer=None):
    """Runs a server in a thread; gives it, its address, and the lines that it tells."""
    lines, listening = [], _listen("127.0.0.1", 0)
    if buffer is not None:
        # Connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    app = application(engine, Settings(names=("tiny",)))
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", timeout_keep_alive=keep_s
    )
    server = Server(config, lambda: engine.sessions, lines.append, drain_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    host, port = listening.getsockname()
    thread.start()
    try:
        yield server, (host, port), lines
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive()


def connected(address):
    return socket.create_connection(address, timeout=60)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: local",
        # Behind a request that was answered.
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
)
def test_a_connection_without_a_header_is_closed(engine, said):
    with serving(engine, keep_s=0.3) as (_, address, _), connected(address) as silent:
        silent.sendall(said)
        while silent.recv(1 << 16):
            pass


def test_a_header_that_comes_slowly_is_not_waited_for(engine):
    with serving(engine, keep_s=0.3) as (_, address, _), connected(address) as slow:
        end = time.monotonic() + 60
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                slow.sendall(b"x: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() < end


def test_a_long_answer_is_no_silent_connection(engine):
    with serving(engine, keep_s=0.1) as (_, (host, port), _):
        found = httpx.post(f"http://{host}:{port}/v1/completions", json=LONG, timeout=60)
        assert found.json()["usage"]["completion_tokens"] == 1900


class Held:
    """A job that goes on until it is cancelled."""

    ids = ()

    def order(self):
        return {}

    def run(self, runner, tokenizer, cancellation):
        while not cancellation.is_asked:
            time.sleep(0.01)
            yield from ()


@pytest.mark.parametrize(("drain_s", "signals"), [(0.2, 1), (600, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_left_end_with_a_reason(engine, drain_s, signals, stream):
    with serving(engine, drain_s=drain_s) as (server, (host, port), lines):
        url = f"http://{host}:{port}/v1/completions"
        with ThreadPoolExecutor(1) as pool:
            engine.sessions.submit(Held())
            asked = pool.submit(httpx.post, url, json=LONG | {"n": 9, "stream": stream}, timeout=60)
            until(lambda: engine.sessions.num_waiting == 9)
            for _ in range(signals):
                server.handle_exit(signal.SIGINT, None)
            found = asked.result(60)
        assert found.status_code == (200 if stream else 503)
        assert "the request was cancelled: the server ends" in found.text
    assert lines[-1] == "waiting for 10 requests; Ctrl-C again ends them"


def test_an_address_nobody_can_listen_at():
    with _listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(kccl.InvalidArgument, match=f"--port {port}: cannot listen there: Addr"):
            _listen("127.0.0.1", port)
    with pytest.raises(kccl.InvalidArgument, match=r"--host a\.\.b --port 0: cannot listen there"):
        _listen("a..b", 0)


def test_what_a_model_is_called(tmp_path, monkeypatch):
    (tmp_path / "some").mkdir()
    monkeypatch.chdir(tmp_path / "some")
    names = [".", "../some/", "Qwen/Qwen3-0.6B", "bundled"]
    assert list(map(_name_of, names)) == ["some", "some", "Qwen/Qwen3-0.6B", "bundled"]
