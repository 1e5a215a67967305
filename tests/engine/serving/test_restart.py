"""`kccl serve` whose ranks are processes: one is killed, and with --restart comes back."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import httpx
import pytest
from long import long_after

import kccl
from kccl.engine.commands import processes as processes_module

STREAM = {"prompt": "ab", "max_tokens": 1900, "logit_bias": {"1": -100, "2": -100}, "stream": True}
NAMED = re.compile(r"(peer|rank) 1\b")
SHORT = {"prompt": "ab", "max_tokens": 3, "temperature": 0}


class Running:
    """A server's process: its lines, its address, and its other ranks."""

    def __init__(self, command):
        # Rank 0 looks more often whether the others are there.
        environ = os.environ | {"KCCL_TIMEOUT": "10"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
        )
        self.lines = []
        self._read = threading.Thread(target=self._collect)
        self._read.start()
        self.url = self.wait_for(r"listening on (http://\S+)")

    def _collect(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern, number=1):
        """The group of the pattern's so manieth line."""
        end = time.monotonic() + 100
        while True:
            found = [each for line in list(self.lines) if (each := re.search(pattern, line))]
            if len(found) >= number:
                return found[number - 1][1]
            assert time.monotonic() < end and self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)

    def other_rank(self, number=1):
        return int(self.wait_for(r"rank 1 is process (\d+)", number))

    def health(self):
        answer = httpx.get(f"{self.url}/health", timeout=60)
        return answer.status_code, answer.json()

    def wait_for_health(self, status):
        end = time.monotonic() + 100
        while (found := self.health())[1]["status"] != status:
            assert time.monotonic() < end, (found, "".join(self.lines))
            time.sleep(0.02)
        return found

    def ask(self, **given):
        return httpx.post(f"{self.url}/v1/completions", json=SHORT | given, timeout=100)


@contextlib.contextmanager
def serving(model, *options, launcher=()):
    kccl = [sys.executable, "-m", "kccl"]
    command = ["serve", "--model", str(model), "--port", "0", "--blocks", "1", *options]
    start = [*kccl, *launcher, *kccl] if launcher else kccl
    running = Running([*start, *command])
    try:
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(running.process.pid, signal.SIGKILL)
            raise
        finally:
            running._read.join()
            running.process.stderr.close()


def is_running(pid):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def killed_while_it_answers(running, pid):
    """What a stream and a request beside it say where a rank is killed meanwhile.

    The rank is stopped before: otherwise a fast machine could end the answer first.
    """
    waiting = []
    with httpx.stream("POST", f"{running.url}/v1/completions", json=STREAM, timeout=100) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        os.kill(pid, signal.SIGSTOP)
        queued = threading.Thread(target=lambda: waiting.append(running.ask()))
        queued.start()
        while running.health()[1]["running"] != 2:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        told = [line for line in lines if "error" in line]
    queued.join()
    return told, waiting[0]


@pytest.mark.parametrize("times", long_after(1, [1, 2]))
def test_a_rank_that_is_killed_is_named_and_comes_back(slow_model, times):
    with serving(slow_model, "-n", "2", "--restart") as running:
        before = running.ask(max_tokens=8).json()["choices"]
        first = running.other_rank()
        for number in range(2, 2 + times):
            told, queued = killed_while_it_answers(running, running.other_rank(number - 1))
            assert len(told) == 1 and NAMED.search(told[0]), told
            assert (queued.status_code, queued.json()["error"]["code"]) == (
                503,
                "engine_unavailable",
            )
            assert NAMED.search(queued.json()["error"]["message"])
            assert queued.headers["retry-after"] == "5"
            running.wait_for(r"(the engine has been restarted)", number - 1)
            assert running.wait_for_health("ok")[0] == 200
            assert running.ask(max_tokens=8).json()["choices"] == before
        last = running.other_rank(1 + times)
    assert running.process.returncode == 0
    assert not is_running(first) and not is_running(last)


