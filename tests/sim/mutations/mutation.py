"""A planted bug: a change of the device source's text, and the findings that it must lead to."""

from dataclasses import dataclass

RACE = frozenset({"data_race"})
NARROW = frozenset({"narrow_scope"})
TWO_WRITERS = frozenset({"two_writers"})
OPENED_TWICE = frozenset({"opened_twice"})
THREADS_DIFFER = frozenset({"threads_differ"})
LATE = frozenset({"late_timeout"})
STUCK = frozenset({"deadlock"})
DIVERGENT = frozenset({"divergence", "deadlock"})
UNDRAINED = frozenset({"undrained"})
WRONG = frozenset({"wrong_data"})
INVALID = frozenset({"invalid_access"})
# A call behind a failure is ok, or a rank ends with another failure than it should.
FAILURE = frozenset({"wrong_status", "failure_lost"})
# What should be refused is not, or what should not be is.
ACCEPTED_CALL = frozenset({"", "wrong_data", "wrong_status"})
REFUSED_CALL = frozenset({"failed_call", "wrong_status"})
# A word of another call is taken for this call's, or data that only looks complete.
STALE = frozenset({"stale_word", "reused_slot", "wrong_data"})
# A slot is written before it is free. A reader that missed what was there then waits for ever.
REUSED = frozenset({"reused_slot", "two_writers", "stale_word", "deadlock"})


@dataclass(frozen=True)
class Edit:
    """A text that occurs exactly once in a file of csrc, and its replacement."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A planted bug.

    Attributes:
        name: What to call it.
        broken: What is wrong, in words.
        program: What shows it, one of PROGRAMS.
        verdicts: Kinds of an Outcome that count as caught.
        edits: The bug.
        max_seeds: It is caught within so many, from 0.
        machine: Fields of Machine that are not the program's own.
    """

    name: str
    broken: str
    program: str
    verdicts: frozenset[str]
    edits: tuple[Edit, ...]
    max_seeds: int
    machine: dict


def bug(name, broken, program, verdicts, *edits, max_seeds=6, **machine):
    """A Mutation; further keywords are fields of Machine."""
    return Mutation(name, broken, program, verdicts, edits, max_seeds, machine)
