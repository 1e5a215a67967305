"""The simulator's memory shows what PTX and AMD's memory model allow, and nothing that they forbid.

    python tests/sim/test_litmus.py

prints the table. csrc/sim/MODEL.md explains it; litmus.py says how a test is written,
litmus_rows.py has those whose steps are text.
"""

from dataclasses import dataclass

import litmus
import numpy as np
import pytest
from litmus import MOST_RUNS, SEEDS, Answer, machine
from litmus_rows import ALLOWED, BOTH, GFX942, OUTCOMES, SM_90, VERDICTS, Row


@dataclass(frozen=True)
class KernelRow:
    """A test that is a kernel of litmus.cuh: its finding, and gfx942's where that differs."""

    kernel: str
    finding: str
    reference: str
    num_warps: int = 2
    on_gfx942: str = ""


PROXIES = "PTX Proxies, Asynchronous Operations"
KERNELS = (
    KernelRow("lanes<kccl::Together::kSync>", "none", "PTX bar.warp.sync", 1),
    KernelRow("lanes<kccl::Together::kVote>", "data_race", "CUDA guide, warp vote functions", 1),
    KernelRow("lanes<kccl::Together::kShuffle>", "data_race", "CUDA guide, warp shuffles", 1),
    KernelRow("credit<true>", "none", "MODEL.md: caused", 1),
    KernelRow("credit<false>", "reused_slot", "MODEL.md: caused", 1),
    KernelRow("copies<kccl::Copying::kRight>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kReadsEarly>", "data_race", PROXIES),
    KernelRow("copies<kccl::Copying::kWaitsForOther>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kNoFirstFence>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kNoFence>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kWriterFences>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kIssuerFences>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kWritesSource>", "data_race", PROXIES, on_gfx942="none"),
    KernelRow("copies<kccl::Copying::kCopiesOver>", "data_race", PROXIES),
    KernelRow("copies<kccl::Copying::kCopiesOverFree>", "none", PROXIES),
    KernelRow("copies<kccl::Copying::kNotDrained>", "undrained", PROXIES, on_gfx942="none"),
    KernelRow("ring<false>", "none", PROXIES),
    KernelRow("ring<true>", "data_race", PROXIES),
)


def answers_of(row: Row, place: str, model: str) -> list[Answer]:
    """The answer by seeds; for the row's first model also that by all schedules."""
    is_verdict = row in VERDICTS
    look = litmus.look_for_finding if is_verdict else litmus.look_for
    wanted = () if is_verdict else (row.outcome,)
    limits = {"mixed": SEEDS, "exhaustive": MOST_RUNS if model == row.models[0] else 0}
    # Rows of outcomes run without checks, which would report the races that the outcomes need.
    return [
        look(row.steps, *wanted, place, machine(model, schedule, is_verdict), limit)
        for schedule, limit in limits.items()
        if limit
    ]


def expected(row: Row | KernelRow, model: str) -> str:
    if isinstance(row, KernelRow):
        return row.on_gfx942 if row.on_gfx942 and model == GFX942 else row.finding
    if row in OUTCOMES:
        return "seen" if row.book == ALLOWED else "never"
    return row.outcome


def kernel_answer(row: KernelRow, model: str) -> tuple[Answer, bool]:
    """What every run found; and whether in some run a copy completed before an earlier one."""
    on = machine(model, "mixed", True)
    source = np.empty(5 * 64, np.uint32)
    results = np.empty(1 + 2 * 64, np.uint32)
    what = row.kernel.partition("<")[0]
    program = []
    for rank in range(2 if what == "credit" else 1):
        args = {
            "lanes": (results,),
            "credit": (on.memory.ctypes.data, np.uint32(rank)),
            "copies": (source, results),
            "ring": (on.world.device_comm(0), source, results),
        }[what]
        kernel = litmus.compiled(on.warp_size).kernel(f"kccl::{row.kernel}")
        block = row.num_warps * on.warp_size
        program.append([on.world.launch(rank, kernel, *args, block=block)])
    words = set()
    was_passed = False
    for run in range(SEEDS):
        source[:] = np.arange(source.size)
        results[:] = 0
        report = on.world.run(program, run)
        words.add(report.findings[0].kind if report.findings else "none")
        if report.findings:
            continue
        was_passed = was_passed or bool(report.stats["late_copies"] and results[0])
        if what == "copies" and row.kernel != "copies<kccl::Copying::kWritesSource>":
            threads = np.arange(2 * on.warp_size)
            assert (results[1 : 1 + threads.size] == source[threads % 64]).all()
    return Answer(" or ".join(words), SEEDS, False), was_passed


def cases(rows):
    return [
        pytest.param(row, place, model, id=f"{row.name}-{place}-{model}".replace(" ", "_"))
        for row in rows
        for place in row.places
        for model in row.models
    ]


@pytest.mark.long
@pytest.mark.parametrize(("row", "place", "model"), cases([*OUTCOMES, *VERDICTS]))
def test_litmus(row, place, model):
    for answer in answers_of(row, place, model):
        assert answer.word == expected(row, model), answer
        assert answer.is_whole or answer.word not in ("never", "none") or answer.runs == SEEDS


@pytest.mark.long
@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.kernel.replace("kccl::", ""))
def test_kernel(row, model):
    answer, was_passed = kernel_answer(row, model)
    assert answer.word == expected(row, model), answer
    # On sm_90, where copies are asynchronous, some complete late and out of order.
    is_late = model == SM_90 and row.kernel == "copies<kccl::Copying::kRight>"
    assert was_passed or not is_late


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(("reader", "kind"), [("000", "none"), ("100", "data_race")])
def test_kernel_boundary(reader, kind, model):
    """A launch is ordered after the one before it on its rank's stream, and after nothing else."""
    on = machine(model, "mixed", True)
    (write,), (read,) = on.program("x:=1", "000") + on.program("x:", reader)
    program = [[write, read]] if reader == "000" else [[write], [read]]
    findings = [each for seed in range(SEEDS) for each in on.world.run(program, seed).findings]
    assert {finding.kind for finding in findings} == ({kind} - {"none"})


def main() -> None:
    """Prints the table: for each model how many runs it took, by seeds and by the exhaustive
    schedule. A star: these were all schedules. A row's numbers are those of its slowest place.
    """
    form = "{:18} {:55} {:9} {:13} {:30} {:20} {}"
    print(form.format("test", "steps", "outcome", "book", *BOTH, "reference"))
    for row in (*OUTCOMES, *VERDICTS):
        cells = dict.fromkeys(BOTH, "")
        for model in row.models:
            answers = [answers_of(row, place, model) for place in row.places]
            by_schedule = [
                max(some, key=lambda each: each.runs) for some in zip(*answers, strict=True)
            ]
            cells[model] = ", ".join(map(str, by_schedule))
        outcome, book = (row.outcome, row.book) if row in OUTCOMES else ("", "finding")
        print(form.format(row.name, row.steps, outcome, book, *cells.values(), row.reference))
    for kernel in KERNELS:
        cells = {model: str(kernel_answer(kernel, model)[0]) for model in BOTH}
        name = kernel.kernel.replace("kccl::", "")
        print(form.format("", name, "", "finding", *cells.values(), kernel.reference))


if __name__ == "__main__":
    main()
