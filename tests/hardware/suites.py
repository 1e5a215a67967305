"""Several benches in one job: starting the ranks takes longer than a short bench."""

import json
import subprocess
import sys

from ranks import LAUNCHER, environment


def run_suite(world_size, folder, benches, timeout=100):
    """Name -> arguments of `kccl bench`; returns name -> (rows, what was printed)."""
    job = ["-m", "kccl.bench.gpu.suite", "--out", str(folder)]
    calls = [f"{name}: {' '.join(arguments)}" for name, arguments in benches.items()]
    done = subprocess.run(
        [*LAUNCHER, "-n", str(world_size), "--", sys.executable, *job, *calls],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in benches:
        document = json.loads((folder / f"{name}.json").read_text())
        assert len(document["machine"]["gpus"]) == world_size
        found[name] = document["rows"], (folder / f"{name}.txt").read_text()
    return found
