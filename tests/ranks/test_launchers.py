"""What kccl.init() makes of the launchers' variables."""

import os

import pytest
from ranks import start

import kccl
from kccl.base import env
from kccl.ranks import bootstrap, launchers

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_LOCALID": "2",
}
# As they are in a batch script for four tasks, outside of srun.
BATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def detect(variables):
    return bootstrap.detect(env.read({}), variables)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_part_of_torchruns_variables_is_refused(missing):
    variables = {name: text for name, text in TORCHRUN.items() if name != missing}
    first = "WORLD_SIZE" if missing == "RANK" else "RANK"
    with pytest.raises(
        kccl.InvalidArgument, match=f"{first} is set and {missing} is not: .*torchrun.*kccl run"
    ):
        detect(variables)


def test_an_address_without_a_rank_means_nothing():
    assert detect({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).launcher == "alone"


def test_a_step_of_srun_is_a_job():
    found = detect(SRUN)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("srun", 3, 4, 2)
    assert launchers.rank_of(SRUN) == 3
    assert launchers.launcher_of_several(SRUN) == "srun"
    with pytest.raises(kccl.BackendError, match="srun started 4 ranks on 2 machines"):
        detect(SRUN | {"SLURM_STEP_NUM_NODES": "2"})
    with pytest.raises(kccl.InvalidArgument, match="SLURM_PROCID=4 must be between 0 and"):
        detect(SRUN | {"SLURM_PROCID": "4"})


def test_a_complete_set_counts_and_not_a_part_of_another():
    """Recipes for srun export WORLD_SIZE for the whole job and RANK later, if at all."""
    assert detect(SRUN | {"WORLD_SIZE": "4"}).launcher == "srun"
    assert detect(SRUN | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    "variables", [BATCH, {name: SRUN[name] for name in ("SLURM_NTASKS", "SLURM_PROCID")}]
)
def test_slurms_variables_without_a_step_are_refused(variables):
    with pytest.raises(
        kccl.InvalidArgument,
        match=r"SLURM_NTASKS=4 are set and SLURM_STEP_NUM_TASKS is not.*srun.*unset SLURM_PROCID",
    ):
        detect(variables)
    # Commands that need one rank run in a batch script, and so does `kccl run`.
    assert (launchers.rank_of(variables), launchers.launcher_of_several(variables)) == (0, "")
    assert detect(launchers.without_launcher(variables)).launcher == "alone"


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"},  # the shell of salloc
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # the same, where it is a step
        BATCH | {"SLURM_NTASKS": "1"},
    ],
)
def test_one_task_of_slurm_is_alone(variables):
    assert detect(variables).launcher == "alone"
    assert launchers.launcher_of_several(variables) == ""


SUM = """
comm = kccl.init()
x = np.full(5, comm.rank + 1, np.float64)
comm.all_reduce(x)
say(rank=comm.rank, world_size=comm.world_size, launcher=comm.launcher, sum=x.tolist())
"""


def test_torchruns_variables():
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    ranks = [start(SUM, RANK=str(rank), **variables) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        assert '"launcher": "torchrun", "sum": [3.0, 3.0, 3.0, 3.0, 3.0]' in out


def test_sruns_variables():
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    variables["SLURM_STEP_NUM_TASKS"] = "2"
    ranks = [start(SUM, SLURM_PROCID=str(rank), **variables) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        assert '"launcher": "srun", "sum": [3.0, 3.0, 3.0, 3.0, 3.0]' in out


def test_alone():
    out, err = (process := start(SUM)).communicate(timeout=60)
    assert process.returncode == 0, err
    assert '"world_size": 1, "launcher": "alone", "sum": [1.0, 1.0' in out


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named(absent):
    program = """
try:
    kccl.init()
except kccl.Timeout as error:
    say(peer=error.peer, message=str(error))
"""
    present = [rank for rank in range(3) if rank != absent]

    def told(limit_s):
        variables = {
            "KCCL_RENDEZVOUS": f"test {os.getpid()} {absent} {limit_s}",
            "KCCL_WORLD_SIZE": "3",
            "KCCL_FIRST_TIMEOUT": str(limit_s),
        }
        ranks = [start(program, KCCL_RANK=str(rank), **variables) for rank in present]
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert rank.returncode == 0, err
            yield out

    outs = [*told(1)]
    if any(f'"peer": {absent}' not in out for out in outs):
        # On a busy machine, the present ranks may start more than a second apart.
        outs = [*told(20)]
    for out in outs:
        assert f'"peer": {absent}' in out
        assert f"rank {absent} at start-up" in out


KCCL_RUN = {"KCCL_RENDEZVOUS": "job", "KCCL_RANK": "0", "KCCL_WORLD_SIZE": "1"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
OF_KCCL_RUN = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
ELASTIC = TORCHRUN | {"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (KCCL_RUN | OF_KCCL_RUN | MPI, "by `kccl run` as rank 0 of 1 and by mpirun as rank 1 of 2"),
        (
            KCCL_RUN | {"KCCL_WORLD_SIZE": "2"} | MPI | {"PMI_RANK": "0"},
            "by `kccl run` as rank 0 of 2 and by mpirun as rank 0 of 2",
        ),
        (KCCL_RUN | ELASTIC, "by `kccl run` as rank 0 of 1 and by torchrun as rank 0 of 2"),
        (MPI | ELASTIC, "by mpirun as rank 1 of 2 and by torchrun as rank 0 of 2"),
    ],
)
def test_a_launcher_within_a_launcher_is_refused(variables, words):
    """Each job would take itself for the whole one, and its results for those of all ranks."""
    with pytest.raises(kccl.InvalidArgument, match=words):
        bootstrap.detect(env.read(variables), variables)


def test_a_launcher_of_one_rank_may_start_another_one():
    for variables in (
        KCCL_RUN | OF_KCCL_RUN,
        KCCL_RUN | OF_KCCL_RUN | {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ):
        assert bootstrap.detect(env.read(variables), variables).launcher == "kccl run"
