"""The runs of a comparison: which there are, at which rate, and which comes next.

A run is a variant, a seed, a number of steps and what all learning rates are multiplied by. First,
each variant is trained for fewer steps at each rate of a grid: the searches. Its full runs have the
rate whose search ended with the lowest held-out loss. A control changes one thing of a variant, and
has that variant's rate. In order: searches, all variants of a seed before the next seed, controls.
"""

import json
from dataclasses import dataclass
from pathlib import Path

VARIANTS = {
    "blocking": {"broadcast_delay": 0},
    "delay 1": {"broadcast_delay": 1},
    "delay 2": {"broadcast_delay": 2},
    "delay 4": {"broadcast_delay": 4},
    "none": {"use_attention_comm": False, "use_mlp_comm": False},
}
# Above the number of layers of any shape.
_ALL_LAYERS = 99
CONTROLS = {
    "delay 2, unscaled": ("delay 2", {"scales_lone": False}),
    "delay 2, silent start": ("delay 2", {"use_early_messages": False}),
    "none, unscaled": ("none", {"scales_lone": False}),
    # Early communication in all layers: the function is that of "blocking".
    "blocking, 8 residuals": (
        "blocking",
        {"broadcast_delay": _ALL_LAYERS, "use_early_comm": True},
    ),
}


def changes(variant: str) -> dict:
    """What a variant or a control changes in the configuration of its shape."""
    if variant in VARIANTS:
        return VARIANTS[variant]
    base, more = CONTROLS[variant]
    return VARIANTS[base] | more


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int
    steps: int
    rate: float | None
    """What the learning rates are multiplied by; None until the searches have said it."""


@dataclass(frozen=True)
class Plan:
    """A comparison: of one shape, with one grid of rates."""

    shape: str
    steps: int
    search_steps: int
    rates: tuple[float, ...]
    seeds: int
    has_controls: bool

    def runs(self, rows: list[dict]) -> list[Run]:
        """All runs in their order. `rows` are those that there are, with the searches' losses."""
        found = []
        if len(self.rates) > 1:
            for variant in VARIANTS:
                found += [Run(variant, 0, self.search_steps, rate) for rate in self.rates]
        for names in (VARIANTS, CONTROLS if self.has_controls else ()):
            for seed in range(self.seeds):
                found += [Run(name, seed, self.steps, self.best_rate(rows, name)) for name in names]
        return found

    def best_rate(self, rows: list[dict], variant: str) -> float | None:
        """The rate of a variant's full runs; None before its last search has ended."""
        if len(self.rates) == 1:
            return self.rates[0]
        base = CONTROLS[variant][0] if variant in CONTROLS else variant
        losses = {
            row["rate"]: row["held_out_loss"]
            for row in self.rows(rows)
            if row["variant"] == base and row["steps"] == self.search_steps and row["seed"] == 0
        }
        missing = set(self.rates) - set(losses)
        return None if missing else min(self.rates, key=lambda rate: losses[rate])

    def rows(self, rows: list[dict]) -> list[dict]:
        """Those of this plan's shape."""
        return [row for row in rows if row["shape"] == self.shape]

    def left(self, rows: list[dict]) -> list[Run]:
        """The runs that are missing, in their order."""
        ended = {run_of(row) for row in self.rows(rows)}
        return [run for run in self.runs(rows) if run not in ended]


def run_of(row: dict) -> Run:
    return Run(row["variant"], row["seed"], row["steps"], row["rate"])


class Owners:
    """Which process has compiled which variant. Compiling takes as long as hundreds of steps."""

    def __init__(self, search_steps: int) -> None:
        self.search_steps = search_steps
        self.of: dict[str, set[int]] = {}

    def choose(self, runs: list[Run], process: int) -> Run | None:
        """The run that a process is to do next.

        Searches come first, then full runs, then controls; among these, a variant that the process
        has compiled, or nobody has. Before it begins with controls, a process compiles what another
        has; but not for a search, which is too short for that.
        """

        def urgency(run: Run) -> tuple[int, bool]:
            is_near = process in self.of.get(run.variant, {process})
            if run.variant in CONTROLS:
                return 2, not is_near
            if run.steps > self.search_steps:
                return 1, not is_near
            return (0 if is_near else 3), not is_near

        chosen = min(runs, key=urgency, default=None)
        if chosen is not None:
            self.of.setdefault(chosen.variant, set()).add(process)
        return chosen

    def has_compiled(self, variant: str, process: int) -> bool:
        return process in self.of.get(variant, ())


def seconds_needed(run: Run, rows: list[dict], *, is_compiled: bool) -> float:
    """At most how long a run may take, from rows of the same shape and device; 0 without any."""
    rows = [row for row in rows if "first_step_seconds" in row]
    alike = [row for row in rows if row["variant"] == run.variant] or rows
    step = max(
        ((row["seconds"] - row["first_step_seconds"]) / row["steps"] for row in alike), default=0.0
    )
    compiling = max((row["first_step_seconds"] for row in rows), default=0.0)
    return run.steps * step + (0.0 if is_compiled else compiling)


def read(path: Path) -> list[dict]:
    """The runs of a file. Early ones had one rate, and no curve."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [{"rate": 1.0} | json.loads(line) for line in lines]
    for row in rows:
        row.setdefault("curve", [[row["tokens"], row["held_out_loss"]]])
    return rows
