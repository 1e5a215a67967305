"""shrink(): the ranks that are alive agree on who they are, and make a communicator together.

Each rank sends all that it knows whenever that changes: which attempt it is in, whose connections
have ended, where it listens, and the votes. Knowledge only grows, so no message is stale: the last
one of a peer includes its earlier ones. An attempt goes like this.

1. A rank waits until all peers that it hears are in its attempt and hear the same ranks. These are
   the members. It connects with them and makes the communicator. If this succeeds, it votes for
   the members. Else it begins the next attempt.
2. It waits until all members have voted for the same members. Then its shrink() returns. If this
   cannot happen any more, it drops the communicator and begins the next attempt.

A rank that cannot make the communicator, as without memory, says so: then all raise its reason, and
their next shrink() goes on with the next attempt.

Whoever hears of a later attempt begins it too. A time-out decides nothing: the next shrink() goes
on where this one stopped. So a rank that timed out while the others returned returns the same.

Why all that return from an attempt have the same members, and none returns from a later one:

- A connection ends when its rank ends or closes the communicator, and after all that the rank sent.
  So "ended" is true for ever, and no rank that is alive is ended for another. A rank returns only
  after the sockets have taken all it knows. So whoever waits then has it, even if this rank ends.
- A rank votes once in an attempt, and the members are in its vote. Two sets of members for which
  all members voted cannot have a rank in common. Nor can they be apart: the voters of each have
  seen the others end.
- Let a rank return from an attempt with members M. Nobody in M has begun a later attempt before it
  voted, because it would not have voted then. After its vote, a member x leaves the attempt only
  (a) if a member of M has voted otherwise or began a later attempt unvoted, which is not so here,
  or (b) if the vote of an ended m in M is missing, and all peers that x hears have said, in this
  attempt, that they hear just the ranks that x hears. The vote could then reach x, or any of these
  peers, only from one of them, and none had it when it had stopped to listen to all others. So none
  of them returns. Nor did one that has ended: all would have m's vote from it.
- A rank outside of M has ended for all of M before they voted. What it said came before that.

csrc/models/survivors.pml tries all runs of three ranks, and of four of which one had ended before.

It comes to an end: with no further loss all hear the same ranks, and of those in the latest attempt
each votes, or makes its peers begin the next by a message. A wait for a rank that is alive and does
not come ends with Timeout.
"""

import contextlib
import socket
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from ..base import clock
from ..base.descriptors import keep_standard
from ..base.errors import BackendError, PeerLost, Timeout, WaitFailed
from . import sockets
from .agreement import connect_part
from .knowledge import Said
from .mesh import Closable, Mesh
from .messages import own_failure
from .nodes import Listener

Part = TypeVar("Part", bound=Closable)


def shrink(ranks: Mesh, make: Callable[[Mesh], Part], timeout: float) -> Part:
    """Calls `make` with the mesh of the ranks that are alive. Collective among them.

    Returns:
        What `make` returned, once it has succeeded on all of these ranks.

    Raises:
        Timeout: A rank that is alive did not come in time. The next shrink() goes on.
        PeerLost: abort() was called here.
        BackendError: `make` failed on some rank. The next shrink() tries again.
    """
    keep_standard()
    if not isinstance(ranks.unfinished, _Survivor):
        ranks.unfinished = _Survivor(ranks)
    survivor: _Survivor[Part] = ranks.unfinished

    def make_named(mesh: Mesh) -> Part:
        try:
            return make(mesh)
        except BackendError:
            if mesh.told_by is not None:
                survivor.culprit = mesh.numbers[mesh.told_by]
            raise

    try:
        return survivor.agree(make_named, timeout)
    except (BackendError, OSError, MemoryError) as error:
        if isinstance(error, WaitFailed):
            raise
        raise survivor.refusal(error) from error


