"""Times torch.distributed on the host with the backends "kccl" and "gloo", which take turns:

    kccl run -n 2 -- python -m kccl.bench.gloo --json  # a minute on two cores

One process a rank has a group of each backend. dist.all_reduce is in place, of float32. A step of
DistributedDataParallel is zero_grad, forward, backward and SGD. The library "none" makes the same
step on the model alone, without communication. Ranks are not pinned: gloo has threads of its own.

A row has the median of the repeats, each with the mean of some calls on the slowest rank. In each
repeat all libraries have their turn, in reversed order every second time. Results are checked:
sums by their bits, and trained parameters against those of the other backend.

A row is "busy" if programs other than the ranks had over 5 % of the CPUs while its message or model
was measured. Its "others" is their share.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kccl

from .harness.clock import uncollected
from .harness.document import document, machine
from .harness.measure import BUSY, BUSY_SHARE, SPREAD, WIDE_SPREAD, Row
from .harness.others import Others

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
REPEATS = 9
_TURN_S = 0.03
_MOST_CALLS = 200
_STEPS = 10
# Name of a model -> its width and number of layers; the transformer's batch is 4 x 16 tokens.
MODELS = {"mlp": (128, 4), "transformer": (128, 2)}
_RATE = 0.01
_CLOSE = 1e-4

Run = Callable[[], Any]


class Turns:
    """Lets contenders take turns, on all ranks together.

    Attributes:
        comm: The communicator over which the ranks meet before each turn, and gather times.
    """

    def __init__(self, comm: kccl.Communicator, repeats: int) -> None:
        """Keeps the communicator, and how often each contender has its turn."""
        self.comm = comm
        self._repeats = repeats

    def time(self, runs: dict[str, Run], calls: int | None) -> dict[str, Row]:
        """Returns the fields of each contender's row that hold its times. Collective.

        Args:
            runs: Library -> its call.
            calls: Calls of a turn. If None, each contender has as many as fit into 30 ms.
        """
        counts = {library: calls or self._calls(run) for library, run in runs.items()}
        times_us: dict[str, list[float]] = {library: [] for library in runs}
        others = Others(self.comm.gather_objects)
        for repeat in range(self._repeats):
            for library in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
                slowest = max(self.comm.gather_objects(self._turn(runs[library], counts[library])))
                times_us[library].append(slowest * 1e6 / counts[library])
        share = others.share()
        return {library: _fields(times_us[library], share, counts[library]) for library in runs}

    def _calls(self, run: Run) -> int:
        """Returns how many calls fit into a turn, after some that warm up."""
        self._turn(run, 2)
        slowest = max(self.comm.gather_objects(self._turn(run, 3))) / 3
        return max(1, min(_MOST_CALLS, int(_TURN_S / slowest)))

    def _turn(self, run: Run, calls: int) -> float:
        """Returns the seconds that some calls take."""
        with uncollected():
            self.comm.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            return time.perf_counter() - began


def _fields(times_us: list[float], share: float, calls: int) -> Row:
    q1, median, q3 = np.percentile(times_us, (25, 50, 75))
    notes = [BUSY] if share > BUSY_SHARE else []
    notes += [SPREAD] if q3 - q1 > WIDE_SPREAD * median else []
    figures = {"time_us": median, "q1_us": q1, "q3_us": q3}
    return {name: round(float(each), 3) for name, each in figures.items()} | {
        "repeats": len(times_us),
        "calls": calls,
        "others": round(share, 4),
        "notes": notes,
    }


def all_reduce_rows(turns: Turns, groups: dict[str, Any], sizes: Sequence[int]) -> list[Row]:
    """Checks and times dist.all_reduce of each size with each backend. Collective.

    Args:
        turns: How contenders take turns.
        groups: Library -> its group of torch.distributed.
        sizes: Bytes of the messages.
    """
    import torch
    import torch.distributed as dist

    rows = []
    ranks = turns.comm.world_size
    for nbytes in sizes:
        count = nbytes // 4
        runs: dict[str, Run] = {}
        wrong = {}
        for library, group in groups.items():
            # Small integers, whose sums are exact in any order.
            x = (torch.arange(count, dtype=torch.float32) % 1021) * (turns.comm.rank + 1)
            dist.all_reduce(x, group=group)
            want = (torch.arange(count, dtype=torch.float32) % 1021) * (ranks * (ranks + 1) // 2)
            wrong[library] = sum(turns.comm.gather_objects(int((x != want).sum())))
            # Timed sums are of zeros, so that they stay finite.
            x.zero_()
            runs[library] = _all_reduce(x, group)
        for library, fields in turns.time(runs, None).items():
            what = {"library": library, "collective": "all_reduce", "bytes": nbytes}
            rows.append(what | {"dtype": "float32", "wrong": wrong[library]} | fields)
    return rows


def _all_reduce(x: Any, group: Any) -> Run:
    import torch.distributed as dist

    return lambda: dist.all_reduce(x, group=group)


def step_rows(turns: Turns, groups: dict[str, Any], names: Sequence[str]) -> list[Row]:
    """Checks and times steps of DistributedDataParallel with each backend. Collective.

    Args:
        turns: How contenders take turns.
        groups: Library -> its group of torch.distributed.
        names: Models of MODELS.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    rows = []
    for name in names:
        width, layers = MODELS[name]
        runs: dict[str, Run] = {}
        models = {}
        for library, group in {**groups, "none": None}.items():
            model, batch = _model(name, width, layers)
            models[library] = model
            if group is not None:
                model = DistributedDataParallel(model, process_group=group)
            runs[library] = _step(model, batch)
            for _ in range(3):
                runs[library]()
        trained = [torch.cat([p.detach().view(-1) for p in models[each].parameters()])
                   for each in groups]  # fmt: skip
        wrong = int((trained[0] - trained[-1]).abs().gt(_CLOSE).sum())
        wrong = sum(turns.comm.gather_objects(wrong))
        num_parameters = trained[0].numel()
        for library, fields in turns.time(runs, _STEPS).items():
            what = {"library": library, "collective": "ddp_step", "model": name}
            what |= {"bytes": 4 * num_parameters, "dtype": "float32"}
            rows.append(what | {"wrong": 0 if library == "none" else wrong} | fields)
    return rows


