"""Litmus tests for the simulator, written as text: "x=1; y=1.rel | y.acq; x".

Roles, each one thread, are separated by "|", their steps by ";":

    x=1  x=1.rel       store, relaxed or with release       x  x.acq       load
    x:=1  x:           plain store and load                 claim x        compare-and-swap of 0
    add x  add x.rel   adds 1
    p=1  p             packet of four words                 p=1/4  p/4     that tears in 4 bytes
    await x  await p   loads until all of it is not 0       fence  fence.sc
    sync               block barrier                        bare           gfx942's s_barrier alone
    fence packets      the fence that orders packets only

Words lie far apart, but for w and v: the lower and the upper 4 of 8 aligned bytes. p and q are
packets.

"@block", "@device" or "@system" behind a step is its scope. The default is that of the place.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from worlds import Program, Report, World

import kccl
from kccl.sim.machine import Simulation

SOURCE = Path(__file__).parents[1] / "kernels" / "litmus.cuh"
WARP_SIZES = {"sm_90": 32, "gfx942": 64}
KERNELS = (
    "kccl::litmus",
    *(f"kccl::lanes<kccl::Together::{how}>" for how in ("kSync", "kVote", "kShuffle")),
    *(f"kccl::credit<{meets}>" for meets in ("false", "true")),
    *(
        f"kccl::copies<kccl::Copying::{how}>"
        for how in (
            *("kRight", "kReadsEarly", "kWaitsForOther", "kNoFirstFence", "kNoFence"),
            *("kWriterFences", "kIssuerFences", "kWritesSource", "kCopiesOver", "kCopiesOverFree"),
            "kNotDrained",
        )
    ),
    *(f"kccl::ring<{pops_early}>" for pops_early in ("false", "true")),
)
# Where words lie, in units of 4 bytes.
_WORDS = {"x": 0, "y": 32, "z": 64, "w": 96, "v": 97, "p": 128, "q": 160}
_NUM_RESULTS = 16
# How many runs by seeds; and at most by the exhaustive schedule, which needs fewer for every test.
SEEDS = 100
MOST_RUNS = 6000

# As in litmus.cuh.
_WHAT = ("load", "store", "plain load", "plain store", "packet", "store packet", "await")
_WHAT += ("await packet", "claim", "add", "fence", "fence packets", "sync", "bare")
_ORDERS = {"": 0, "acq": 1, "rel": 2, "fence": 3, "sc": 4}
_SCOPES = ("block", "device", "system")


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint8) for name in ("what", "order", "scope", "word")),
        ("value", ctypes.c_uint32),
    )


class _Role(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint8) for name in ("rank", "block", "warp", "num_steps")),
        ("steps", _Step * 12),
    )


class _Test(ctypes.Structure):
    _fields_ = (("roles", _Role * 4),)


_FORM = re.compile(
    r"(?P<verb>await |claim |add |fence packets|fence|sync|bare|)(?P<word>[xyzwvpq]?)(?P<plain>:?)"
    r"(=(?P<value>\d))?(/(?P<unit>[48]))?(\.(?P<order>acq|rel|sc))?(@(?P<scope>block|device|system))?"
)


def _step(text: str, scope: str) -> _Step:
    match = _FORM.fullmatch(text)
    assert match is not None, text
    verb, word, order = match["verb"].strip(), match["word"], match["order"] or ""
    kind = verb or ("load" if match["value"] is None else "store")
    if match["plain"]:
        kind = f"plain {kind}"
    if verb == "fence":
        order = order or "fence"
    value = int(match["value"] or 1)
    if word in ("p", "q"):
        kind = {"load": "packet", "store": "store packet", "await": "await packet"}[kind]
        value = int(match["unit"] or 8)
    return _Step(
        _WHAT.index(kind),
        _ORDERS[order],
        _SCOPES.index(match["scope"] or scope),
        _WORDS[word or "x"],
        value,
    )


def _places(place: str, num_roles: int) -> list[tuple[int, int, int]]:
    """(rank, block, warp) of each role.

    Args:
        place: The narrowest scope that holds all roles, or rank, block and warp of each, as in
            "000 001 100".
    """
    if place in _SCOPES:
        units = {"block": (0, 0, 1), "device": (0, 1, 0), "system": (1, 0, 0)}[place]
        return [tuple(role * unit for unit in units) for role in range(num_roles)]
    return [tuple(map(int, digits)) for digits in place.split()]


# ---- Machines --------------------------------------------------------------------------------


class Machine:
    """A world of four ranks, with memory and results for litmus tests."""

    def __init__(self, model: str, schedule: str, checks: bool) -> None:
        warp_size = WARP_SIZES[model]
        self.world = World(
            4,
            Simulation(
                warp_size=warp_size,
                model=model,
                schedule=schedule,
                checks=checks,
                ends_when_stuck=True,
                trace_events=0,
            ),
        )
        self.warp_size = warp_size
        self.is_exhaustive = schedule == "exhaustive"
        self.memory = self.world.window(4096)
        self.results = np.zeros((4, _NUM_RESULTS), np.uint32)

    def program(self, steps: str, place: str) -> Program:
        """The launches of a test."""
        roles = [role.split(";") for role in steps.split("|")]
        scope = place if place in _SCOPES else "system"
        places = _places(place, len(roles))
        test = _Test()
        for role in test.roles:
            role.rank = 255
        for role, texts, where in zip(test.roles, roles, places, strict=False):
            role.rank, role.block, role.warp = where
            role.num_steps = len(texts)
            for index, text in enumerate(texts):
                role.steps[index] = _step(text.strip(), scope)
        return [
            [
                self.world.launch(
                    rank,
                    compiled(self.warp_size).kernel("kccl::litmus"),
                    self.memory.ctypes.data,
                    self.results,
                    np.uint32(rank),
                    test,
                    grid=1 + max(block for on, block, _ in places if on == rank),
                    block=self.warp_size * (1 + max(warp for on, _, warp in places if on == rank)),
                )
            ]
            for rank in sorted({rank for rank, _, _ in places})
        ]

    def reports(self, program: Program, limit: int) -> Iterator[Report]:
        """Runs with seeds 0 to limit - 1; or, exhaustive, all schedules, but at most `limit`."""
        if self.is_exhaustive:
            return self.world.explore(program, limit=limit)
        return (self.world.run(program, seed) for seed in range(limit))

    def outcome(self, steps: str) -> tuple[list[int], dict[str, int]]:
        """What the last run's loads returned, in the order of the text; and each word's value."""
        loads = []
        for role, row in zip(steps.split("|"), self.results, strict=False):
            count = 0
            for text in role.split(";"):
                match = _FORM.fullmatch(text.strip())
                assert match is not None
                if match["verb"] in ("", "claim ") and match["value"] is None:
                    count += 4 if match["word"] in ("p", "q") else 1
            loads += [int(value) for value in row[:count]]
        words = self.memory[0].view(np.uint32)
        return loads, {name: int(words[at]) for name, at in _WORDS.items()}


@lru_cache
def compiled(warp_size: int) -> kccl.Module:
    return kccl.compile(SOURCE, KERNELS, warp_size=warp_size)


@lru_cache
def machine(model: str, schedule: str, checks: bool) -> Machine:
    return Machine(model, schedule, checks)


# ---- Tests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        word: "seen" or "never"; or a finding's kind.
        runs: How many runs it took, or all of them.
        is_whole: The runs were all schedules that there are.
    """

    word: str
    runs: int
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.word} {self.runs}{'*' if self.is_whole else ''}"


def look_for(steps: str, outcome: str, place: str, on: Machine, limit: int) -> Answer:
    """Looks for a run with an outcome.

    Args:
        outcome: Values of the loads, as in "1 0", where "_" is any value; and of words at the end,
            as in "x=2".
    """
    values = [value for value in outcome.split() if "=" not in value]
    words = dict(value.split("=") for value in outcome.split() if "=" in value)
    runs = 0
    for report in on.reports(on.program(steps, place), limit):
        runs += 1
        assert not report.findings, report.findings[0]
        loads, ends = on.outcome(steps)
        is_so = all(want in ("_", str(got)) for want, got in zip(values, loads, strict=True))
        if is_so and all(ends[name] == int(value) for name, value in words.items()):
            return Answer("seen", runs, False)
    return Answer("never", runs, on.is_exhaustive and runs < limit)


def look_for_finding(steps: str, place: str, on: Machine, limit: int) -> Answer:
    """The kind of the first finding, or "none"."""
    runs = 0
    for report in on.reports(on.program(steps, place), limit):
        runs += 1
        if report.findings:
            return Answer(report.findings[0].kind, runs, False)
    return Answer("none", runs, on.is_exhaustive and runs < limit)
