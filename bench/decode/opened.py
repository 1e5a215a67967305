"""Opens the peers of an engine, and compares their first tokens with the reference's."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import kccl
from kccl.engine import Engine
from kccl.engine.files.checkpoint import Checkpoint

from .peer import Peer, Room, cause_of
from .peers import Opener, peers_for
from .tokens import Expected


class OpenedPeers:
    """Opens peers, and keeps those whose tokens are right.

    Attributes:
        right: The peers that this rank calls. Only rank 0 calls peers that run on one rank.
        notes: A sentence for each peer, on rank 0.
        versions: Library -> version, on rank 0.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoint: Checkpoint,
        ends: ExitStack,
        show: Callable[[str], None],
    ) -> None:
        self.right: list[Peer] = []
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self._engine, self._ends, self._show = engine, ends, show
        threads = len(os.sched_getaffinity(0))
        self._room = Room(checkpoint, engine.context, threads, engine.rank, engine.world_size)

    def open(self, prompt: Sequence[int], answer: Sequence[int], known: Expected | None) -> None:
        """Opens all peers. Collective.

        Args:
            prompt, answer: The ids of a prompt, and of KCCL's answer.
            known: What the reference expects; None on all ranks but 0.
        """
        self._ends.callback(self._room.close)
        for name, opener in peers_for(self._engine.backend, self._engine.world_size).items():
            self._show(name)
            # On the host only rank 0 calls peers. On GPUs all ranks do.
            if self._engine.backend == "host" and self._engine.rank > 0:
                continue
            self._open(name, opener, prompt, answer, known)

    def _open(
        self,
        name: str,
        opener: Opener,
        prompt: Sequence[int],
        answer: Sequence[int],
        known: Expected | None,
    ) -> None:
        engine = self._engine
        tokens: list[int] = []
        peer: Peer | None = None
        cause = None
        try:
            self._check_machine()
            peer = opener(self._room)
            self._ends.callback(peer.close)
            # The peer chooses each token given KCCL's tokens before it.
            tokens = [peer.extend(prompt), *(peer.step(token) for token in answer[:-1])]
        # A foreign library may raise any exception. Its text tells why the peer is not measured.
        except Exception as error:
            cause = cause_of(error)
        finally:
            gc.collect()
        is_shared = engine.backend != "host"
        causes = engine.of_processes(cause) if is_shared else [cause]
        cause = next(filter(None, causes), None)
        if cause is None and known is not None:
            verdict = known.theirs(tokens)
            cause = None if verdict.is_right else str(verdict)
            if cause is None:
                self.notes.append(f"{name}: {verdict}")
        cause = engine.of_rank_0(cause) if is_shared else cause
        if peer is not None:
            self.versions[name] = peer.version
        if cause is not None:
            self.notes.append(f"no {name} rows: {cause}")
        elif peer is not None:
            self.right.append(peer)

    def _check_machine(self) -> None:
        engine = self._engine
        if engine.backend == "host":
            if self._room.threads < engine.world_size:
                raise kccl.Error(f"it could use {self._room.threads} of the cores that KCCL uses")
        elif engine.world_size > 1 and kccl.launched_rank() is None:
            raise kccl.Error("its ranks must be processes, as `kccl run` starts them")