def _model(name: str, width: int, layers: int) -> tuple[Any, Any]:
    """Returns a model, the same on all ranks, and this rank's batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        rest = [each for _ in range(layers - 1) for each in (nn.ReLU(), nn.Linear(width, width))]
        return nn.Sequential(nn.Linear(width, width), *rest), torch.randn(16, width)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers), torch.randn(4, 16, width)


def _step(model: Any, batch: Any) -> Run:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), _RATE)

    def run() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return run


def print_table(rows: Sequence[Row]) -> None:
    """Prints a line for each problem: the times of all libraries, and gloo's over KCCL's."""
    print(f"{'':24}{'bytes':>10}{'kccl us':>12}{'gloo us':>12}{'none us':>12}{'gloo / kccl':>13}")
    problems = dict.fromkeys(
        (row["collective"], row.get("model", ""), row["bytes"]) for row in rows
    )
    for collective, model, nbytes in problems:
        found = {
            row["library"]: row
            for row in rows
            if (row["collective"], row.get("model", ""), row["bytes"])
            == (collective, model, nbytes)
        }
        times = {library: row["time_us"] for library, row in found.items()}
        none = f"{times['none']:12.1f}" if "none" in times else " " * 12
        notes = sorted({note for row in found.values() for note in row["notes"]})
        notes += ["WRONG"] if any(row["wrong"] for row in found.values()) else []
        print(
            f"{collective + ' ' + model:24}{nbytes:>10,}{times['kccl']:12.1f}{times['gloo']:12.1f}"
            f"{none}{times['gloo'] / times['kccl']:13.2f}  {' '.join(notes)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benches on all ranks, and prints a table on rank 0. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="kccl.bench.gloo", description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes of all_reduce")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each library")
    parser.add_argument("--json", action="store_true", help="print a document; tables to stderr")
    given = parser.parse_args(arguments)
    with kccl.init(backend="host") as comm:
        facts = machine(comm.world_size)
        rows = _rows(comm, given)
        if comm.rank == 0:
            import torch

            found = document(rows, facts | {"torch": torch.__version__})
            found["command"] = f"kccl run -n {comm.world_size} -- python -m kccl.bench.gloo"
            out = sys.stdout
            if given.json:
                sys.stdout = sys.stderr
            print_table(rows)
            sys.stdout = out
            if given.json:
                print(json.dumps(found))
    return int(any(row["wrong"] for row in rows))


def _rows(comm: kccl.Communicator, given: argparse.Namespace) -> list[Row]:
    import torch
    import torch.distributed as dist

    importlib.import_module("kccl.interop.torch")  # registers the backend
    # As torchrun does, so that ranks do not share cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.world_size))
    with tempfile.TemporaryDirectory() as folder:
        where = comm.gather_objects(folder)[0]
        store = dist.FileStore(f"{where}/store", comm.world_size)
        ranks = {"rank": comm.rank, "world_size": comm.world_size}
        dist.init_process_group("kccl", store=store, **ranks)
        groups = {"kccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        turns = Turns(comm, given.repeats)
        rows = all_reduce_rows(turns, groups, given.sizes)
        rows += step_rows(turns, groups, given.models)
        dist.destroy_process_group()
        comm.barrier()
    return rows


if __name__ == "__main__":
    sys.exit(main())
