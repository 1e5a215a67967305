"""What a client cannot do to the server: over real sockets, and where that says more, within it."""

import hmac
import json
import socket
import threading
import time

import httpx
import pytest
from test_server import connected, serving, until

from kccl.engine import Engine
from kccl.engine.serving.http import service
from kccl.engine.serving.http.guard import Guard
from kccl.engine.serving.http.server import Connection

UNENDING = {"1": -100, "2": -100}
# So many bytes that the buffers between do not hold them where they are small.
LARGE = {"prompt": "ab", "max_tokens": 400, "logprobs": 20, "logit_bias": UNENDING}
SHORT = {"prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def engine(chat_model):
    with Engine(chat_model, blocks=1, context=2048) as engine:
        yield engine


def post(body):
    text = json.dumps(body).encode()
    head = f"Host: localhost\r\nContent-Length: {len(text)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + text


def ask(address):
    return httpx.post("http://{}:{}/v1/completions".format(*address), json=SHORT, timeout=60)


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_holds_neither_the_engine_nor_a_connection(engine, stream, monkeypatch):
    monkeypatch.setattr(Connection, "read_s", 0.5)
    with serving(engine, keep_s=600, buffer=4096) as (server, address, _), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address)
        deaf.sendall(post(LARGE | {"stream": stream}))
        until(lambda: server.server_state.tasks)
        assert ask(address).status_code == 200
        until(lambda: not server.server_state.connections, 60)
        assert engine.sessions.num_running == engine.sessions.num_waiting == 0


def test_a_slow_reader_gets_all_of_it(engine):
    with serving(engine) as (_, address, _), connected(address) as slow:
        slow.sendall(post(LARGE | {"stream": True, "max_tokens": 300}))
        found = b""
        while b"[DONE]" not in found:
            time.sleep(0.001)
            part = slow.recv(4096)
            assert part
            found += part
        assert found.count(b'"text":') == 300


def test_a_body_that_comes_slowly_is_not_waited_for(engine, monkeypatch):
    monkeypatch.setattr(service, "_BODY_S", 0.4)
    with serving(engine) as (_, address, _), connected(address) as slow:
        text = post(SHORT)
        slow.sendall(text[:-20])
        # A byte now and then does not help.
        stopped = threading.Event()

        def drip():
            for each in text[-20:-1]:
                if stopped.wait(0.1):
                    return
                slow.sendall(bytes([each]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert ask(address).status_code == 200
        assert b" 408 " in slow.recv(1 << 16)
        stopped.set()
        dripping.join()


@pytest.mark.parametrize(
    ("said", "statuses"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", (431,)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n", (400, 431)),
        (b"GET /" + b"y" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 414, 431)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, (400,)),
        (b"GET / HTTP/1.1\r\n\r\n", (400, 403)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", (400, 403)),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", (404,)),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", (400,)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost.evil\r\n\r\n", (403,)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://a\r\nOrigin: \r\n\r\n", (403,)),
    ],
    ids=lambda each: ascii(each)[:40],
)
def test_what_is_no_good_request_is_refused(engine, said, statuses):
    with serving(engine) as (_, address, _), connected(address) as client:
        sending = threading.Thread(target=send, args=(client, said))
        sending.start()
        found = client.recv(1 << 16)
        sending.join()
        assert int(found.split()[1]) in statuses
        assert ask(address).status_code == 200


def send(client, said):
    # The server may close before it has read everything.
    try:
        client.sendall(said)
    except OSError:
        client.close()


def test_a_body_that_is_larger_than_told_is_refused_early(engine):
    with serving(engine) as (_, address, _), connected(address) as client:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        sending = threading.Thread(
            target=send, args=(client, head + (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 12)
        )
        sending.start()
        assert b" 413 " in client.recv(1 << 16)
        client.close()
        sending.join()


def test_a_key_is_compared_with_all_and_in_constant_time(monkeypatch):
    compared = []

    def compare(given, known):
        compared.append((len(given), len(known)))
        return hmac.compare_digest(given, known)

    from kccl.engine.serving.http import guard

    monkeypatch.setattr(guard, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    keys = ["first", "a longer second", "third"]
    made = Guard(None, hosts=(), origins=(), keys=keys, page=())
    for given, is_known in (("first", True), ("third", True), ("f", False), ("x" * 999, False)):
        compared.clear()
        assert made._is_key(given) is is_known
        # Digests, so that no length of a key is told, and all of them, whichever is right.
        assert compared == [(32, 32)] * 3
