"""`kccl bench decode` on tiny models: rows, wrong tokens, arguments."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from decode_bench import FAST, ReferenceAsPeer, bench, document_of
from long import long_beyond_each

import kccl
from kccl.bench import compare
from kccl.bench.decode import report, tokens, variants
from kccl.bench.decode.gpu import states
from kccl.bench.decode.peers import PEERS
from kccl.engine import Engine
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.bounds import bytes_per_token
from kccl.engine.model.program import Program


@pytest.mark.usefixtures("no_peers")
def test_rows_are_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "bandwidth", lambda self: 2e9)
    path = tmp_path / "rows.csv"
    arguments = ("--random-weights", "tiny-laneformer", "-n", "2", "--positions", "40", "16")
    assert bench(*arguments, "--baselines", "--json", "--csv", str(path)) == 0
    made = document_of(capsys.readouterr().out)
    assert made["machine"]["ranks"] == 2
    assert [row["position"] for row in made["rows"]] == [16, 40]
    for row in made["rows"]:
        assert tuple(row) == report.COLUMNS
        assert row["library"] == "kccl"
        assert (row["world_size"], row["prompt_tokens"], row["new_tokens"]) == (2, 126, 5)
        assert row["tokens_match"]
        assert row["tok_s"] * row["us_per_token"] == pytest.approx(1e6)
        assert row["slowest_us"] >= row["us_per_token"]
        assert row["p99_us"] >= row["us_per_token"]
        assert row["ttft_steps"] == pytest.approx(row["ttft_ms"] * 1e3 / row["us_per_token"])
        assert row["bandwidth_gbps"] == 2
        program = Program(random_checkpoint("tiny-laneformer").config)
        bound_us = bytes_per_token(program, row["position"] + 2, 4) / 2e9 * 1e6
        assert row["bandwidth_share"] * row["us_per_token"] == pytest.approx(bound_us)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row) for row in rows] == [report.COLUMNS] * 2


@pytest.mark.long
@pytest.mark.usefixtures("no_peers")
def test_rounded_weights_are_checked_against_the_same_rounding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--model", "bundled", "--positions", "40", "--json", "--weights")
    assert bench(*arguments, "int4") == 0
    (row,) = document_of(capsys.readouterr().out)["rows"]
    assert (row["dtype"], row["tokens_match"]) == ("int4", True)
    assert bench(*arguments, "int4", "--baselines") == 2
    assert "on CPUs no other engine has the rounding of --weights" in capsys.readouterr().err


def test_rows_of_a_job() -> None:
    job = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-m", "kccl"]
    job += ["bench", "decode", *FAST, "--random-weights", "tiny-llama", "--json"]
    done = subprocess.run(job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (row,) = document_of(done.stdout)["rows"]
    assert (row["world_size"], row["tokens_match"]) == (2, True)


# ---- wrong tokens ----------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, is_spoilt: Any) -> None:
    """Changes the fourth token of those calls of Engine.timed() that is_spoilt() chooses."""
    timed = Engine.timed

    def spoilt(self: Engine, prompt: Any, max_tokens: int) -> Any:
        ids, times = timed(self, prompt, max_tokens)
        if is_spoilt(prompt, max_tokens):
            ids[3] = (ids[3] + 1) % 256
        return ids, times

    monkeypatch.setattr(Engine, "timed", spoilt)


def test_a_wrong_token_hides_the_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, lambda prompt, max_tokens: max_tokens == tokens.LENGTH)
    arguments = ("--random-weights", "tiny-llama", "--positions", "16", "30", "--json")
    assert bench(*arguments) == 1
    captured = capsys.readouterr()
    out = captured.err + captured.out
    assert "1 of 16 tokens differ" in out
    assert "kccl: wrong tokens" in out
    for row in document_of(out)["rows"]:
        assert not row["tokens_match"]
        for name in ("tok_s", "us_per_token", "p99_us", "slowest_us", "ttft_ms"):
            assert row[name] is None
        assert row["bandwidth_share"] is None


def test_a_wrong_timed_token_hides_the_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the same in all runs, at one position."""
    spoil(monkeypatch, lambda prompt, max_tokens: len(prompt) == 30 and max_tokens == 6)
    arguments = ("--positions", "16", "30", "--new-tokens", "5", "--json")
    assert bench("--random-weights", "tiny-llama", *arguments) == 1
    captured = capsys.readouterr()
    out = captured.err + captured.out
    assert "kccl at position 30: " in out
    rows = document_of(out)["rows"]
    assert [row["tokens_match"] for row in rows] == [True, False]
    assert [row["tok_s"] is None for row in rows] == [False, True]


