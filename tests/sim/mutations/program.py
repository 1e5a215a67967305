"""A program that shows planted bugs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from sim_machine import Machine
from sim_programs import Script

from kccl.base import abi

NARROW = {"epoch_bits": 4}
# What ranks end with when a message is too long.
REFUSED = (abi.lib.kKcclMessageTooLong, abi.lib.kKcclAborted)
# When something is opened that is open.
OPENED_TWICE = (abi.lib.kKcclOpenedTwice, abi.lib.kKcclAborted)
# And when a rank does not come.
TIMED_OUT = (abi.lib.kKcclTimeout, abi.lib.kKcclAborted)


@dataclass(frozen=True)
class Program:
    """A program that shows mutations.

    Attributes:
        make: Adds the calls to a Script that has begun no launch.
        world_size: Ranks.
        kinds: The kinds of the calls.
        machine: Fields of Machine.
        right: The kind of a right run's Outcome.
        is_exact: No sum is rounded; else its rounding depends on the order of the ranks.
        statuses: What ranks may end with; empty: anything, where `right` is "failed_call".
    """

    make: Callable[[Script], None]
    world_size: int
    kinds: tuple[str, ...]
    machine: dict = field(default_factory=dict)
    right: str = ""
    is_exact: bool = True
    statuses: tuple[int, ...] = ()

    def script(self, **machine):
        script = Script(
            self.world_size,
            Machine(**{**self.machine, **machine}),
            salt=1,
            kinds=self.kinds,
            is_exact=self.is_exact,
        )
        script.failures = self.statuses
        self.make(script)
        return script
