"""Chooses the algorithm of a call. Needs no device and no communicator."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.dtypes import Dtype
from ..base.env import Env
from ..base.errors import InvalidArgument
from .lookup import algorithms, of_collective
from .spec import Request
from .specs import BY_NAME
from .tuning import Threshold, Tuning, tuning_for

# Number of plans that a communicator keeps. When there are more, all are dropped and made again.
_KNOWN_PLANS = 1024


@dataclass(frozen=True)
class Plan:
    """The algorithm chosen for a call, and why.

    Attributes:
        name: The algorithm.
        request: The call to be run.
        reason: Why this algorithm.
        rejected: (name, why not) for each other algorithm of the collective.
        blocks, threads: As in Threshold.
    """

    name: str
    request: Request
    reason: str
    rejected: tuple[tuple[str, str], ...]
    blocks: int = 0
    threads: int = 0

    def handle(self, backend: Any, *, moved: int | None = None, **fields: Any) -> Any:
        """Returns the call that a backend runs for the plan.

        Args:
            backend: The backend.
            moved: What the ranks compare as the element type of a call that only moves data; see
                abi.moved_type().
            fields: Keyword arguments of Backend.call().
        """
        handle = backend.call(self.name, (self.blocks, self.threads), **fields)
        if moved is not None:
            # One kernel moves elements of all types, so the handle was made without the call's
            # type. The type is set here, because the ranks compare it.
            handle.call.dtype = moved
        return handle

    def explain(self) -> str:
        """Returns the choice in words, one line for each algorithm."""
        request = self.request
        dtype = f" {request.dtype.name}" if request.dtype else ""
        shape = f", at most {self.blocks} blocks of {self.threads} threads" if self.blocks else ""
        lines = [
            f"{request.collective} of {request.nbytes} bytes{dtype} over {request.world_size} "
            f"ranks on {request.backend}",
            f"  {self.name}: {self.reason} ({self._moves()}){shape}",
            *(f"  not {name}: {why}" for name, why in self.rejected),
        ]
        return "\n".join(lines)

    def _moves(self) -> str:
        return BY_NAME[self.name].moves


class Planner:
    """Makes and keeps the plans of one communicator.

    Attributes:
        preferred: The algorithm to use wherever it can run, as KCCL_ALGORITHM says; "" for none.
    """

    def __init__(self, backend: str, world_size: int, env: Env, *, can_attach: bool) -> None:
        self._backend = backend
        self._world_size = world_size
        self._env = env
        self.preferred = env.algorithm
        self._can_attach = can_attach
        self._plans: dict[tuple[str, int, Dtype | None, str], Plan] = {}

    def __call__(
        self, collective: str, nbytes: int = 0, dtype: Dtype | None = None, algorithm: str = ""
    ) -> Plan:
        """Returns the plan of a call. `algorithm` forces an algorithm by name; "" lets the plan
        choose.

        Raises:
            InvalidArgument: There is no such collective, or the algorithm cannot run the call.
        """
        key = (collective, nbytes, dtype, algorithm)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _KNOWN_PLANS:
                self._plans.clear()
            request = Request(
                collective,
                nbytes,
                self._world_size,
                self._backend,
                dtype,
                can_attach=self._can_attach,
            )
            tuning = tuning_for(self._backend, self._env.tuning)
            plan = choose(request, tuning, forced=algorithm, preferred=self.preferred)
            self._plans[key] = plan
        return plan

    def of_parts(
        self, kernel: str, collective: str, nbytes: int, dtype: Dtype, algorithm: str
    ) -> Plan:
        """Returns the plan of a call whose parts differ in length.

        Args:
            kernel: The kernel that makes the call, whatever its size.
            collective, nbytes, dtype, algorithm: As in a call of the Planner.

        Raises:
            InvalidArgument: Another algorithm is asked for.
        """
        request = Request(collective, nbytes, self._world_size, self._backend, dtype)
        return plan_of_parts(kernel, request, self.algorithms(collective), algorithm)

    def algorithms(self, collective: str) -> list[str]:
        """Returns the names of a collective's algorithms."""
        return algorithms(collective)


def plan_of_parts(name: str, request: Request, others: list[str], forced: str) -> Plan:
    """Returns the only plan of a call whose parts differ in length.

    Args:
        name: The algorithm of the call.
        request: The call.
        others: The collective's algorithms for parts of one length.
        forced: As in choose().

    Raises:
        InvalidArgument: Another algorithm is asked for.
    """
    if forced not in ("", name):
        raise InvalidArgument(f"algorithm is {forced!r}, must be {name!r} where counts are given")
    reason = "asked for by name" if forced else "the parts have lengths of their own"
    return Plan(name, request, reason, tuple((each, "for equal parts only") for each in others))


def choose(request: Request, tuning: Tuning, forced: str = "", preferred: str = "") -> Plan:
    """Picks the algorithm for a request.

    Args:
        request: The call to be run.
        tuning: Measured thresholds.
        forced: Name of the algorithm to use, whatever the table says; "" for none.
        preferred: Name of the algorithm to use if it can run the request; "" for none.

    Raises:
        InvalidArgument: The collective is unknown. Or the forced algorithm is unknown, is of
            another collective, or cannot run the request.
    """
    obstacles = {spec.name: spec.why_not(request) for spec in of_collective(request.collective)}
    if forced:
        if forced not in obstacles:
            raise InvalidArgument(
                f"algorithm is {forced!r}, must be an algorithm of {request.collective}: "
                f"{', '.join(obstacles)}"
            )
        if obstacles[forced]:
            raise InvalidArgument(f"algorithm {forced!r} cannot run this: {obstacles[forced]}")
        name, reason, line = forced, "asked for by name", None
        why_others = "another was asked for by name"
    elif preferred in obstacles and not obstacles[preferred]:
        name, reason, line = preferred, "KCCL_ALGORITHM prefers it", None
        why_others = "KCCL_ALGORITHM prefers another"
    else:
        name, reason, line = _by_tuning(request, tuning, obstacles)
        why_others = "not chosen at this size"
    rejected = tuple(
        (other, obstacle or why_others) for other, obstacle in obstacles.items() if other != name
    )
    shape = (line.blocks, line.threads) if line is not None else (0, 0)
    return Plan(name, request, reason, rejected, *shape)


def _by_tuning(
    request: Request, tuning: Tuning, obstacles: dict[str, str | None]
) -> tuple[str, str, Threshold | None]:
    for line in tuning.of(request.world_size):
        fits = line.up_to_bytes is None or request.nbytes <= line.up_to_bytes
        if line.collective == request.collective and fits and not obstacles[line.algorithm]:
            sizes = "any size" if line.up_to_bytes is None else f"up to {line.up_to_bytes} bytes"
            origin = f", {tuning.origin}" if tuning.origin else ""
            machine = tuning.machine_of(request.world_size)
            of = f" for {machine}" if machine else ""
            reason = f"chosen for {sizes} by {Path(tuning.source).name}{of}{origin}"
            return line.algorithm, reason, line
    able = [name for name, obstacle in obstacles.items() if not obstacle]
    return able[-1], "no algorithm in the tuning table can run this", None
