"""The steps of `make gpu`: commands that run one after another, each with a time limit."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124
_TEST = re.compile(r"\S+\.py::\S+")
_ENDING_S = 5.0

Execute = Callable[[Sequence[str], float, Path], int]
"""(command, timeout in seconds, file for its output) -> exit code; TIMED_OUT after the timeout."""


@dataclass(frozen=True)
class Step:
    """One command of the run.

    Attributes:
        name: Name of its output file and of its line in the summary.
        command: Arguments of the interpreter.
        limit_s: Time limit in seconds.
        is_needed: Whether the run has failed when the step fails.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_needed: bool = True


@dataclass(frozen=True)
class Result:
    """The outcome of a step. `failure` is the reason why it failed, or None."""

    name: str
    seconds: float
    failure: str | None


class Run:
    """Runs steps one after another, within one time limit for all."""

    def __init__(
        self, out: Path, limit_s: float, execute: Execute, budgets_s: Mapping[str, float]
    ) -> None:
        """Starts the time limit.

        Args:
            out: The output folder.
            limit_s: Time limit of all steps in seconds.
            execute: Runs a command.
            budgets_s: Part -> its time in seconds.
        """
        self.out = out
        self.results: list[Result] = []
        self._budgets_s = budgets_s
        self._execute = execute
        self._deadline = time.monotonic() + limit_s
        self._budget = ""
        self._part_deadline: float | None = None

    def begin_part(self, part: str) -> None:
        """Starts a part. Its steps may use its budget, and what earlier parts left of theirs."""
        budget_s = self._budgets_s[part]
        self._budget = f"the time of the part {part}, {budget_s:.0f} s and what was left,"
        self._part_deadline = (self._part_deadline or time.monotonic()) + budget_s

    def take(self, step: Step) -> bool:
        """Runs a step. Returns whether it succeeded."""
        begin = time.monotonic()
        limit_s, reason = min(
            (self._deadline - begin, "the time for all steps"),
            ((self._part_deadline or math.inf) - begin, self._budget),
            (step.limit_s, "the time for one step"),
        )
        if limit_s <= 0:
            return self.note(step.name, 0.0, f"not run: {reason} is over")
        output = self.out / f"{step.name}.txt"
        print(f"# {step.name}: {' '.join(step.command)}", flush=True)
        code = self._execute((sys.executable, *step.command), limit_s, output)
        failure = None
        if code == TIMED_OUT:
            failure = f"ended after {limit_s:.0f} s: {reason} is over, during {_last_words(output)}"
        elif code != 0:
            failure = f"exit code {code}"
        if failure is not None:
            _print_end(output)
            if not step.is_needed:
                print(f"# {step.name}: {failure}; the run continues without it", flush=True)
                failure = None
        return self.note(step.name, time.monotonic() - begin, failure)

    def is_over(self) -> bool:
        """Tells whether no time is left for another step of this part."""
        return time.monotonic() >= min(self._deadline, self._part_deadline or math.inf)

    def note(self, name: str, seconds: float, failure: str | None) -> bool:
        """Adds a result. Returns whether it is a success."""
        self.results.append(Result(name, seconds, failure))
        return failure is None

    def summary(self) -> str:
        """Returns one line for each step, then the names of those that failed."""
        lines = [
            f"{each.name:24} {each.seconds:6.1f} s  {each.failure or 'ok'}" for each in self.results
        ]
        failed = [each.name for each in self.results if each.failure is not None]
        lines.append(f"failed: {', '.join(failed)}" if failed else "all steps succeeded")
        return "\n".join(lines)


def execute_processes(command: Sequence[str], limit_s: float, output: Path) -> int:
    """See Execute. A command that exceeds the limit is ended with all processes of its group."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | _variables(output.parent),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # _end() kills the command's process group. The command stays in this session, so that
            # it is ended, too, if somebody ends the session.
            process_group=0,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        _end(process)


def _variables(out: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Sets KCCL_CACHE so that steps share compiled kernels. Without it, tests use their own cache.
    cache = os.environ.get("KCCL_CACHE") or str(out.resolve() / "cache")
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "KCCL_CACHE": cache}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command. On SIGTERM the launcher ends its ranks; then the whole group is killed."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        # A killed process does not end while it is in a system call of a driver that hangs.
        print(f"# process {process.pid} was killed but has not ended", flush=True)


def _print_end(output: Path, num_lines: int = 15) -> None:
    """Prints the last lines of a failed step's output."""
    if output.exists():
        lines = output.read_text("utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in lines[-num_lines:]), flush=True)


def _last_words(output: Path) -> str:
    """Returns what a step was doing: tests of pytest -v without a result, else its last line of
    output.
    """
    text = output.read_text("utf-8", errors="replace") if output.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # pytest-xdist prints a test's name when it starts, and again after its result.
    begun = dict.fromkeys(line for line in lines if _TEST.fullmatch(line))
    ended = {line.split()[-1] for line in lines if line.startswith("[gw")}
    running = [name for name in begun if name not in ended]
    if running:
        return ", ".join(map(repr, running))
    return repr(lines[-1][:120]) if lines else "its start: it has printed nothing"


def heed_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that this process ends the running step."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
