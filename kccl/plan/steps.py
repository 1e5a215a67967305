"""The steps of a call over groups: which kernel runs with which team (a set of at most 8 ranks,
kccl/ranks/team.py), on which part of the message.

The steps have the same kernels on the same teams on all ranks, whatever the rank and the root:
csrc/host/chain.cpp says why that matters. So if only some teams have something to send in a step,
the others make the same call with a message that nobody needs.

Partial sums of floats of 8 and 16 bits travel as float32. So a result is rounded once, at the end,
and an average is divided at the end. The order of a sum differs from that of a communicator of at
most 8 ranks: each team sums in the order of its ranks, and then the teams' sums are summed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..base import dtypes
from ..base.abi import MAX_WORLD_SIZE, POSTING_BYTES
from .grouping import ACROSS_GROUPS, OWN_GROUP, Grouping
from .spec import KernelSpec, Request
from .specs import BY_NAME

_ALIGNMENT = 128
MOST_POSTED_BYTES = 16384
"""The most bytes that a rank posts in a call. In a scatter only the root posts, and its bytes are
all chunks together. Longer calls go through the teams, whose ranks share the copies and the sums.
"""

Choose = Callable[[str, int, str, int], str]
"""Returns the kernel for a step, from its collective, its bytes as in Request, its element type and
the number of ranks of its team.
"""


class Place(Enum):
    """An array that a step reads or writes: the caller's or temporary memory (KcclPlace of
    csrc/host/chain.inc).
    """

    INPUT = 0
    OUTPUT = 1
    TEMPORARY = 2


@dataclass(frozen=True)
class Part:
    """A part of a message: the array in which it lies, and its offset there in bytes."""

    place: Place
    offset: int = 0

    def at(self, offset: int) -> "Part":
        """Returns the part that begins `offset` bytes later."""
        return replace(self, offset=self.offset + offset)


INPUT, OUTPUT = Part(Place.INPUT), Part(Place.OUTPUT)


@dataclass(frozen=True)
class Take:
    """What a step takes of another rank's posting; KcclTake of csrc/host/chain.inc.

    Attributes:
        source: The rank that posts.
        from_offset: Offset of the taken bytes in what that rank posts, in bytes.
        to_offset: Offset at which they are stored, in bytes from the step's target on.
        num_bytes: Number of bytes taken.
    """

    source: int
    from_offset: int
    to_offset: int
    num_bytes: int

    def within(self, begin: int, length: int) -> "Take | None":
        """Returns the piece that lies within `length` posted bytes from `begin` on; None if there
        is none.

        The from_offset of the piece counts from `begin` on.
        """
        first = max(self.from_offset, begin)
        last = min(self.from_offset + self.num_bytes, begin + length)
        if last <= first:
            return None
        to = self.to_offset + first - self.from_offset
        return Take(self.source, first - begin, to, last - first)


@dataclass(frozen=True)
class Message:
    """A message of a step, to another rank or from it; KcclMessage of csrc/host/api.inc.

    Attributes:
        peer: The other rank.
        offset: Where the bytes begin in the step's source, or in its target if they are received.
        num_bytes: Number of bytes.
        receives: True if this rank receives the message.
    """

    peer: int
    offset: int
    num_bytes: int
    receives: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a call.

    Attributes:
        kernel: A kernel's name; or "copy", "convert" or "reduce", which need no other rank.
        source, target: The parts that the step reads and writes.
        count: KcclCall.count. For "copy" it is bytes, for "convert" elements, for "reduce" elements
            of each row.
        team: OWN_GROUP or ACROSS_GROUPS; None if the step needs no other rank.
        ranks: Number of ranks of the team.
        dtype, op, peer: As in KcclCall. `peer` is a number in the team.
        to_dtype, divisor: For "convert", the type of the result, and the number by which it is
            divided.
        rows: The number of rows of "reduce", one behind the other.
        last: Where the last row of "reduce" lies; None if it is behind the others.
        number: Number of calls of teams before this step, the same on every rank.
        between_nodes: The collective, if the team's ranks are on different nodes and make it by
            MPI; else "".
        posted: Bytes that this rank posts for all ranks; None if ranks do not post in this step.
        takes: What the rank then takes from other ranks' postings.
        compares_always: True if the ranks compare each call of a step of postings, not only some.
        messages: What the rank sends to other ranks and receives from them.
    """

    kernel: str
    source: Part
    target: Part
    count: int
    team: int | None = None
    ranks: int = 1
    dtype: str = "float32"
    op: str = "sum"
    peer: int = 0
    to_dtype: str = "float32"
    divisor: int = 1
    rows: int = 0
    last: Part | None = None
    number: int = 0
    between_nodes: str = ""
    posted: int | None = None
    takes: tuple[Take, ...] = ()
    compares_always: bool = False
    messages: tuple[Message, ...] = ()

    @property
    def only_moves(self) -> bool:
        """Tells whether the step is a call of several ranks that computes nothing."""
        spec = BY_NAME.get(self.kernel)
        return spec is not None and spec.only_moves

    def explain(self, times: int = 1) -> str:
        """Returns the step in words, for `times` steps that differ only in where they read and
        write.
        """
        parts = f", {times} times" if times > 1 else ""
        if self.kernel == "copy":
            return f"copy {self.count} bytes{parts}"
        if self.kernel == "convert":
            divided = f", divided by {self.divisor}" if self.divisor != 1 else ""
            return f"make {self.to_dtype} of {self.count} {self.dtype}{divided}{parts}"
        if self.kernel == "reduce":
            return f"reduce {self.rows} rows of {self.count} {self.dtype}{parts}"
        if self.posted is not None:
            return f"post {self.posted} bytes, take those of {len(self.takes)} ranks"
        if self.messages:
            received = [each.receives for each in self.messages]
            return f"send {received.count(False)} messages, receive {received.count(True)}{parts}"
        nbytes = BY_NAME[self.kernel].message_bytes(self.count, self.dtype, self.ranks)
        where = "in the group" if self.team == OWN_GROUP else "across groups"
        size = f", {nbytes} bytes" if nbytes else ""
        if self.between_nodes:
            return f"{self.between_nodes} between nodes, by MPI ({self.ranks} ranks{size})"
        return f"{self.kernel} {where} ({self.ranks} ranks{size})"