def test_a_token_that_differs_from_run_to_run_hides_the_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def is_spoilt(prompt: Any, max_tokens: int) -> bool:
        is_run = len(prompt) == 30 and max_tokens == 6
        runs.extend([1] if is_run else [])
        return is_run and len(runs) == 2

    spoil(monkeypatch, is_spoilt)
    arguments = ("--random-weights", "tiny-llama", "--positions", "16", "30", "--json")
    assert bench(*arguments) == 1
    captured = capsys.readouterr()
    out = captured.err + captured.out
    assert "kccl: its tokens at position 30 differ from run to run" in out
    first, second = document_of(out)["rows"]
    assert first["tok_s"] > 0
    assert second["tok_s"] is None


@pytest.mark.parametrize("is_right", [True, False])
def test_a_speed_needs_the_hash_of_the_executor_without_overlap(
    is_right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, with the host's tokens."""
    opened, timed = Engine.__init__, Engine.timed
    asked = []

    def on_gpu(self: Engine, *args: Any, **given: Any) -> None:
        opened(self, *args, **given)
        self.backend = "cuda"

    def fake(self: Engine, prompt: Any, max_tokens: int, *, overlaps: bool = True) -> Any:
        ids, times = timed(self, prompt, max_tokens)
        if not overlaps:
            asked.append((len(prompt), max_tokens))
            ids[-1] = ids[-1] if is_right else (ids[-1] + 1) % 256
        return ids, times

    monkeypatch.setattr(Engine, "__init__", on_gpu)
    monkeypatch.setattr(Engine, "timed", fake)
    arguments = ("--random-weights", "tiny-llama", "--positions", "16", "30", "--json")
    assert bench(*arguments) == int(not is_right)
    # The token that ends the prompt, and those that are timed.
    assert asked == [(16, 6), (30, 6)]
    captured = capsys.readouterr()
    assert "kccl at position 30: the hash of 6 tokens is" in captured.err
    for row in document_of(captured.out)["rows"]:
        assert row["tokens_match"] is is_right
        assert (row["tok_s"] is not None) is is_right
        assert len(row["token_hash"]) == 16


def test_a_token_counts_where_the_reference_is_sure() -> None:
    margins = np.array([1.0, 5e-3, 5e-4, 1.0])
    known = tokens.Expected([1], [7, 0, 0, 7], np.full(4, 7), margins, 8.0, "float32")
    assert known.ours() == tokens.Verdict(compared=3, wrong=1, of=4)
    assert not known.ours().is_right
    rounded = tokens.Expected([1], [7, 0, 0, 7], np.full(4, 7), margins, 8.0, "bfloat16")
    assert rounded.ours() == tokens.Verdict(compared=2, wrong=0, of=4)
    assert rounded.ours().is_right
    # Another engine in BF16: only where the margin exceeds 8 / 32.
    assert known.theirs([7, 0, 0, 0]) == tokens.Verdict(compared=2, wrong=1, of=4)
    assert not tokens.Verdict(compared=0, wrong=0, of=4).is_right


# ---- arguments, records ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--random-weights", "tiny"), "'tiny' is none of the shapes"),
        (("--random-weights", "tiny-llama", "--positions", "123"), "must be from 1 to 122"),
        (("--random-weights", "tiny-llama", "--repeats", "0"), "--repeats is 0"),
        (("--random-weights", "tiny-llama", "--new-tokens", "0"), "--new-tokens is 0"),
        (
            ("--random-weights", "tiny-llama", "--csv", "/nowhere/x"),
            "cannot be written: No such file",
        ),
        (("--backend", "sim", "--baselines"), "no other engine runs on simulated GPUs"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_threads_as_ranks_are_refused_in_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    # There is no other rank to compare complaints with.
    monkeypatch.setattr("kccl.tools.complaints.Complaints.meet", lambda *_: None)
    assert bench("--random-weights", "tiny-llama", "-n", "2") == 2
    assert "ranks is 2: they are threads of one process" in capsys.readouterr().err


def test_decoding_is_compared() -> None:
    machine = {"cpu_model": "some CPU", "architecture": "x86_64", "cpus": 2, "allowed_cpus": 2}

    def made(**fields: Any) -> dict[str, Any]:
        row = dict.fromkeys(report.COLUMNS) | {"library": "kccl", "position": 128, "model": "m"}
        row |= {"us_per_token": 100.0, "tokens_match": True, "world_size": 1} | fields
        return {"machine": machine, "commit": "abc", "rows": [row]}

    found = compare.compare([made()], [made(us_per_token=110.0)])
    assert (found.worse, found.compared) == ([], 1)
    (finding,) = compare.compare([made()], [made(us_per_token=130.0)]).worse
    said = "decode m, position 128, 1 ranks: 130.000 us, was 100.000: 1.30 times, tolerance 1.15"
    assert str(finding) == said
    wrong = made(us_per_token=None, tokens_match=False)
    (finding,) = compare.compare([made()], [wrong]).worse
    assert str(finding).endswith("wrong tokens")
    assert compare.compare([made()], [made(position=1024)]).compared == 0


def test_a_readmes_table_has_the_newest_rows() -> None:
    machine = {"cpu_model": "some CPU", "allowed_cpus": 2}

    def made(commit: str, us: float, dtype: str = "bfloat16") -> dict[str, Any]:
        ours = dict.fromkeys(report.COLUMNS) | {"library": "kccl", "position": 128, "model": "m"}
        ours["dtype"] = dtype
        ours |= {"us_per_token": us, "tok_s": 1e6 / us, "world_size": 2, "bandwidth_share": 0.87}
        ours["tokens_match"] = True
        peer = ours | {"library": "llama.cpp", "us_per_token": 400.0, "tok_s": 2500.0}
        slow = peer | {"library": "transformers", "tok_s": 100.0}
        return {"machine": machine, "commit": commit, "rows": [ours, slow, peer]}

    lines = report.markdown([made("old", 250.0), made("new", 200.0)]).splitlines()
    assert lines[2] == "| m | 2 | 128 | 5,000 | 200 |  | 87% | 2,500 llama.cpp | 2.00 |  |"
    assert len(lines) == 5
    assert lines[-1] == "Medians, 2 cores of some CPU; commit new."
    # A format of fewer bits has a line of its own.
    lines = report.markdown([made("16 bits", 200.0), made("8 bits", 100.0, "fp8")]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| m", "| m, FP8"]


def test_a_readmes_table_of_what_parts_cost_has_the_newest_kernels() -> None:
    def made(commit: str, us: float) -> dict[str, Any]:
        row = dict.fromkeys(report.COLUMNS) | {"library": "kccl", "position": 128, "model": "m"}
        row |= {"world_size": 1, "us_per_token": us, "whole_us": 100.0, "ablated": "weights"}
        machine = {"cpu_model": "some CPU", "allowed_cpus": 2, "gpus": ["some GPU"]}
        return {"machine": machine, "commit": commit, "rows": [row | {"ablated": None}, row]}

    lines = variants.markdown([made("old", 80.0), made("new", 60.0)]).splitlines()
    assert lines[2:] == [
        "| m | 1 | 128 | weights | 60 | 100 | +40 |",
        "",
        "Medians, 1 x some GPU; commit new.",
    ]
    with pytest.raises(ValueError, match="no rows of kernels that leave something out"):
        variants.markdown([])


def test_the_state_is_that_of_the_gpus_in_use() -> None:
    uuids = ["0123456789abcdef0123456789abcdef", "f" * 32, "e" * 32]
    lines = [f"GPU-{UUID(uuid)}, {345 + i} MHz, 3201 MHz, 80 W, 36" for i, uuid in enumerate(uuids)]
    found = states("\n".join(lines), uuids[1::-1])
    assert [each["clocks.sm"] for each in found] == ["346 MHz", "345 MHz"]
    assert found[0]["temperature.gpu"] == "36"
    assert states(lines[0], uuids[1:]) == "nvidia-smi lists none of the GPUs"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--csv", "folder"), "--csv folder is a folder: name a file"),
        (("--csv", "/dev/full"), "--csv /dev/full cannot be written: No space left"),
        (("--backend", "sim", "--trace", "folder"), "--trace folder is a folder"),
        (("--backend", "sim", "--trace", "x.png"), "x.png is the name of its picture"),
        (("--traced-tokens", "2"), "--traced-tokens says how long --trace is: add --trace F"),
    ],
)
def test_files_and_flags_are_refused_before_anything_is_measured(
    argv: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert bench("--random-weights", "tiny-llama", *argv) == 2
    err = capsys.readouterr().err
    assert reason in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "baselines"),
    long_beyond_each([KeyboardInterrupt(), kccl.BackendError("it broke")], [(), ("--baselines",)]),
)
def test_positions_that_were_measured_outlive_what_ends_a_run(
    error: BaseException,
    baselines: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed = Engine.timed

    def failing(self: Engine, prompt: Any, max_tokens: int) -> Any:
        if len(prompt) == 30:
            raise error
        return timed(self, prompt, max_tokens)

    monkeypatch.setattr(Engine, "timed", failing)
    table = tmp_path / "rows.csv"
    monkeypatch.setitem(PEERS, "host", {"reference": ReferenceAsPeer})
    argv = ("--random-weights", "tiny-llama", "--positions", "16", "30", "--json", *baselines)
    code = bench(*argv, "--csv", str(table))
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    printed = capsys.readouterr()
    made = document_of(printed.out)
    libraries = ["kccl", *(["reference"] if baselines else [])]
    assert [(row["library"], row["position"]) for row in made["rows"]] == [
        (library, 16) for library in libraries
    ]
    # Beside peers there is memory for the reference only at the end.
    checked = None if baselines else True
    for row in made["rows"]:
        assert row["tokens_match"] is checked and row["tok_s"] > 0
    assert ("kccl: unchecked" in printed.err) is bool(baselines)
    assert "after 1 of 2 positions" in made["interrupted"] and made["interrupted"] in printed.err
    assert len(table.read_text("utf-8").splitlines()) == 1 + len(libraries)
