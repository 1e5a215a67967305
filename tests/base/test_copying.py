"""Errors, plans and records can be copied; what belongs to a process refuses pickle and copy."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import kccl
from kccl.engine import Answer, Engine, Piece, SamplingParams
from kccl.engine.files.random_weights import random_checkpoint
from kccl.gpu.table import DriverError
from kccl.sim.report import Place

WAIT = {"rank": 1, "peer": 2, "collective": "put", "channel": 3}
WAIT |= {"epoch_seen": 4, "epoch_wanted": 5, "waited_s": 0.5}
PLACE = Place(1, 2, 3, "mine.cuh:4", "put", 0, 7)
ERRORS = [
    kccl.Error("a"),
    kccl.InvalidArgument("b"),
    kccl.BackendError("c"),
    kccl.CompileError("d", log="line 1"),
    kccl.WaitFailed("e", **WAIT),
    kccl.Timeout("f", **WAIT),
    kccl.PeerLost("g", **WAIT),
    kccl.ProtocolError("h", kind="data_race", seed=9, rank=1, other=PLACE, timeline="step"),
    DriverError("i", 719),
]
WAYS = {f"protocol {number}": number for number in range(pickle.HIGHEST_PROTOCOL + 1)}
WAYS |= {"copy": copy.copy, "deepcopy": copy.deepcopy}


def again(x, way):
    return WAYS[way](x) if callable(WAYS[way]) else pickle.loads(pickle.dumps(x, WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_text_and_attributes(error, way):
    error.add_note("a note")
    found = again(error, way)
    assert type(found) is type(error) and found is not error
    assert (str(found), repr(found), found.args) == (str(error), repr(error), error.args)
    assert vars(found) == vars(error)


def fail(number):
    raise ERRORS[number]


@pytest.mark.parametrize("kind", ["futures", "pool"])
def test_the_caller_of_a_pool_gets_the_error(kind):
    """A pool waits for ever for an error that cannot be unpickled."""
    spawn = multiprocessing.get_context("spawn")
    if kind == "pool":
        with spawn.Pool(1) as pool:
            results = [pool.apply_async(fail, [number]) for number in range(len(ERRORS))]
            errors = [caught(lambda each=each: each.get(30)) for each in results]
    else:
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            results = [pool.submit(fail, number) for number in range(len(ERRORS))]
            errors = [each.exception(30) for each in results]
    for found, sent in zip(errors, ERRORS, strict=True):
        assert (type(found), str(found)) == (type(sent), str(sent))
        assert {**vars(found), "__notes__": 0} == {**vars(sent), "__notes__": 0}


def caught(call):
    with pytest.raises(kccl.Error) as found:
        call()
    return found.value


@pytest.mark.parametrize("way", WAYS)
def test_plans_and_records_are_values(way):
    def main(comm):
        return comm.plan("all_reduce", 64, "float32"), comm.topology

    plan, machine = kccl.run_threads(main, 2)[0]
    assert again(plan, way).explain() == plan.explain()
    config = random_checkpoint("tiny-laneformer").config
    answer = Answer("text", [1], [-0.5], "length", SamplingParams(seed=5), 3, 0.1, 9.0)
    piece = Piece("text", 1, -0.5, "")
    for each in (plan, machine, kccl.bfloat16, PLACE, config, answer, piece, SamplingParams()):
        assert again(each, way) == each


def refuses(x, *words):
    for way in WAYS:
        with pytest.raises(TypeError) as found:
            again(x, way)
        for word in ("cannot pickle or copy", type(x).__name__, *words):
            assert word in str(found.value), found.value


SOURCE = "#include <kccl/kccl.cuh>\nKCCL_KERNEL void mine(kccl::DeviceComm comm) {}\n"


@pytest.mark.parametrize("check", ["0", "1"])
def test_what_belongs_to_a_process_is_refused(monkeypatch, check):
    monkeypatch.setenv("KCCL_CHECK", check)

    def main(comm):
        x = np.ones(4, np.float32)
        refuses(comm, "a communicator belongs to its process", "call kccl.init() in each process")
        refuses(comm.context, "kccl.init()")
        refuses(comm.window(64), "comm.window() on every rank")
        refuses(comm.device_comm(channels=1, max_bytes=64), "comm.device_comm() on every rank")
        for call in (comm.all_reduce, comm.all_gather, comm.broadcast, comm.reduce_scatter):
            refuses(call, "a communicator's calls work in its process only")
        for call in (comm.put, comm.get, comm.signal, comm.wait):
            refuses(call, "a communicator's calls work in its process only")
        for call in (comm.barrier, comm.barrier.prepare(channel=1)):
            refuses(call, "a communicator's calls work in its process only")
        for call in (comm.all_reduce.prepare(x), comm.all_reduce.prepare(x[:0])):
            refuses(call, "a communicator's calls work in its process only")

    kccl.run_threads(main, 2)


def test_compiled_code_is_refused():
    module = kccl.compile(SOURCE, ["mine"])
    refuses(module, "call kccl.compile() in each process")
    refuses(module.kernel("mine"), "call kccl.compile() in each process")


def test_an_engine_is_refused():
    checkpoint = random_checkpoint("tiny-laneformer")
    with checkpoint, Engine(checkpoint, ranks=1, blocks=1) as engine:
        refuses(engine, "open an Engine in each process")
