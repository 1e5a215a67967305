"""Ranks forked from a process that has imported what they need, which takes longer than most tests.

The interface is that of ranks.py, but `kccl run` does not start them: for tests of what ranks do
together, not of how they are started.

Forked ranks are more alike than a launcher's: they have the same layout of addresses, the same
seed of hashes, the same state of np.random and the same imported modules. What is wrong only where
these differ is found under `kccl run`.
"""

import atexit
import multiprocessing
import os
import secrets
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import forkserver
from pathlib import Path

import ranks

_CONTEXT = multiprocessing.get_context("forkserver")
# Not CUDA, whose state does not survive a fork. These modules of kccl read no environment variables
# but a launcher's: init() does again what they do there.
_OF_KCCL = ("kccl.start", "kccl.collectives.one_sided", "kccl.collectives.point_to_point")
_CONTEXT.set_forkserver_preload(["numpy", "pytest", "torch", *_OF_KCCL])
TIMED_OUT = 124
_ENDING_S = 10


def begin():
    """Begins the import, so that the first test waits for less of it."""
    forkserver.ensure_running()


def run(world_size, program, *, timeout=60, **variables):
    """Exit code, facts by rank, stderr; as ranks.run, without its launcher's options.

    Raises:
        TimeoutError: A rank has not ended after `timeout` seconds.
    """
    with Job(world_size, program, **variables) as job:
        code, facts, err = job.end(timeout)
    if code == TIMED_OUT:
        raise TimeoutError(f"ranks have not ended after {timeout} s; they said {facts}\n{err}")
    return code, facts, err


class Job:
    """Ranks that have been started."""

    def __init__(self, world_size, program, **variables):
        self._folder = tempfile.TemporaryDirectory()
        environment = ranks.environment(**variables) | {
            "KCCL_WORLD_SIZE": str(world_size),
            "KCCL_RENDEZVOUS": secrets.token_hex(16),
        }
        self.outputs = [Path(self._folder.name) / str(rank) for rank in range(world_size)]
        self.processes = [
            _CONTEXT.Process(
                target=_be_rank,
                args=(ranks.whole(program), environment | {"KCCL_RANK": str(rank)}, output),
            )
            for rank, output in enumerate(self.outputs)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            # With a limit: a driver may keep a killed process in the kernel.
            process.join(_ENDING_S)
            if process.exitcode is None:
                said = f"process {process.pid} has not ended though it is killed"
                warnings.warn(said, stacklevel=2)
        self._folder.cleanup()

    def end(self, timeout=60):
        """Exit code, the facts that ranks said, by rank, and stderr.

        If a rank has failed, stderr has a heading with the exit code before what each rank wrote.
        """
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        errors = [output.with_suffix(".err") for output in self.outputs]
        texts = [path.read_text() if path.exists() else "" for path in errors]
        if any(code != 0 for code in codes):
            texts = [
                f"rank {rank}: exit code {code}\n{text}"
                for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
            ]
        err = "".join(texts)
        code = TIMED_OUT if None in codes else next(filter(None, codes), 0)
        return code, {fact["rank"]: fact for fact in self.facts()}, err

    def facts(self):
        """What ranks have said until now."""
        texts = [output.read_text() for output in self.outputs if output.exists()]
        return ranks.facts("".join(texts))


def _be_rank(program, environment, output):
    """The whole life of a rank, in its process."""
    for descriptor, path in ((1, output), (2, output.with_suffix(".err"))):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # An interpreter does this when it exits. os._exit() does not.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
