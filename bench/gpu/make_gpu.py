"""`make gpu`: runs the tests and benches that need GPUs, offline, in five minutes at most.

    python3 -m kccl.bench.gpu --out out --parts "tests torch bench plots"

First it builds what changed of the extension, in place, and compiles kernels on all cores. The
parts:

- tests: tests/hardware without those of PyTorch, NCCL's API and decoding. With pytest-xdist, tests
  of one and two ranks run side by side, one on each pair of GPUs.
- torch: the tests of PyTorch.
- bench: kccl and its peers, and calls inside kernels. The benches of a world size run in one job.
- nccl: only if requested. The tests of libkccl_nccl.so, which they build.
- decode: only if requested. The tests of decoding, then the engine and its peers on the shapes of
  known models.
- plots: a picture of each document of the part bench.

Benches run with 4, 2 and 1 GPUs, and tests with all their world sizes. If tests and benches share
the time, both run with the largest world size only; a test that has no larger world size runs too.
Each part has a budget. A step that exceeds it is ended, and the summary names what it was doing.
The output of each step and bench is kept in the folder as NAME.txt. A bench's document is
NAME.json, one line as in bench/records. The exit code is 1 when a step failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .steps import Execute, Run, Step, execute_processes, heed_sigterm

if TYPE_CHECKING:
    from ..harness.collective import Collective

# The seconds of each part, in the order in which they run, if the usual parts are requested. If
# not, the requested parts share the time in this proportion. Time that a part does not use goes to
# the next part.
BUDGETS_S = {
    "tests": 130.0,
    "torch": 50.0,
    "nccl": 270.0,
    "bench": 85.0,
    "decode": 270.0,
    "plots": 6.0,
}
PARTS = tuple(BUDGETS_S)
USUAL_PARTS = tuple(part for part in PARTS if part not in ("nccl", "decode"))
LIMIT_S = 300.0
# The fraction of the whole time limit that is kept for the steps before the first part.
_READY_SHARE = 0.1

_NEEDED = ("numpy", "ml_dtypes", "rich", "cffi")
# One of these modules is needed: the bindings of NVIDIA's driver, or those of AMD's.
_BINDINGS = ("cuda.bindings", "hip")
_OF_TESTS = ("pytest",)
_NEEDED_BY = {"tests": _OF_TESTS, "torch": _OF_TESTS, "bench": (), "plots": ("matplotlib",)}
_NEEDED_BY["nccl"] = _OF_TESTS
_NEEDED_BY["decode"] = (*_OF_TESTS, "safetensors", "tokenizers")
# Optional. Without them tests are skipped and peers are missing, and the output says so.
_HELPFUL = ("torch", "cupy")
# pytest-xdist: runs tests side by side.
_SIDE_BY_SIDE = "xdist"
_ONE_CALL = "import kccl; kccl.run_threads(lambda comm: comm.barrier(), 1)"
# World sizes of the benches, the largest first.
_WORLD_SIZES = (4, 2, 1)
_TESTS_OF_TORCH = ("tests/hardware/test_torch.py", "tests/hardware/test_torch_scripts.py")
_TESTS_OF_NCCL = "tests/hardware/test_nccl_api.py"
_TESTS_OF_DECODING = "tests/hardware/test_decode.py"
# Shapes of models for the part decode, the most important first. The first one also runs on several
# GPUs.
_SHAPES = ("laneformer-2b", "llama-1b", "smollm2", "qwen3-0.6b")
_DECODE = "decode_"
_BUILD_LIMIT_S = 150.0
_STEP_LIMIT_S = 90.0
_WARM_LIMIT_S = 25.0


def main(argv: Sequence[str] | None = None, execute: Execute | None = None) -> int:
    """Run the requested parts. Returns the exit code.

    Args:
        argv: Arguments; None for those of this process.
        execute: Runs a command; None runs it as a process.
    """
    parser = argparse.ArgumentParser(
        prog="python3 -m kccl.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
    usual = " ".join(USUAL_PARTS)
    parts_help = f"some of: {', '.join(PARTS)} ({usual})"
    parser.add_argument("--parts", default=usual, help=parts_help)
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds (300)")
    args = parser.parse_args(argv)
    parts = args.parts.split()
    unknown = set(parts) - set(PARTS)
    if unknown or not parts:
        parser.error(f"--parts is {args.parts!r}, must be some of {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    scale = args.limit * (1 - _READY_SHARE) / sum(BUDGETS_S[part] for part in parts)
    budgets_s = {part: BUDGETS_S[part] * scale for part in parts}
    run = Run(args.out, args.limit, execute or execute_processes, budgets_s)
    is_short = "bench" in parts and bool({"tests", "torch"} & set(parts))
    run_by: dict[str, Callable[[Run, int], None]] = {
        "tests": partial(_tests, is_short=is_short),
        "torch": partial(_torch, is_short=is_short),
        "nccl": _nccl,
        "bench": partial(_bench, is_short=is_short),
        "decode": _decode,
        "plots": _plots,
    }
    if _is_ready(run, parts):
        num_gpus = 0 if parts == ["plots"] else _num_gpus(run)
        _warm(run, parts, num_gpus)
        for part in PARTS:
            if part in parts and (num_gpus or part == "plots"):
                run.begin_part(part)
                run_by[part](run, num_gpus)
    print(run.summary(), flush=True)
    return int(any(each.failure is not None for each in run.results))


@dataclass(frozen=True)
class Suite:
    """The benches of one world size.

    Attributes:
        world_size: Number of ranks, with one GPU each.
        benches: Name -> arguments of `kccl bench`, in the order in which they run.
    """

    world_size: int
    benches: dict[str, tuple[str, ...]]

    def step(self, name: str, benches: Sequence[str], out: Path) -> Step:
        """Returns a step that runs some of the benches in one job of bench/gpu/suite.py."""
        launcher = ("-m", "kccl", "run", "-n", str(self.world_size), "--", sys.executable)
        job = ("-m", "kccl.bench.gpu.suite", "--out", str(out.resolve()))
        calls = (f"{bench}: {' '.join(self.benches[bench])}" for bench in benches)
        return Step(name, (*launcher, *job, *calls), LIMIT_S)


def suites(num_gpus: int) -> list[Suite]:
    """Returns the suites for this number of GPUs. In each, the most important benches come
    first.
    """
    found: list[Suite] = []
    for world_size in _WORLD_SIZES:
        if world_size > num_gpus:
            continue
        is_largest = not found
        # One GPU exchanges nothing, so it has neither links to fill nor peers to start.
        has_peers = world_size > 1
        peers = ("--baselines",) if has_peers else ()
        outside: dict[str, tuple[str, ...]] = {}
        inside: dict[str, tuple[str, ...]] = {}
        for collective in _by_importance("outside", is_most=is_largest and has_peers):
            sizes = collective.on_gpus.sizes
            if is_largest and has_peers and collective.on_gpus.sizes_of_largest:
                sizes = collective.on_gpus.sizes_of_largest
            outside[f"{collective.name}_{world_size}"] = (collective.name, *sizes, *peers)
        for collective in _by_importance("inside", is_most=is_largest):
            # Calls within one GPU do not depend on the number of GPUs.
            if has_peers or any(form.is_within for form in collective.forms):
                arguments = (collective.name, "--in-kernel", *collective.on_gpus.sizes_inside)
                inside[f"{collective.name}_in_kernel_{world_size}"] = arguments
        first = next(iter(outside))
        found.append(Suite(world_size, {first: outside[first]} | inside | outside))
    return found


def shapes_of(num_gpus: int) -> dict[str, tuple[str, int]]:
    """Returns the decode benches for this number of GPUs, in their order: name -> (shape,
    ranks).
    """
    sizes = [size for size in _WORLD_SIZES if size <= num_gpus]
    pairs = [(_SHAPES[0], size) for size in sizes] + [(shape, 1) for shape in _SHAPES[1:]]
    return {f"{_DECODE}{shape}_{size}": (shape, size) for shape, size in pairs}


def _by_importance(where: Literal["outside", "inside"], *, is_most: bool) -> list[Collective]:
    """Returns the collectives that are measured outside or inside kernels, most important first.

    Args:
        where: "outside" for calls from the host, "inside" for calls inside kernels.
        is_most: True for all these collectives; False for those that are measured at every world
            size.
    """
    # Imported here, so that without NumPy this program can still report what is missing.
    from ..collectives import NAMES, load

    tables = [
        table
        for table in map(load, NAMES)
        if (table.forms if where == "inside" else not table.only_in_kernels)
        and not table.is_on_cpus
        and (is_most or getattr(table.on_gpus, where) == "all")
    ]
    return sorted(
        tables, key=lambda each: (getattr(each.on_gpus, where) != "all", each.on_gpus.order)
    )


# ---- Parts -----------------------------------------------------------------------------------


def _is_ready(run: Run, parts: Sequence[str]) -> bool:
    """Checks that Python has the modules needed, and builds the extension. Returns whether all
    succeeded.
    """
    wanted = [*_NEEDED, *(name for part in parts for name in _NEEDED_BY[part])]
    if not any(map(_is_there, _BINDINGS)):
        wanted.append(_BINDINGS[0])
    missing = [name for name in wanted if not _is_there(name)]
    for name in _HELPFUL:
        if not _is_there(name):
            print(f"# {name} is not installed: its tests are skipped and its rows are missing")
    if missing:
        cure = "pip install them, or put their wheels on PYTHONPATH"
        return run.note("modules", 0.0, f"{sys.executable} lacks {', '.join(missing)}: {cure}")
    # setup.py compiles only what changed, and takes half a second if nothing did.
    if not run.take(Step("build", ("setup.py", "build_ext", "--inplace"), _BUILD_LIMIT_S)):
        return False
    return run.take(Step("extension", ("-c", _ONE_CALL), _STEP_LIMIT_S))


def _num_gpus(run: Run) -> int:
    """Returns the number of GPUs. Having none is noted as a failure."""
    program = "from kccl import gpu; print(gpu.backend(), gpu.num_devices())"
    if not run.take(Step("gpus", ("-c", program), _STEP_LIMIT_S)):
        return 0
    count = int((run.out / "gpus.txt").read_text().split()[-1])
    if count == 0:
        run.note("gpus", 0.0, "there is no GPU")
    return count


def _backend(run: Run) -> str:
    """Returns the name of the backend of this machine's GPUs."""
    return (run.out / "gpus.txt").read_text().split()[-2]


