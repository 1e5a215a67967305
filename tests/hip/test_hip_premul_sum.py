"""premul_sum() on the hip backend: its kernels go to the call's stream, and into graphs."""

import numpy as np
import oracle
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.gpu import driver

FACTORS = 0.1, -1 / 3


def inputs_of(name):
    rng = np.random.default_rng(5)
    return [oracle.random_floats(name, 300, rng) for _ in FACTORS]


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_bits_are_the_oracles(amd, name):
    inputs = inputs_of(name)
    wanted = oracle.premul_sum(inputs, FACTORS)

    def main(comm):
        op = kccl.premul_sum(FACTORS[comm.rank])
        x = to_gpu(inputs[comm.rank], ordinal_of(comm))
        out = to_gpu(np.zeros_like(wanted), x.device)
        found = []
        for _ in range(2):
            comm.all_reduce(x, out=out, op=op)
            found.append(from_gpu(out))
        comm.reduce(x, 1, out=out, op=op)
        found.append(from_gpu(out))
        found.append(from_gpu(comm.all_reduce.prepare(x, op=op)()))
        comm.check()
        return [(oracle.bits(each) == oracle.bits(wanted)).all() for each in found]

    assert kccl.run_threads(main, 2, backend="hip") == [[True] * 4] * 2


def test_a_capture_is_replayed(amd):
    gpu = driver.table()
    inputs = inputs_of("bfloat16")
    wanted = oracle.premul_sum(inputs, FACTORS)

    def main(comm):
        op = kccl.premul_sum(FACTORS[comm.rank])
        x = to_gpu(inputs[comm.rank], ordinal_of(comm))
        out = to_gpu(np.zeros_like(wanted), x.device)
        with driver.device(x.device).current():
            stream = driver.make_stream()
            call = comm.all_reduce.prepare(x, out=out, op=op, stream=stream)
            mode = gpu.constant("hipStreamCaptureMode.hipStreamCaptureModeGlobal")
            gpu.call("hipStreamBeginCapture", stream, mode)
            call()
            graph = gpu.call("hipStreamEndCapture", stream)
            instance = gpu.call(gpu.names.instantiate_graph, graph, 0)
            for _ in range(2):
                gpu.call("hipGraphLaunch", instance, stream)
            driver.synchronize_stream(stream)
        comm.check()
        return bool((oracle.bits(from_gpu(out)) == oracle.bits(wanted)).all())

    assert kccl.run_threads(main, 2, backend="hip") == [True, True]
