"""`kccl bench --compare`: what is worse, what is only noise, what cannot be compared."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_world import row

from kccl.bench import compare
from kccl.bench.decode import report
from kccl.bench.harness import document, measure
from kccl.tools import cli

RECORDS = sorted(compare.RECORDS.glob("*.jsonl"))
MACHINE = {"cpu_model": "some CPU", "architecture": "x86_64", "cpus": 2, "allowed_cpus": 2}


def made(*rows: measure.Row, **machine: Any) -> document.Document:
    return {"machine": MACHINE | machine, "commit": "abc", "command": "kccl", "rows": list(rows)}


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compares two documents by the command; returns its exit code and what it printed."""

    def run(old: document.Document, new: document.Document) -> tuple[int, str]:
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, each in zip(paths, (old, new), strict=True):
            path.write_text("# a table\n" + json.dumps(each) + "\n", "utf-8")
        code = cli.main(["bench", "--compare", *map(str, paths)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_planted_regression_is_found(compared: Any) -> None:
    old = made(row(time_us=1.0), row(bytes=16, time_us=2.0))
    code, text = compared(old, made(row(time_us=1.1), row(bytes=16, time_us=2.2)))
    assert code == 0 and "2 rows compared" in text and "0 worse" in text
    code, text = compared(old, made(row(time_us=1.1), row(bytes=16, time_us=2.6)))
    assert code == 1
    assert (
        "worse: all_reduce float32 sum eager prepared, 16 B, 2 ranks: 2.600 us, was 2.000" in text
    )
    code, text = compared(made(row(bytes=16, time_us=2.6)), old)
    assert code == 0 and "1 better" in text


def test_the_tolerance_is_the_spread_of_both_runs() -> None:
    def worse(*, spread: float, us: float) -> bool:
        rows = [row(time_us=1.0, q1_us=1.0, q3_us=1.0 + spread)]
        rows.append(row(time_us=us, q1_us=us, q3_us=us * (1 + spread)))
        return bool(compare.compare([made(rows[0])], [made(rows[1])]).worse)

    assert worse(spread=0.0, us=1.2)
    assert not worse(spread=0.1, us=1.2)
    assert worse(spread=0.1, us=1.4)


@pytest.mark.parametrize(
    "doubtful",
    [
        {"notes": ["shared_core"]},
        {"notes": ["busy"]},
        {"notes": ["below_floor"]},
        {"notes": ["drift"]},
        {"floor_before_us": 1.0, "floor_after_us": 1.2},
    ],
)
def test_a_slower_row_of_another_machine_state_is_no_finding(
    doubtful: dict[str, Any], compared: Any
) -> None:
    floors = {"floor_before_us": 0.3, "floor_after_us": 0.3}
    code, text = compared(made(row(**floors)), made(row(**floors | doubtful, time_us=9.0)))
    assert code == 0
    assert "1 row (all_reduce float32 sum eager prepared, 8 B, 2 ranks) slower, but maybe" in text
    # A case that takes as long as before is not reported.
    code, text = compared(made(row(**floors)), made(row(**floors | doubtful)))
    assert code == 0 and "maybe" not in text


def test_rows_without_a_partner_are_named(compared: Any) -> None:
    alone = [row(bytes=nbytes) for nbytes in (16, 32, 64, 128)]
    code, text = compared(made(row(), row(mode="host")), made(row(), *alone))
    assert code == 0
    assert "# 4 rows (all_reduce float32 sum eager prepared, 16 B, 2 ranks; " in text
    assert "and 1 more) of " in text and "new.json without a partner in " in text
    assert "# 1 row (all_reduce float32 sum host prepared, 8 B, 2 ranks) of " in text
    code, text = compared(made(row()), made(row(world_size=4)))
    assert code == 2 and "no rows could be compared" in text


def test_a_wrong_row_is_worse_than_any(compared: Any) -> None:
    code, text = compared(made(row()), made(row(wrong=3, time_us=None)))
    assert code == 1 and "8 B, 2 ranks: wrong elements" in text


def test_other_machines_are_compared_with_a_warning(compared: Any) -> None:
    code, text = compared(made(row()), made(row(), cpus=64))
    assert code == 0 and "# the machines differ" in text


def test_each_algorithm_in_kernels_has_its_own_partner() -> None:
    fast = row(mode="in_kernel", algorithm="fast", time_us=1.0)
    slow = row(mode="in_kernel", algorithm="slow", time_us=2.0)
    few = row(mode="in_kernel", algorithm="slow", time_us=3.0, blocks=8)
    found = compare.compare([made(few, slow, fast)], [made(fast, slow, few)])
    assert (found.worse, found.compared) == ([], 3)


def test_the_newest_row_of_a_call_counts() -> None:
    old = [made(row(time_us=9.0)), made(row(time_us=1.0))]
    assert len(compare.compare(old, [made(row(time_us=1.5))]).worse) == 1


def test_one_file_is_compared_with_the_records_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "RECORDS", tmp_path)
    records = [made(row(time_us=1.0), row(bytes=16)), made(row(time_us=0.1), cpus=64)]
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    new = tmp_path / "new.json"
    for us, code in ((1.1, 0), (1.5, 1)):
        new.write_text(json.dumps(made(row(time_us=us))))
        assert cli.main(["bench", "--compare", str(new)]) == code
        assert "compared with the records of this machine" in capsys.readouterr().out
    monkeypatch.setattr(compare, "RECORDS", tmp_path / "none")
    assert cli.main(["bench", "--compare", str(new)]) == 2
    assert "in a checkout of kccl only: name two files" in capsys.readouterr().err


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_can_be_compared_with_itself(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["bench", "--compare", str(path), str(path)])
    printed = capsys.readouterr()
    rows = [each for document_ in document.load(path) for each in document_["rows"]]
    has_times = any(each.get("us_per_token") or each.get("time_us") for each in rows)
    assert code == (0 if has_times and path.stem != "gfx942_estimates" else 2), printed


@pytest.mark.parametrize(
    "pairs",
    [
        [*pairwise(RECORDS)],
        pytest.param([*combinations(RECORDS, 2)], marks=pytest.mark.long),
    ],
    ids=["neighbours", "all"],
)
def test_every_two_records_can_be_compared(
    pairs: list[tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    for old, new in pairs:
        assert cli.main(["bench", "--compare", str(old), str(new)]) in (0, 1, 2)
        assert "rows compared" in capsys.readouterr().out.replace("1 row ", "1 rows ")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("missing.json",), "missing.json cannot be read: No such file"),
        (("empty.json",), "empty.json holds no document: was it made with --json?"),
        (("broken.json",), "broken.json has a line that begins like JSON and is none"),
        (("a", "b", "c"), "takes one or two files, not 3"),
        (("empty.json", "--csv", "x", "-v"), "leave out --csv, --verbose"),
    ],
)
def test_files_that_hold_nothing_are_sentences(
    argv: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("# a table\n")
    (tmp_path / "broken.json").write_text('{"rows": [')
    assert cli.main(["bench", "--compare", *argv]) == 2
    assert reason in capsys.readouterr().err
    assert cli.main(["bench", "all_reduce", "--compare", *argv]) == 2
    assert "leave out all_reduce" in capsys.readouterr().err


def test_rows_with_drafts_have_partners_of_their_own() -> None:
    """Rows that are older than drafts had none."""
    older: measure.Row = {
        "library": "kccl",
        "model": "m",
        "backend": "host",
        "world_size": 1,
        "position": 128,
    }
    older |= {"us_per_token": 100.0, "tok_s": 1e4, "tokens_match": True, "dtype": "bfloat16"}
    plain, some = older | {"us_per_token": 101.0, "drafts": "off"}, older | {"drafts": 3}
    some["us_per_token"] = 40.0
    found = compare.compare([made(older)], [made(plain, some)])
    assert (found.compared, found.better, found.worse) == (1, 0, [])
    assert found.alone[0] == ["decode m, position 128, 1 ranks, drafts 3"]
    found = compare.compare([made(plain, some)], [made(older, some | {"us_per_token": 80.0})])
    assert [each.row["drafts"] for each in found.worse] == [3]
    assert found.compared == 2
    assert report.ours_and_best([plain, some]) == [(plain, None)]
