"""all_reduce_rms_norm and rms_norm on the hip backend: launches of several blocks, and graphs."""

import numpy as np
import oracle
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.gpu import driver

ROWS, WIDTH, EPS = 3, 300, 1e-5
ALGORITHMS = "all_reduce_rms_norm", "all_reduce_one_shot_ll16"


def numbers(shape, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(oracle.numpy_dtype("bfloat16"))


def same(found, wanted):
    return (oracle.bits(from_gpu(found)) == oracle.bits(wanted)).all()


def test_bits_are_the_hosts(amd):
    """One kernel and two, each alone, prepared and in a graph."""
    gpu = driver.table()
    inputs = [numbers((ROWS, WIDTH), rank) for rank in range(2)]
    rest, weight = numbers((ROWS, WIDTH), 2), numbers(WIDTH, 3)
    total = oracle.all_reduce([each.ravel() for each in inputs], "sum").reshape(ROWS, WIDTH)
    hidden, scale = rest.copy(), np.array([0.02], np.float32)
    wanted = kccl.rms_norm(total.copy(), weight, EPS, residual=hidden)
    small = np.empty_like(rest, oracle.numpy_dtype("float8_e4m3fn"))
    kccl.rms_norm(total, weight, EPS, residual=rest.copy(), out=small, scale=scale)

    def main(comm):
        on = ordinal_of(comm)
        x, weights = to_gpu(inputs[comm.rank], on), to_gpu(weight, on)
        for algorithm in ALGORITHMS:
            residual, out = to_gpu(rest, on), to_gpu(np.zeros_like(rest), on)
            given = x, residual, weights, EPS
            comm.all_reduce_rms_norm(*given, out=out, algorithm=algorithm)
            assert same(out, wanted) and same(residual, hidden)
            of_8_bits, residual = to_gpu(np.zeros_like(small), on), to_gpu(rest, on)
            given = x, residual, weights, EPS
            how = {"algorithm": algorithm, "scale": to_gpu(scale, on)}
            comm.all_reduce_rms_norm(*given, out=of_8_bits, **how)
            assert same(of_8_bits, small) and same(residual, hidden)
            residual, out = to_gpu(rest, on), to_gpu(np.zeros_like(rest), on)
            with driver.device(on).current():
                stream = driver.make_stream()
                call = comm.all_reduce_rms_norm.prepare(
                    x, residual, weights, EPS, out=out, algorithm=algorithm, stream=stream
                )
                assert call.plan.name == algorithm
                mode = gpu.constant("hipStreamCaptureMode.hipStreamCaptureModeGlobal")
                gpu.call("hipStreamBeginCapture", stream, mode)
                call()
                graph = gpu.call("hipStreamEndCapture", stream)
                instance = gpu.call(gpu.names.instantiate_graph, graph, 0)
                gpu.call("hipGraphLaunch", instance, stream)
                driver.synchronize_stream(stream)
            assert same(out, wanted) and same(residual, hidden)
        one_block_a_row = comm.all_reduce_rms_norm.prepare(x, residual, weights, EPS)
        assert one_block_a_row.plan.name == ALGORITHMS[0] and one_block_a_row.shape[0] == ROWS
        residual, rows = to_gpu(rest, on), to_gpu(total, on)
        found = kccl.rms_norm(rows, weights, EPS, residual=residual)
        assert found is rows and same(rows, wanted) and same(residual, hidden)
        comm.check()

    kccl.run_threads(main, 2, backend="hip")


def test_arrays_on_the_host_are_refused(amd):
    weight = np.ones(WIDTH, np.float32)

    def main(comm):
        x = to_gpu(np.ones((ROWS, WIDTH), np.float32), ordinal_of(comm))
        for call in (comm.all_reduce_rms_norm, lambda x, _, *rest: kccl.rms_norm(x, *rest)):
            with pytest.raises(kccl.InvalidArgument, match="weight is a ndarray in other memory"):
                call(x, None, weight, EPS)

    kccl.run_threads(main, 1, backend="hip")