class Steps:
    """The steps of one call on one rank, as they are put together.

    Attributes:
        grouping, rank, group, place: The groups, this rank, the number of its group, and its place
            in the group.
        steps: The steps so far.
        temporary_bytes: Bytes of temporary memory that the steps use.
        mark: A number from 0 to 255 that must be the same on all ranks. Steps without a root carry
            it as KcclCall.peer, which the ranks compare.
    """

    def __init__(self, grouping: Grouping, rank: int, choose: Choose) -> None:
        self.grouping, self.rank = grouping, rank
        self.group, self.place = grouping.place(rank)
        self.steps: list[Step] = []
        self.temporary_bytes = 0
        self.mark = 0
        self._sizes = [len(team) for team in grouping.teams_of(rank)]
        self._choose = choose
        self._calls = 0

    def temporary(self, nbytes: int) -> Part:
        """Reserves temporary memory of `nbytes` bytes, and returns it."""
        part = Part(Place.TEMPORARY, self.temporary_bytes)
        self.temporary_bytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part

    def copy(self, source: Part, target: Part, nbytes: int) -> None:
        """Adds a step that copies bytes, unless `target` is `source`."""
        if source != target:
            self.steps.append(Step("copy", source, target, nbytes))

    def convert(
        self, source: Part, target: Part, count: int, dtype: str, to_dtype: str, divisor: int = 1
    ) -> None:
        """Adds a step that converts elements to another type, and divides them."""
        made = Step("convert", source, target, count, dtype=dtype, to_dtype=to_dtype)
        self.steps.append(replace(made, divisor=divisor))

    def reduce(
        self, source: Part, target: Part, count: int, rows: int, *, dtype: str, op: str
    ) -> None:
        """Adds steps that reduce `rows` rows of `count` elements, one behind the other, in their
        order.

        A step takes at most MAX_WORLD_SIZE rows. If more follow, its result overwrites the last of
        its rows, which is the first row of the next step.
        """
        row_bytes = count * dtypes.of(dtype).itemsize
        first = 0
        is_last = False
        while not is_last:
            last = min(first + MAX_WORLD_SIZE, rows) - 1
            is_last = last == rows - 1
            begin = source.at(first * row_bytes)
            to = target if is_last else source.at(last * row_bytes)
            step = Step("reduce", begin, to, count, dtype=dtype, op=op, rows=last + 1 - first)
            self.steps.append(step)
            first = last

    def add(
        self, first: Part, second: Part, target: Part, count: int, *, dtype: str, op: str
    ) -> None:
        """Adds a step that reduces two rows. `target` may be one of them."""
        made = Step("reduce", first, target, count, dtype=dtype, op=op, rows=2, last=second)
        self.steps.append(made)

    def post(
        self,
        collective: str,
        count: int,
        posted: int,
        takes: Sequence[Take] = (),
        *,
        source: Part = INPUT,
        target: Part = OUTPUT,
        dtype: str = "float32",
        op: str = "sum",
        peer: int,
        longest: int,
        compares_always: bool = False,
    ) -> None:
        """Adds steps that post this rank's part of a call for all ranks, and take parts of others.

        Args:
            collective, count, dtype, op, peer: The call, which the ranks compare; `count` is
                KcclCall.count of the collective's kernels, and `peer` a rank of the communicator.
            posted: Bytes of the part, which begins at `source`.
            takes: What this rank takes from others, into `target`.
            longest: Bytes of the longest part of all ranks. Each rank makes a step for each
                POSTING_BYTES of it.
            compares_always: Whether the ranks compare each call. Otherwise they do so in a step's
                first call, in one of 32, and in each whose parts they take.
        """
        made = Step(_like(collective).name, source, target, count, dtype=dtype, op=op, peer=peer)
        call = replace(made, compares_always=compares_always)
        for begin in range(0, max(longest, 1), POSTING_BYTES):
            length = min(max(posted - begin, 0), POSTING_BYTES)
            pieces = tuple(filter(None, (take.within(begin, POSTING_BYTES) for take in takes)))
            made = replace(call, source=source.at(begin), posted=length, takes=pieces)
            self.steps.append(made)

    def exchange(
        self,
        collective: str,
        messages: Sequence[Message],
        *,
        source: Part = INPUT,
        target: Part = OUTPUT,
    ) -> None:
        """Adds a step in which this rank sends and receives messages.

        Messages tell little of the call, so one of another call could be taken. A step of post()
        comes first, in which the ranks compare each call (`compares_always`).
        """
        kernel = _like(collective).name
        self.steps.append(Step(kernel, source, target, 0, messages=tuple(messages)))

    def call(
        self,
        team: int,
        collective: str,
        source: Part,
        target: Part,
        count: int,
        *,
        dtype: str = "float32",
        op: str = "sum",
        peer: int = 0,
    ) -> None:
        """Adds a call of a collective with a team. `count` is KcclCall.count of its kernels."""
        # A team of one rank counts too, so that a step has the same number on all ranks.
        ranks, number = self._sizes[team], self._calls
        self._calls += 1
        like = _like(collective)
        if ranks == 1:
            # In a team of one rank the result is the rank's input, so it is only copied.
            self.copy(source, target, like.peer_bytes(count, dtype))
            return
        nbytes = like.message_bytes(count, dtype, ranks)
        if not like.takes:
            peer = self.mark
        if team == ACROSS_GROUPS and self.grouping.are_nodes:
            made = Step(like.name, source, target, count, team, ranks, dtype, op, peer)
            self.steps.append(replace(made, number=number, between_nodes=collective))
            return
        kernel = self._choose(collective, nbytes, dtype, ranks)
        made = Step(kernel, source, target, count, team, ranks, dtype, op, peer)
        self.steps.append(replace(made, number=number))


