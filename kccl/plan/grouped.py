"""Plans of calls for communicators of several groups: a list of steps, where other plans have one
kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from ..base import dtypes
from ..base.dtypes import Dtype
from ..base.env import Env
from ..base.errors import InvalidArgument
from . import forms
from .choice import Plan, choose, plan_of_parts
from .forms.parts import OF_PARTS
from .grouping import MOST_GROUPED_RANKS, Grouping
from .spec import Request
from .steps import INPUT, MOST_POSTED_BYTES, Form, Step, Steps
from .tuning import tuning_for

# The usual limit for calls that ranks do not post (Form.from_bytes). From this many bytes on, each
# rank of a group reduces a part of an all_reduce across groups, and the parts of
# all_to_all, scatter and scan are messages.
_DIVIDES_FROM_BYTES = 65536


@dataclass(frozen=True)
class GroupedPlan(Plan):
    """The form (a way to make a collective of steps, steps.py) that is chosen for a call over
    groups.

    Attributes:
        moves: See Form.
        steps: The steps on this rank, to be shown. They are those of a call with root 0 and op
            "sum".
        teams: This rank's teams in words.
        make: Makes the steps from KcclCall's fields.
    """

    moves: str = ""
    steps: tuple[Step, ...] = ()
    teams: str = ""
    make: Callable[..., Steps] = Steps

    def handle(self, backend: Any, *, moved: int | None = None, **fields: Any) -> Any:
        """See Plan."""
        channel = fields.pop("channel", 0)
        return backend.chain(self.make, self.request, channel, moved=moved, **fields)

    def explain(self) -> str:
        """See Plan: the choice, the teams and the steps."""
        head, _, rejected = super().explain().partition("\n")
        lines = [head, *rejected.splitlines(), f"  {self.teams}"]
        alike = groupby(
            self.steps, lambda step: replace(step, source=INPUT, target=INPUT, number=0)
        )
        for i, (step, run) in enumerate(alike, 1):
            lines.append(f"  step {i}: {step.explain(len(list(run)))}")
        if not self.steps:
            lines.append(f"  steps: those of {self.request.collective}, and copies of the parts")
        return "\n".join(lines)

    def _moves(self) -> str:
        return self.moves


class PlanOfMessages(GroupedPlan):
    """A plan of all_to_all in which each part is a message between two ranks.

    Calls with counts have such plans, because no rank knows the longest part of all. Long calls
    without counts have them, too.
    """

    def handle(self, backend: Any, *, moved: int | None = None, **fields: Any) -> Any:
        """See Plan."""
        del moved  # Messages have no type.
        equal = [fields["count"]] * self.request.world_size
        sends, receives = fields.get("sends", equal), fields.get("receives", equal)
        return backend.parts(sends, receives, fields.get("channel", 0))

    def explain(self) -> str:
        """See Plan."""
        return Plan.explain(self)


class GroupedPlanner:
    """Makes the plans of one communicator that has groups; see Planner."""

    def __init__(self, backend: str, grouping: Grouping, rank: int, env: Env) -> None:
        if grouping.world_size > MOST_GROUPED_RANKS:
            raise InvalidArgument(
                f"world_size is {grouping.world_size}, must be at most {MOST_GROUPED_RANKS}"
            )
        self._backend, self._grouping, self._rank, self._env = backend, grouping, rank, env
        self.preferred = env.algorithm
        self._plans: dict[tuple[str, int, Dtype | None, str], GroupedPlan] = {}

    def __call__(
        self, collective: str, nbytes: int = 0, dtype: Dtype | None = None, algorithm: str = ""
    ) -> GroupedPlan:
        """See Planner."""
        key = (collective, nbytes, dtype, algorithm)
        plan = self._plans.get(key)
        if plan is None:
            self._plans[key] = plan = self._plan(*key)
        return plan

    def of_parts(
        self, kernel: str, collective: str, nbytes: int, dtype: Dtype, algorithm: str
    ) -> Plan:
        """See Planner.

        Raises:
            InvalidArgument: Another algorithm is asked for.
        """
        goes_by_messages = collective not in OF_PARTS
        name = f"{collective}_{'by_messages' if goes_by_messages else 'grouped_parts'}"
        request = Request(collective, nbytes, self._grouping.world_size, self._backend, dtype)
        plan = plan_of_parts(name, request, self.algorithms(collective), algorithm)
        facts = name, request, plan.reason, plan.rejected
        if goes_by_messages:
            return PlanOfMessages(*facts, moves="each part is a message to its rank")
        form = Form(
            name, "the steps of equal parts, all as long as the longest", OF_PARTS[collective]
        )
        return GroupedPlan(
            *facts,
            moves=form.moves,
            teams=self._grouping.explain(self._rank),
            make=partial(self._steps, form),
        )

    def algorithms(self, collective: str) -> list[str]:
        """See Planner."""
        return [form.name for form in forms.of_collective(collective)[0]]

    def _plan(
        self, collective: str, nbytes: int, dtype: Dtype | None, algorithm: str
    ) -> GroupedPlan:
        every, fields = forms.of_collective(collective)
        request = Request(collective, nbytes, self._grouping.world_size, self._backend, dtype)
        obstacles = {form.name: form.why_not(request, self._grouping) for form in every}
        able = {form.name: form for form in every if not obstacles[form.name]}
        if algorithm in obstacles and algorithm not in able:
            raise InvalidArgument(
                f"algorithm {algorithm!r} cannot run this: {obstacles[algorithm]}"
            )
        if algorithm and algorithm not in able:
            raise InvalidArgument(f"algorithm is {algorithm!r}, must be one of {', '.join(able)}")
        chosen, reason, why_others = self._choose(able, nbytes, algorithm)
        why = {name: obstacle or why_others for name, obstacle in obstacles.items()}
        rejected = tuple((name, text) for name, text in why.items() if name != chosen.name)
        make = partial(self._steps, chosen)
        kind = PlanOfMessages if chosen.by_messages else GroupedPlan
        plan = kind(chosen.name, request, reason, rejected, moves=chosen.moves, make=make)
        teams = self._grouping.explain(self._rank)
        shown = tuple(make(**fields(request)).steps)
        return replace(plan, steps=shown, teams=teams)

    def _choose(self, able: dict[str, Form], nbytes: int, forced: str) -> tuple[Form, str, str]:
        """Returns the form, why it is chosen, and why the others are not."""
        if forced:
            return able[forced], "asked for by name", "another was asked for by name"
        preferred = able.get(self.preferred)
        if preferred is not None:
            return preferred, "KCCL_ALGORITHM prefers it", "KCCL_ALGORITHM prefers another"
        posted = next((form for form in able.values() if form.posts is not None), None)
        if posted is not None:
            reason = f"each rank posts at most {MOST_POSTED_BYTES} bytes of it"
            return posted, reason, "not chosen where ranks can post this"
        if len(able) == 1:
            (only,) = able.values()
            return only, "it is the only one that can run this", ""
        fits = []
        for i, form in enumerate(able.values()):
            usual = _DIVIDES_FROM_BYTES if i else 0
            limit = usual if form.from_bytes is None else form.from_bytes
            if nbytes >= limit:
                fits.append((form, limit))
        chosen, limit = fits[-1]
        reason = f"chosen by size, from {limit} bytes on"
        return chosen, reason, "not chosen at this size"

    def _steps(self, form: Form, **fields: Any) -> Steps:
        made = Steps(self._grouping, self._rank, self._kernel)
        form.make(made, **fields)
        return made

    def _kernel(self, collective: str, nbytes: int, dtype: str, ranks: int) -> str:
        # can_attach is False: a warning that a rank may no longer read a peer's memory would name
        # the ranks by the team's numbers.
        kind = dtypes.of(dtype)
        request = Request(collective, nbytes, ranks, self._backend, kind, can_attach=False)
        tuning = tuning_for(self._backend, self._env.tuning)
        return choose(request, tuning, preferred=self.preferred).name