def _warm(run: Run, parts: Sequence[str], num_gpus: int) -> None:
    """Compiles kernels on all cores, so that tests and benches need not compile them in turn."""
    sizes = [str(size) for size in _WORLD_SIZES if size <= num_gpus]
    if not sizes:
        return
    if not {"tests", "torch", "bench"} & set(parts):
        return
    # tests/hardware runs benches too.
    warm = ("kccl.bench.gpu.warm",) if {"tests", "bench"} & set(parts) else ("kccl", "warm")
    # Benches need only sums of bfloat16.
    few = () if {"tests", "torch"} & set(parts) else ("-d", "bfloat16", "--op", "sum")
    run.take(Step("kernels", ("-m", *warm, "-n", *sizes, *few), _WARM_LIMIT_S, is_needed=False))


def _tests(run: Run, num_gpus: int, *, is_short: bool) -> None:
    others = (*_TESTS_OF_TORCH, _TESTS_OF_NCCL, _TESTS_OF_DECODING)
    ignored = (f"--ignore={other}" for other in others)
    _pytest(run, "tests", num_gpus, is_short, "tests/hardware", *ignored)


def _torch(run: Run, num_gpus: int, *, is_short: bool) -> None:
    _pytest(run, "torch", num_gpus, is_short, *_TESTS_OF_TORCH)


