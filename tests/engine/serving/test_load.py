"""A share of the load run; `python tests/engine/serving/load.py` is the whole."""

import signal

import pytest
from load import Load, check, out_of_order
from test_openai import start

pytestmark = pytest.mark.long


def test_clients_that_leave_leave_nothing(chat_model):
    server, url = start(chat_model, "--blocks", "1")
    try:
        host, _, port = url.removeprefix("http://").rpartition(":")
        told = check(Load((host, int(port))), server.pid, 300, 64, seed=1)
        assert told.startswith("300 requests")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stderr.close()


def test_what_is_out_of_order_is_seen():
    assert out_of_order([(0.0, 1.0), (0.5, 0.8), (3.0, 4.0)]) == 0
    assert out_of_order([(0.0, 9.0), (0.5, 0.8), (3.0, 4.0), (3.1, 3.9)]) == 2
