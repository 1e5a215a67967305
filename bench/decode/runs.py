"""Timed runs of one engine at one position."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ..harness.measure import Row


@dataclass
class Runs:
    """The runs of one engine at one position."""

    tokens: list[list[int]] = field(default_factory=list)
    # Microseconds of each token of each run.
    steps_us: list[Any] = field(default_factory=list)
    # The bandwidth in bytes a second, measured before each run. Only KCCL's runs have it.
    reads: list[float] = field(default_factory=list)

    def add(self, tokens: list[int], times: list[float]) -> None:
        """Adds a run.

        `times` are in seconds: when the token before the first one came, and when each token came.
        """
        self.tokens.append(tokens)
        self.steps_us.append(np.diff(times) * 1e6)

    def are_equal(self) -> bool:
        """Tells whether all runs gave the same tokens."""
        return all(tokens == self.tokens[0] for tokens in self.tokens)

    def figures(self) -> Row:
        """Returns the fields of a row that say how fast they were."""
        means = [float(run.mean()) for run in self.steps_us]
        us = median(means)
        return {
            "tok_s": 1e6 / us,
            "us_per_token": us,
            "p99_us": float(np.percentile(np.concatenate(self.steps_us), 99)),
            "slowest_us": max(means),
        }

    def share(self, nbytes: int) -> float:
        """Returns the time to read `nbytes` over the time of a token, median of the runs.

        Each run is compared with the bandwidth that was measured just before it, because other
        programs change it from second to second.
        """
        pairs = zip(self.steps_us, self.reads, strict=True)
        return median(nbytes / read * 1e6 / float(run.mean()) for run, read in pairs)