def _nccl(run: Run, num_gpus: int) -> None:
    """One process builds the library once, for its tests."""
    # -rP prints the times that a test has measured.
    options = ("-v", "-rP", "--durations=0", "--durations-min=2", "-p", "no:cacheprovider")
    run.take(Step("nccl", ("-m", "pytest", *options, _TESTS_OF_NCCL), LIMIT_S))


def _pytest(run: Run, name: str, num_gpus: int, is_short: bool, *what: str) -> None:
    """Runs tests of one and two ranks side by side on pairs of GPUs, then tests of four ranks."""
    # -v prints a test's name before it runs, so that the output of an ended step shows the test.
    options = ("-v", "--durations=0", "--durations-min=2", "-p", "no:cacheprovider")
    # Prints a time behind each test, because a step that is ended at its limit prints no table of
    # durations. Not for pytest-xdist, where that time is not the test's.
    times = ("-o", "console_output_style=times")
    most = ("--most-of", str(num_gpus)) if is_short else ()
    pytest, rest = ("-m", "pytest"), (*options, *what, *most)
    num_pairs = num_gpus // 2
    if num_pairs < 2 or not _is_there(_SIDE_BY_SIDE):
        run.take(Step(name, (*pytest, *times, *rest), LIMIT_S))
        return
    in_pairs = ("-n", str(num_pairs), "--dist", "loadgroup", "--world-sizes", "1,2")
    run.take(Step(f"{name}_of_pairs", (*pytest, *rest, *in_pairs), LIMIT_S))
    of_four = (*pytest, *times, *rest, "--world-sizes", "4")
    run.take(Step(f"{name}_of_four", of_four, LIMIT_S))


