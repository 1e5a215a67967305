"""Loads all of a model that may be damaged: it loads, or it ends in one line. And what memory an
engine takes to load.
"""

import subprocess
import sys
import textwrap
import time
import tracemalloc
from contextlib import contextmanager

from tiny_models import MESSAGES

import kccl
from kccl.engine.files.checkpoint import open_checkpoint

# What loading a damaged tiny file may allocate, and how long it may compute.
MOST_BYTES = 32 << 20
MOST_SECONDS = 5


@contextmanager
def bounded_memory():
    """Fails if Python and NumPy allocate more within, whether they use it or not."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, peak


def outcome(path):
    """Reads all that a model has.

    Returns:
        "loaded", or the text of the kccl.Error.
    """
    started = time.process_time()
    try:
        with bounded_memory(), open_checkpoint(path) as checkpoint:
            for name, shape in checkpoint.config.shapes().items():
                assert checkpoint.tensor(name).shape == shape
            tokenizer = checkpoint.tokenizer()
            ids = tokenizer.encode("hello world\n")
            assert all(0 <= number < checkpoint.config.vocab_size for number in ids)
            tokenizer.decode(ids)
            tokenizer.chat(MESSAGES)
        told = "loaded"
    except kccl.Error as error:
        told = str(error)
        assert "\n" not in told and len(told) < 1000, told
    assert time.process_time() - started < MOST_SECONDS
    return told


def memory_of_opening(path, ranks):
    """The most memory that opening an engine adds to its process, as a multiple of the packed
    weights: measured in a process of its own, behind a tiny engine and the tokenizer.
    """
    program = f"""
    def peak():
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

    from kccl.engine import Engine, open_checkpoint
    from kccl.engine.files.random_weights import random_checkpoint

    Engine(random_checkpoint("tiny-llama"), ranks={ranks}, blocks=1).close()
    with open_checkpoint({str(path)!r}) as checkpoint:
        checkpoint.tensor("layers.0.attention_norm")
        if checkpoint.has_tokenizer:
            checkpoint.tokenizer()
        before = peak()
        with Engine(checkpoint, ranks={ranks}, blocks=1, context=16) as engine:
            print((peak() - before) / engine.nbytes)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)