class _Survivor(Generic[Part]):
    """One rank's part in the agreement, from its first shrink() to the one that returns."""

    def __init__(self, ranks: Mesh) -> None:
        self._ranks = ranks
        self._attempt = 1
        self._listener: socket.socket | Listener | None = None
        self._name = ""
        # The peers whose connections had ended when this rank began to listen.
        self._ended: frozenset[int] = frozenset()
        # Once this rank has voted in this attempt: what `make` returned, and the members for which
        # it voted. Before that None and ().
        self._part: Part | None = None
        self._members: tuple[int, ...] = ()
        self._heard: dict[int, Said] = {}
        self._told = b""
        # The last attempt in which `make` failed on this rank (0: it never failed), and the reason.
        self._refused, self._reason = 0, ""
        # The last attempt for which shrink() has raised that `make` failed on some rank.
        self._raised = 0
        # The rank that told why `make` failed here.
        self.culprit: int | None = None

    def close(self) -> None:
        """Ends this rank's part in the agreement, without a result."""
        self._stop_listening()
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _stop_listening(self) -> None:
        listener, self._listener, self._name = self._listener, None, ""
        if listener is not None:
            listener.close()

    def agree(self, make: Callable[[Mesh], Part], timeout: float) -> Part:
        """See shrink()."""
        ended: frozenset[int] | None = None
        while True:
            self._look()
            if ended != self._ranks.ended():
                # A rank was lost during the wait. The wait for it has used up time, so the timeout
                # begins again.
                ended, deadline = self._ranks.ended(), clock.now() + timeout
            if self._part is None:
                if clock.now() > deadline or not self._wait(self._has_members, deadline):
                    self._time_out(timeout)
                if self._has_members():
                    # The error is suppressed: the attempt fails, and the next one begins.
                    with contextlib.suppress(PeerLost):
                        self._try_to_make(make, timeout)
            if self._part is not None:
                if not self._wait(self._is_decided, clock.now() + timeout):
                    self._time_out(timeout)
                if self._is_decided():
                    part, self._part = self._part, None
                    return part

    # ---- What this rank knows ----------------------------------------------------------------

    def _look(self) -> None:
        """Receives what the peers have said, follows them to a later attempt, tells what is new."""
        ranks = self._ranks
        for peer, text in ranks.hear():
            self._heard[peer] = Said.parse(text)
        if ranks.has_hung_up:
            # After abort() this rank receives nothing more, and its connections have ended for its
            # peers.
            raise PeerLost(
                f"rank {ranks.rank} has called abort() and cannot go on with comm.shrink()",
                rank=ranks.rank,
                collective="shrink",
            )
        self._begin(max((said.attempt for said in self._heard.values()), default=1))
        if self._part is None and self._ended != ranks.ended():
            # A peer that still counts a lost rank as a member may have connected here. Closing the
            # listener tells that peer that the members are others.
            self._stop_listening()
        elif self._part is not None and self._is_lost():
            self._begin(self._attempt + 1)
        self._say()
        self.heed_refusals()

    def _say(self) -> None:
        why = self._refused, self._reason
        said = Said(self._attempt, self._ranks.ended(), self._name, self._votes(), *why)
        text = said.text()
        if text != self._told:
            self._ranks.tell(text)
            # Set after tell(): if Ctrl-C stops tell(), the next shrink() sends this text again.
            self._told = text

    def _begin(self, attempt: int) -> None:
        """Begins an attempt, unless this rank is in it or in a later one."""
        if attempt > self._attempt:
            self.close()
            self._attempt, self._members = attempt, ()

    def _votes(self) -> dict[int, tuple[int, ...]]:
        votes = {} if self._part is None else {self._ranks.rank: self._members}
        for said in self._heard.values():
            if said.attempt == self._attempt:
                votes |= said.votes
        return votes

    def _alive(self) -> set[int]:
        """Returns the peers whose connections to this rank have not ended."""
        return set(range(self._ranks.world_size)) - self._ranks.ended() - {self._ranks.rank}

    def _is_settled(self, peer: int) -> bool:
        """Tells whether the peer has said that it is in this attempt and hears the same ranks."""
        said = self._heard.get(peer)
        return (
            said is not None and said.attempt == self._attempt and said.ended == self._ranks.ended()
        )

    def _contradicts(self, members: tuple[int, ...]) -> bool:
        """Tells whether one of the members has voted for other members."""
        votes = self._votes()
        return any(votes.get(member, members) != members for member in members)

    def _is_lost(self) -> bool:
        """Tells whether the members' votes can never be complete."""
        missing = set(self._members) & self._ranks.ended() - set(self._votes())
        all_know = all(map(self._is_settled, self._alive()))
        return self._contradicts(self._members) or (len(missing) > 0 and all_know)

    def _is_complete(self) -> bool:
        """Tells whether all members have voted for this rank's communicator."""
        return self._part is not None and set(self._members) <= set(self._votes())

    # ---- Waits -------------------------------------------------------------------------------

    def _wait(self, until: Callable[[], bool], deadline: float) -> bool:
        """Waits until `until()`, or until this rank is in another attempt, or hears fewer ranks.
        Returns False at the deadline.
        """
        ranks = self._ranks
        attempt, ended = self._attempt, ranks.ended()

        def is_over() -> bool:
            self._look()
            return until() or (attempt, ended) != (self._attempt, ranks.ended())

        return ranks.wait(2 * attempt + (self._part is not None), is_over, deadline)

    def _has_members(self) -> bool:
        """Begins to listen, if this rank does not. Tells whether all peers that it hears listen in
        this attempt and hear the same ranks, which are then the members.
        """
        if self._name == "":
            self._ended = self._ranks.ended()
            self._listener, self._name = self._ranks.listen()
            self._say()
        return all(self._is_settled(peer) and self._heard[peer].name for peer in self._alive())

    def _is_decided(self) -> bool:
        return self._is_complete() and self._ranks.is_flushed()

    def _time_out(self, timeout: float) -> NoReturn:
        ranks, alive = self._ranks, sorted(self._alive())
        done = self._votes() if self._part is not None else filter(self._is_settled, alive)
        late = min(set(alive) - set(done), default=(alive or [ranks.rank])[0])
        raise Timeout(
            f"rank {ranks.rank} waited {timeout:.3g} s for rank {late} during shrink; call "
            "comm.shrink() again, it goes on",
            rank=ranks.rank,
            peer=late,
            collective="shrink",
            waited_s=timeout,
        )

    def _try_to_make(self, make: Callable[[Mesh], Part], timeout: float) -> None:
        """Makes the communicator of the members, and votes for it. Else begins the next attempt."""
        ranks, attempt = self._ranks, self._attempt
        names = {peer: self._heard[peer].name for peer in self._alive()} | {ranks.rank: self._name}
        members = tuple(sorted(names))
        listener, self._listener = self._listener, None
        assert listener is not None

        def look() -> None:
            self._look()
            gone = set(members) & ranks.ended()
            if gone or attempt != self._attempt or self._contradicts(members):
                raise sockets.peer_lost(ranks.rank, min(gone, default=members[0]), "shrink")

        try:
            look()
            in_order = {member: names[member] for member in members}
            part = make(connect_part(ranks, in_order, listener, timeout, look))
            self._part, self._members = part, members
        except BaseException:
            listener.close()
            self._begin(attempt + 1)
            # Sends the peers what this rank knows, so that they leave the attempt too, even if the
            # user does not call shrink() again on this rank.
            self._say()
            raise

    # ---- Refusals ----------------------------------------------------------------------------

    def heed_refusals(self) -> None:
        """Raises the reason of a peer that could not make the communicator; once in an attempt."""
        for peer in self._alive() & self._heard.keys():
            said = self._heard[peer]
            if said.refused > self._raised:
                self._raised = said.refused
                raise _Refused(said.reason)

    def refusal(self, error: BaseException) -> BaseException:
        """Returns what shrink() raises when making the communicator has failed with `error`. Tells
        the peers if `make` failed on this rank itself.
        """
        if isinstance(error, _Refused):
            return BackendError(str(error))
        self._raised = self._attempt
        if self.culprit is not None:
            # `error` names the rank by its number in the communicator that was not made. Puts the
            # number in this communicator in its place.
            culprit, self.culprit = self.culprit, None
            return BackendError(f"shrink failed on rank {culprit}: {str(error).partition(': ')[2]}")
        mine = own_failure(error, self._ranks.rank, "shrink")
        self._refused, self._reason = self._attempt, str(mine)
        self._begin(self._attempt + 1)
        self._say()
        return mine


class _Refused(BackendError):
    """A peer has said why it could not make the communicator."""