@pytest.mark.long
def test_a_rank_that_is_killed_while_nothing_runs(chat_model):
    with serving(chat_model, "-n", "2", "--restart") as running:
        os.kill(running.other_rank(), signal.SIGKILL)
        running.wait_for(r"(the engine has failed: .*(?:peer|rank) 1)")
        running.wait_for(r"(the engine has been restarted)")
        assert running.ask().status_code == 200


@pytest.mark.long
def test_without_restart_the_health_says_which_rank_was_lost(slow_model):
    launcher = ("run", "-n", "2", "--")
    with serving(slow_model, launcher=launcher) as running:
        ranks = children(running.process.pid)
        (other,) = [pid for pid in ranks if b"KCCL_RANK=1" in environ_of(pid)]
        told, queued = killed_while_it_answers(running, other)
        assert len(told) == 1 and NAMED.search(told[0]), told
        assert queued.status_code == 503 and "retry-after" not in queued.headers
        status, health = running.health()
        assert (status, health["status"]) == (503, "failed") and NAMED.search(health["error"])
        assert running.ask().status_code == 503


def children(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as listed:
            found += map(int, listed.read().split())
    return found


def environ_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as listed:
        return listed.read().split(b"\0")


@pytest.mark.long
def test_a_server_that_is_killed_leaves_no_rank(chat_model):
    with serving(chat_model, "-n", "2", "--restart") as running:
        other = running.other_rank()
        running.process.kill()
        end = time.monotonic() + 60
        while is_running(other):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_the_ranks_of_a_launcher_are_not_restarted():
    command = [sys.executable, "-m", "kccl", "run", "-n", "1", "--", sys.executable, "-m", "kccl"]
    found = subprocess.run(
        [*command, "serve", "--port", "0", "--restart"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode != 0 and "--restart starts the ranks itself" in found.stderr


@pytest.mark.long
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_lets_answers_end_and_a_second_signal_does_not(slow_model, signals):
    with serving(slow_model, "-n", "2", "--restart") as running:
        url = f"{running.url}/v1/completions"
        body = STREAM | {"max_tokens": 60 if signals == 1 else 1900}
        with httpx.stream("POST", url, json=body, timeout=100) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            running.wait_for(r"(waiting for 1 request; Ctrl-C again ends it)")
            if signals == 2:
                running.process.send_signal(signal.SIGINT)
            told = [line for line in lines if line]
        assert ("the server ends" in told[-2]) == (signals == 2)
        assert told[-1] == "data: [DONE]"
        assert len(told) == 60 or signals == 2
        assert running.process.wait(60) == 0


class Rank:
    """Another rank's process: it waits for this one, and ends only if it is killed."""

    def __init__(self):
        self.called = []

    def kill(self):
        self.called.append("kill")

    def wait(self, seconds=None):
        self.called.append("wait")
        if "kill" not in self.called:
            raise subprocess.TimeoutExpired("rank", seconds)


def test_nobody_waits_for_ranks_behind_ctrl_c():
    processes, rank = processes_module.Processes(2, {}, print), Rank()
    processes._running.append(rank)
    with pytest.raises(KeyboardInterrupt), processes:
        raise KeyboardInterrupt
    assert rank.called == ["kill", "wait"]


@pytest.mark.parametrize("error", [OSError("no process"), MemoryError("no memory")])
def test_a_restart_that_the_machine_refuses_is_tried_again(error, monkeypatch):
    monkeypatch.setattr(processes_module, "_PAUSE_S", 0.0)
    engine, told, lines, ended = mock.MagicMock(), [], [], threading.Event()
    engine.sessions.wait_for_failure.return_value = kccl.Error("rank 1 is lost")
    processes = mock.MagicMock()
    processes.open.side_effect = error

    def tell(new):
        told.append(new)
        ended.set()

    with processes_module.Restarter(processes, engine, told=tell, tell=lines.append):
        assert ended.wait(20)
    assert told == [None]
    assert len([line for line in lines if str(error) in line]) == 5