def _bench(run: Run, num_gpus: int, *, is_short: bool) -> None:
    found = suites(num_gpus)
    for suite in found[:1] if is_short else found:
        _run_suite(run, suite)


def _run_suite(run: Run, suite: Suite) -> None:
    """Runs all benches of a suite. If one ends the job, those after it run in another job."""
    missing = list(suite.benches)
    for name in missing:
        (run.out / f"{name}.json").unlink(missing_ok=True)
    for number in count(1):
        step = f"benches_{suite.world_size}" + (f"_{number}" if number > 1 else "")
        # Looks for documents and not at the exit code: a bench with a wrong row makes the exit code
        # 1, but has a document and must not run again.
        run.take(suite.step(step, missing, run.out))
        missing = [name for name in missing if not (run.out / f"{name}.json").exists()]
        if not missing:
            return
        run.note(missing[0], 0.0, f"no document: see {step}.txt")
        missing = missing[1:]
        if not missing or run.is_over():
            break
    for name in missing:
        run.note(name, 0.0, "not run")


def _decode(run: Run, num_gpus: int) -> None:
    from ..harness.document import load

    options = ("-v", "--durations=0", "--durations-min=2", "-p", "no:cacheprovider")
    run.take(Step(f"{_DECODE}tests", ("-m", "pytest", *options, _TESTS_OF_DECODING), LIMIT_S))
    for name, (shape, size) in shapes_of(num_gpus).items():
        document = run.out / f"{name}.json"
        document.unlink(missing_ok=True)
        # On several GPUs a peer needs a process for each rank, which `kccl run` starts.
        job = ("-m", "kccl", "run", "-n", str(size), "--", sys.executable) if size > 1 else ()
        bench = ("bench", "decode", "--baselines", "--json", "--positions", "512", "--repeats", "5")
        what = ("--random-weights", shape, "--backend", _backend(run))
        if run.take(Step(name, (*job, "-m", "kccl", *bench, *what), LIMIT_S)):
            document.write_text(json.dumps(load(run.out / f"{name}.txt")[-1]) + "\n", "utf-8")


def _plots(run: Run, _: int) -> None:
    documents = [
        path for path in sorted(run.out.glob("*.json")) if not path.name.startswith(_DECODE)
    ]
    if not documents:
        run.note("plots", 0.0, f"{run.out} has no document: run the part bench")
        return
    paths = [str(path.resolve()) for path in documents]
    run.take(Step("plots", ("-m", "kccl.bench.plot", *paths), _STEP_LIMIT_S))


# ---- Helpers ---------------------------------------------------------------------------------


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(main())
