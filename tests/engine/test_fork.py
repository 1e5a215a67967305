"""What a fork of a process with an open Engine may do with it."""

import subprocess
import sys
import textwrap

from tiny_models import LLAMA, write_folder

PROGRAM = """
    import os
    import signal
    import sys

    import kccl
    from kccl.engine import Engine

    with Engine(sys.argv[1], ranks=2, blocks=1) as engine:
        whole = engine.generate([5, 6, 7], max_tokens=20, stop_ids=()).ids
        stream = engine.stream([5, 6, 7], max_tokens=20, stop_ids=())
        first = next(stream)

        def leave():
            with engine:
                sys.exit(0)

        uses = {
            "next": lambda: next(stream),
            "generate": lambda: engine.generate([5], max_tokens=2),
            "stream": lambda: next(engine.stream([5], max_tokens=2)),
            "logits": lambda: engine.logits([5, 6]),
            "run_until": lambda: engine.run_until([5], 1),
            "submit": lambda: engine.submit([5], max_tokens=2),
            "follow": engine.follow,
            "devices": engine.devices,
            "bandwidth": engine.bandwidth,
            "drain": engine.sessions.drain,
            "submission": lambda: next(iter(submission)),
        }
        ends = {"close": engine.close, "end": stream.close, "with": leave}

        def asked(name):
            # A child that hangs ends by SIGALRM.
            signal.alarm(60)
            try:
                (uses | ends)[name]()
            except kccl.Error as error:
                return 0 if name in uses and "is a fork of process" in str(error) else 3
            except SystemExit as error:
                return error.code
            return 4 if name in uses else 0

        def child(name):
            pid = os.fork()
            if pid == 0:
                os._exit(asked(name))
            told = os.waitpid(pid, 0)[1]
            assert told == 0, (name, told)

        for name in (uses | ends).keys() - {"submission"}:
            child(name)
        # Nothing of that has changed the parent's request, nor the next one.
        assert [first.id, *(piece.id for piece in stream)] == whole
        with engine.submit([5, 6, 7], max_tokens=20, stop_ids=()) as submission:
            child("submission")
            child("close")
            assert [piece.id for piece in submission] == whole
    print("ended")
"""


def test_a_fork_gets_an_error_and_the_parent_goes_on(tmp_path):
    write_folder(tmp_path, LLAMA)
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