def _like(collective: str) -> KernelSpec:
    """Returns any kernel of a collective: KcclCall.count has the same unit for all of them."""
    return next(spec for spec in BY_NAME.values() if spec.collective == collective)


@dataclass(frozen=True)
class Form:
    """A way to make a collective's steps. Each collective has its forms in a file of forms/.

    Attributes:
        name: The name, which is used like that of an algorithm.
        moves: One line for people: which data goes where.
        make: Adds the steps to a Steps. Takes KcclCall's fields by name.
        needs_even: True if the form needs groups of the same size.
        posts: For a form in which ranks post: returns the most bytes that one rank posts for a
            request. None for other forms.
        on_one_node: True if the form is for ranks of one node only.
        most_bytes: The longest request that the form takes; 0: any.
        from_bytes: The shortest request for which the form is chosen by size. None: any for the
            first form that can run it, and 65,536 for the others.
        by_messages: True if each part is a message between two ranks, and there are no steps.
    """

    name: str
    moves: str
    make: Callable[..., None]
    needs_even: bool = False
    posts: Callable[[Request], int] | None = None
    on_one_node: bool = False
    most_bytes: int = 0
    from_bytes: int | None = None
    by_messages: bool = False

    def why_not(self, request: Request, grouping: Grouping) -> str | None:
        """Returns why the form cannot make a request; None if it can."""
        if self.needs_even and not grouping.is_even:
            return "the groups differ in size"
        if grouping.are_nodes and (self.on_one_node or self.posts is not None):
            return "the ranks are on several nodes"
        if self.most_bytes and request.nbytes > self.most_bytes:
            return f"the message has more than {self.most_bytes} bytes"
        if self.posts is None:
            return None
        is_short = self.posts(request) <= MOST_POSTED_BYTES
        return None if is_short else f"a rank would post more than {MOST_POSTED_BYTES} bytes"


Fields = Callable[[Request], dict[str, Any]]
"""Returns KcclCall's fields for a request, from which an example of its steps is made."""
