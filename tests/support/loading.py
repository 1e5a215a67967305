"""Loads all of a model that may be damaged: it loads, or it ends in one line."""

import resource
import time
from contextlib import contextmanager

from tiny_models import MESSAGES

import kccl
from kccl.engine.checkpoint import open_checkpoint

# What a damaged tiny file may make the loader allocate, and how long it may take.
MOST_BYTES = 512 << 20
MOST_SECONDS = 5


@contextmanager
def bounded_memory():
    """Within, memory beyond MOST_BYTES more than now is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(path):
    """Reads all that a model has.

    Returns:
        "loaded", or the text of the kccl.Error.
    """
    started = time.monotonic()
    try:
        with open_checkpoint(path) as checkpoint:
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
    assert time.monotonic() - started < MOST_SECONDS
    return told
