"""A job's ranks complain once of what all of them find, and each of what it alone finds."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from long import long_after
from ranks import environment

KCCL = [sys.executable, "-m", "kccl"]
MPIRUN = Path(sys.executable).with_name("mpirun")


BUSY = """
import time
from kccl.tools.complaints import Complaints
Complaints().meet(0)
time.sleep(100)
"""


def job(*command, launcher=(*KCCL, "run", "-n", "2", "--"), **variables):
    done = subprocess.run(
        [*launcher, *command],
        env=environment(**variables),
        **{"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 60},
    )
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "ended with exit code" not in line]
    return done.returncode, lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    # Found with the arguments; by the command; by each rank's start-up; by each rank's engine.
    long_after(
        3,
        [
            (
                "bench all_reduce --backend sim",
                "--backend sim runs all ranks in one process: leave o",
            ),
            (
                "bench decode --model none",
                "model 'none' is neither bundled, smollm2, a folder nor a ",
            ),
            ("bench all_reduce -e 8", "KCCL_ALGORITHM is 'none', must be"),
            (
                "generate --prompt a -n 2",
                "ranks is 2: they are threads of one process, and a launch",
            ),
        ],
    ),
)
def test_what_all_ranks_find_is_told_once(arguments, told):
    wrong = {"KCCL_ALGORITHM": "none"} if "KCCL_ALGORITHM" in told else {}
    code, lines = job(*KCCL, *arguments.split(), **wrong)
    assert code == 2
    assert len(lines) == 1 and told in lines[0] and "rank 1" not in lines[0], lines


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
def test_what_all_ranks_of_mpirun_find_is_told_once():
    # MPI_Init takes long, so few cases.
    launcher = [str(MPIRUN), "-n", "2"]
    code, lines = job(*KCCL, "bench", "decode", "--ablate", "x", launcher=launcher)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith("kccl: 'x' cannot be left out or changed")


def test_what_a_lower_rank_has_heard_is_not_told_again():
    """Rank 1's environment is wrong, and rank 0 raises with its reason."""
    bench = shlex.join([*KCCL, "bench", "all_reduce", "-e", "8"])
    script = f"if [ $KCCL_RANK = 1 ]; then export KCCL_ALGORITHM=none; fi; exec {bench}"
    code, lines = job("sh", "-c", script)
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("kccl: start-up failed on rank 1: KCCL_ALGORITHM is 'none', must be")


def test_each_rank_tells_what_it_alone_finds():
    command = [*KCCL, "bench", "decode", "--model"]
    code, lines = job("sh", "-c", shlex.join(command) + ' "none$KCCL_RANK"')
    assert code == 2
    assert sorted(line[:30] for line in lines) == [
        "kccl: model 'none0' is neither",
        "kccl: rank 1: model 'none1' is",
    ]


def test_a_rank_that_hears_nothing_from_the_others_tells_what_it_finds():
    """They are not at their end, and wait for something else."""
    rank_1 = shlex.join([*KCCL, "bench", "decode", "--model", "none"])
    rank_0 = f'{shlex.quote(sys.executable)} -c "{BUSY}"'
    script = f"if [ $KCCL_RANK = 1 ]; then {rank_1}; else {rank_0}; fi"
    launcher = [*KCCL, "run", "-n", "2", "--kill-on-error", "--"]
    code, lines = job("sh", "-c", script, launcher=launcher)
    assert code == 2
    assert "kccl: rank 1: model 'none' is neither" in lines[0]
