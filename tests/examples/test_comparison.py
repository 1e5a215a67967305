"""The plan and the tables of examples/train_laneformer's comparison. Neither needs PyTorch."""

import json
from pathlib import Path

import figures
import pytest
from runs import CONTROLS, VARIANTS, Owners, Plan, Run, read, run_of, seconds_needed

PLAN = Plan("deep", 100, 20, (0.5, 1.0), seeds=2, has_controls=True)


def row(variant, seed=0, steps=100, rate=1.0, loss=2.0, **more):
    curve = [[50, loss + 1], [100, loss]]
    names = {"variant": variant, "seed": seed, "shape": "deep", "steps": steps, "rate": rate}
    rest = {"tokens": 100, "held_out_loss": loss, "held_out_bits_per_byte": loss / 2}
    return names | rest | {"curve": curve} | more


def searches(variant, losses):
    return [row(variant, steps=20, rate=rate, loss=loss) for rate, loss in losses.items()]


def test_searches_come_first_and_controls_last():
    runs = PLAN.runs([])
    number = len(VARIANTS)
    assert [run.steps for run in runs[: 2 * number]] == [20] * 2 * number
    assert [(run.variant, run.seed) for run in runs[2 * number :]] == [
        (name, seed) for names in (VARIANTS, CONTROLS) for seed in range(2) for name in names
    ]


def test_a_rate_is_that_of_the_best_search():
    rows = searches("delay 2", {0.5: 2.1, 1.0: 2.2})
    assert PLAN.best_rate(rows[:1], "delay 2") is None
    assert PLAN.best_rate(rows, "delay 2") == 0.5
    assert PLAN.best_rate(rows, "delay 2, unscaled") == 0.5
    assert PLAN.best_rate(rows, "none") is None
    # Those of another shape say nothing.
    assert PLAN.best_rate([each | {"shape": "tiny"} for each in rows], "delay 2") is None


def test_what_there_is_is_not_done_again():
    rows = [*searches("none", {0.5: 2.1, 1.0: 2.0}), row("none"), row("none", seed=1)]
    left = PLAN.left(rows)
    assert len(left) == len(PLAN.runs([])) - len(rows)
    assert not any(run.variant == "none" for run in left)
    # A run at a rate that is not the chosen one is none of the plan's.
    assert len(PLAN.left([*rows[:3], row("none", seed=1, rate=0.5)])) == len(left) + 1


def test_a_process_stays_with_what_it_has_compiled():
    owners = Owners(search_steps=5)
    runs = [Run(name, seed, 9, 1.0) for seed in range(2) for name in ("none", "blocking")]
    assert owners.choose(runs, 0) == runs[0]
    assert owners.choose(runs, 1) == runs[1]
    assert owners.choose(runs[2:], 1) == runs[3]
    assert owners.choose(runs[2:], 0) == runs[2]
    # It compiles what another has before it begins with controls, but not for a search.
    control, search = Run("none, unscaled", 0, 9, 1.0), Run("blocking", 0, 5, 1.0)
    assert owners.choose([search, control], 0) == control
    assert owners.choose([control, runs[3]], 0) == runs[3]
    assert owners.has_compiled("blocking", 0) and not owners.has_compiled("none", 1)
    assert owners.choose([], 0) is None


def test_time_is_foreseen_from_the_slowest_run():
    rows = [
        row("a", steps=20, seconds=30.0, first_step_seconds=20.0),
        row("b", steps=20, seconds=45.0, first_step_seconds=25.0),
    ]
    assert seconds_needed(Run("a", 0, 100, 1.0), rows, is_compiled=True) == 50
    assert seconds_needed(Run("a", 0, 100, 1.0), rows, is_compiled=False) == 75
    assert seconds_needed(Run("c", 0, 100, 1.0), rows, is_compiled=True) == 100
    assert seconds_needed(Run("c", 0, 100, 1.0), [], is_compiled=False) == 0


def test_early_files_have_one_rate_and_no_curve(tmp_path):
    old = {key: value for key, value in row("none").items() if key not in ("rate", "curve")}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    (found,) = read(tmp_path / "old.jsonl")
    assert run_of(found) == Run("none", 0, 100, 1.0)
    assert found["curve"] == [[100, 2.0]]
    assert read(tmp_path / "none.jsonl") == []


def test_differences_are_those_of_equal_seeds():
    """Seeds differ by more than variants do, and a seed is missing."""
    blocking = [row("blocking", seed=0, loss=2.0), row("blocking", seed=1, loss=3.0)]
    delayed = [row("delay 1", seed=1, loss=3.125), row("delay 1", seed=2, loss=9.0)]
    assert figures.behind(delayed, blocking) == [(50, 0.125), (100, 0.125)]
    search = searches("delay 1", {0.5: 4.0, 1.0: 5.0})
    text = figures.tables([*search, *blocking, *delayed])
    assert "| blocking | 1 | 2.5000 | +0.0000 | 1.2500 | 2.0000, 3.0000 |" in text
    assert "| delay 1 | 1 | 6.0625 | +0.1250 | 3.0312 | 3.1250, 9.0000 |" in text
    assert "| delay 1 | +0.1250 | +0.1250 |" in text
    assert "| delay 1 | 4.0000 | 5.0000 |" in text


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures.plot([row("blocking"), row("none", loss=2.5)], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "has_curves"),
    [("comparison.jsonl", True), ("comparison16.jsonl", True), ("comparison16_rates.jsonl", False)],
)
def test_the_readmes_tables_are_those_of_its_runs(name, has_curves):
    folder = Path(figures.__file__).parent
    found = figures.tables(read(folder / name)).split("\n\n")
    text = (folder / "README.md").read_text()
    curves = "| loss minus blocking's"
    wanted = [part for part in found if has_curves or not part.startswith(curves)]
    assert [part for part in wanted if part.startswith("|") and part not in text] == []
