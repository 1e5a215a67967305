"""Tuning a GPU's calls in virtual time, and what the planner makes of the table."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_world import problem
from gpu_bench_world import Call, FakeBuffers, FakeGpu, FakeModule

import kccl
from kccl.base import dtypes
from kccl.bench import collectives
from kccl.bench.gpu import clock as gpu_clock
from kccl.bench.tune import gpu as tune_gpu
from kccl.bench.tune import tune
from kccl.plan import choice, spec, tuning

LL16, SENTINEL = "all_reduce_one_shot_ll16", "all_reduce_one_shot_sentinel"
TWO_SHOT, PULL = "all_reduce_two_shot_push_simple", "all_reduce_one_shot_pull_simple"
SHAPES = [(8, 64), (8, 256), (64, 64), (64, 256)]


class FakeOp(Call):
    def __init__(self, gpu, us, shape):
        super().__init__(gpu, us)
        self.shape = shape


class World:
    """One rank's GPU on which a call's time is `cost_us(algorithm, shape, bytes)`."""

    def __init__(self, cost_us, wrong=()):
        self.gpu = FakeGpu()
        self.cost_us = cost_us
        self.wrong = wrong
        self.prepared = []
        names = [LL16, SENTINEL, TWO_SHOT, PULL]
        self.comm = SimpleNamespace(
            rank=0,
            world_size=2,
            gather_objects=lambda value: [json.loads(json.dumps(value))],
            algorithms=lambda name: names if name == "all_reduce" else [f"{name}_direct"],
        )
        self.gpu.buffers = self.buffers
        clock = gpu_clock.GpuClock(self.gpu, FakeModule(self.gpu))
        self.tuner = tune_gpu.GpuTuner(self.comm, shapes=SHAPES, clock=(self.gpu, clock))
        self.table = replace(collectives.load("all_reduce"), prepare=self.prepare, check=self.check)

    def buffers(self, problem):
        found = FakeBuffers(self.gpu)
        found.problem, found.zero = problem, lambda: None
        return found

    def prepare(self, comm, buffers, problem, algorithm, stream=None, blocks=0, threads=0):
        if algorithm == PULL:
            raise kccl.InvalidArgument("pulls, which is slow on cuda")
        if algorithm == SENTINEL and problem.dtype == "int32":
            raise kccl.InvalidArgument("int32 has no bit pattern to spare")
        packets = max(problem.nbytes // 8, 1)
        threads = threads or 128
        blocks = min(-(-packets // threads), blocks or 128)
        shape = blocks, min(packets, threads)
        self.prepared.append((problem.nbytes, algorithm, shape))
        return FakeOp(self.gpu, self.cost_us(algorithm, shape, problem.nbytes), shape)

    def check(self, problem, buffers, call, rank, gather, seed):
        call()
        return int(problem.nbytes in self.wrong)

    def tune(self, *sizes):
        problems = [
            replace(problem("bfloat16", n=2), nbytes=nbytes, count=nbytes // 2) for nbytes in sizes
        ]
        return tune.tune(
            self.comm, self.table, problems, repeats=2, tuner=self.tuner, iterations=200
        )


def entry(up_to_bytes, algorithm, blocks, threads):
    return {
        "collective": "all_reduce",
        "up_to_bytes": up_to_bytes,
        "algorithm": algorithm,
        "blocks": blocks,
        "threads": threads,
    }


def cost_us(algorithm, shape, nbytes):
    """ll16 best at first, then sentinel; more blocks when long, two_shot when longest."""
    blocks, _ = shape
    us = 2 + nbytes / (1000 * blocks) + 0.01 * blocks
    return {
        LL16: us,
        SENTINEL: us + (1 if nbytes < 4096 else -1),
        TWO_SHOT: us + (5 if nbytes < 1 << 20 else -20),
    }[algorithm]


def test_the_fastest_algorithm_in_its_best_shape_is_chosen():
    world = World(cost_us)
    rows, found = world.tune(64, 1 << 16, 1 << 21)
    assert found == [
        entry(64, LL16, 8, 64),
        entry(1 << 16, SENTINEL, 64, 64),
        entry(1 << 16, LL16, 64, 64),
        entry(None, TWO_SHOT, 64, 64),
    ]
    assert {row["mode"] for row in rows} == {"graph"} and {row["wrong"] for row in rows} == {0}
    # So short a message takes one block in every shape, so each algorithm is measured once.
    assert [row["algorithm"] for row in rows if row["bytes"] == 64] == [LL16, SENTINEL, TWO_SHOT]
    assert min(row["time_us"] for row in rows if row["bytes"] == 64) == pytest.approx(2.074)


def test_shapes_alone_make_a_choice():
    def by_threads(algorithm, shape, nbytes):
        return 1 + abs(shape[1] - 256) / 100 + (algorithm != LL16) * 9

    _, found = World(by_threads).tune(1 << 16)
    assert found == [entry(None, LL16, 8, 256)]


def test_what_does_not_run_is_said_once_and_a_wrong_result_ends_it(capsys):
    world = World(cost_us)
    world.tune(64, 128)
    assert capsys.readouterr().err.count("pulls, which is slow") == 1
    assert PULL not in {algorithm for _, algorithm, _ in world.prepared}
    with pytest.raises(kccl.Error, match="wrong elements at 64 bytes"):
        World(cost_us, wrong=[64]).tune(64)


def test_a_barrier_has_nothing_to_tune():
    world = World(cost_us)
    barrier = collectives.load("barrier")
    problems = barrier.problems(
        [8], dtype="", np_dtype=None, op="", root=0, in_place=True, world_size=2
    )
    rows, found = tune.tune(world.comm, barrier, problems, repeats=1, tuner=world.tuner)
    assert rows == []
    assert found == [{"collective": "barrier", "up_to_bytes": None, "algorithm": "barrier_direct"}]


# The planner


def request(nbytes, dtype):
    return spec.Request("all_reduce", nbytes, 2, "cuda", dtypes.of(dtype))


def table(tmp_path, *entries, **more):
    path = tmp_path / "cuda.json"
    path.write_text(json.dumps(tune.updated(more or None, "cuda", 2, list(entries))))
    return path


def test_the_planner_takes_algorithm_and_shape_from_the_table(tmp_path):
    _, found = World(cost_us).tune(64, 1 << 16, 1 << 21)
    measured = tuning.read_tuning(table(tmp_path, *found))

    def chosen(nbytes, dtype):
        made = choice.choose(request(nbytes, dtype), measured)
        return made.name, made.blocks, made.threads

    assert chosen(64, "bfloat16") == (LL16, 8, 64)
    assert chosen(128, "bfloat16") == (SENTINEL, 64, 64)
    # sentinel, the best of this size, has no integers. They take this size's next best algorithm,
    # not the one for longer messages.
    assert chosen(128, "int32") == (LL16, 64, 64)
    assert chosen(1 << 22, "int32") == (TWO_SHOT, 64, 64)
    made = choice.choose(request(64, "bfloat16"), measured)
    assert "at most 8 blocks of 64 threads" in made.explain()
    forced = choice.choose(request(64, "bfloat16"), measured, forced=TWO_SHOT)
    assert (forced.blocks, forced.threads) == (0, 0)


@pytest.mark.parametrize("shape", [(8, 0), (0, 64), (129, 64), (8, 65), (8, 2048), (-1, 32)])
def test_a_table_with_a_shape_that_is_none_is_refused(tmp_path, shape):
    path = table(tmp_path, entry(None, LL16, *shape))
    with pytest.raises(kccl.InvalidArgument, match=r"thresholds\[0\].*(blocks|threads)"):
        tuning.read_tuning(path)


def test_a_tables_origin_is_kept(tmp_path):
    before = {"origin": "measured on 2 H200", "tables": []}
    path = table(tmp_path, entry(None, LL16, 8, 64), **before)
    assert tuning.read_tuning(path).origin == "measured on 2 H200"


def test_shapes_are_for_gpus():
    def main(comm):
        x = np.zeros(4, np.float32)
        with pytest.raises(kccl.InvalidArgument, match="must be 0: they are for backends with"):
            comm.all_reduce.prepare(x, blocks=8, threads=64)

    kccl.run_threads(main, 1)
