"""Times the engine and its peers in turn at each position, and checks the tokens of the runs.

A short prompt is checked before anything is timed, because peers with wrong tokens are not timed.
The reference keeps the weights in FP32, in twice the model's memory. So it is not kept while peers
are open, and the tokens of timed runs are checked after the peers have been closed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kccl.engine import Engine

from ..harness.measure import Row
from .gpu import gpu_facts
from .opened import OpenedPeers
from .oracles import open_oracle
from .peer import Peer
from .report import COLUMNS
from .request import FIRST_TOKEN_PROMPT, MOST_TOKENS, Request, Result
from .routers import routers_of
from .runs import Runs
from .tokens import LENGTH, Expected, Oracle, Verdict, num_parts, token_hash
from .variants import time_variants

_LEAST_TOKENS = 4
# The seconds that a run should take.
_RUN_S = 0.8
_TRIAL_TOKENS = 4
# The most runs that time the first token, and the seconds after which no further one begins. The
# first two runs of a small model are slow: memory is new, and idle BLAS threads of the reference
# still poll.
_FIRST_TOKEN_RUNS, _FIRST_TOKEN_S = 7, 5.0
_SEED = 1

Show = Callable[[str], None]
Tell = Callable[[Sequence[Row]], None]


def measure(engine: Engine, request: Request, show: Show, result: Result, tell: Tell) -> None:
    """Measures an engine that has opened the request's model, and its peers. Collective.

    Args:
        engine, request: The engine, and what to measure.
        show: Called with a description of the current step.
        result: The result so far. Rows are added when the tokens of a position have been checked.
        tell: Called on rank 0 with the rows of a position when they have been checked.
    """
    with ExitStack() as ends:
        _Measurement(engine, request, show, ends, result, tell).run()


class _Measurement:
    def __init__(
        self,
        engine: Engine,
        request: Request,
        show: Show,
        ends: ExitStack,
        result: Result,
        tell: Tell,
    ) -> None:
        self._engine, self._request, self._show = engine, request, show
        self._result, self._tell = result, tell
        self._config = request.checkpoint.config
        self._is_first = engine.rank == 0
        longest = max(engine.context, *request.positions)
        ids = np.random.default_rng(_SEED).integers(self._config.vocab_size, size=longest)
        self._ids: list[int] = ids.tolist()
        # The prompt whose first token is timed. It has no prefix in common with other prompts.
        length = min(FIRST_TOKEN_PROMPT, engine.context - 2)
        self._prompt = self._ids[::-1][:length]
        if self._prompt[0] == self._ids[0]:
            self._prompt[0] = (self._ids[0] + 1) % self._config.vocab_size
        self._ends = ends
        self._peers: list[Peer] = []
        self._first_token_s: dict[str, float] = {}
        self._oracle: Oracle | None = None
        # Position -> its runs, for positions that have been timed.
        self._measured: dict[int, dict[str, Runs]] = {}
        self._ablated: dict[int, list[Row]] = {}

    def run(self) -> None:
        """Measures all positions. If an exception ends it early, keeps rows of timed positions."""
        try:
            self._run()
        except BaseException:
            self._keep()
            raise

    def _run(self) -> None:
        request = self._request
        self._show("the check against the reference")
        answer, known = self._check()
        if request.has_baselines:
            peers = OpenedPeers(self._engine, request.checkpoint, self._ends, self._show)
            peers.open(self._ids[:LENGTH], answer, known)
            self._peers = peers.right
            self._result.notes += peers.notes
            self._result.versions = peers.versions
        if self._engine.backend != "sim":
            # Not on the simulator, where a first token takes minutes, and its time means nothing.
            self._show("the first token")
            self._first_token_s["kccl"] = self._time_first_token()
        for peer in self._peers:
            self._first_token_s[peer.library] = self._time_first_token_of(peer)
        for peer in self._peers:
            peer.reset()
        self._result.facts = gpu_facts(self._engine)
        done = 0
        measured, ablated = self._measured, self._ablated
        for position in request.positions:
            self._show(f"position {position}")
            prompt = self._ids[:position]
            step_s = self._prefill(prompt)
            firsts = [peer.extend(prompt[done:]) for peer in self._peers]
            done = position
            num = self._num_tokens(step_s, position)
            runs = self._repeat(prompt, num, firsts)
            if request.variants:
                turns = (request.variants, request.repeats)
                ablated[position] = time_variants(self._engine, prompt, num, *turns)
            measured[position] = runs
            for peer in self._peers:
                peer.rewind()
            if not request.has_baselines:
                self._judge(self._oracle, position, measured[position], ablated.get(position, []))
        if request.traced_tokens:
            self._show("the timeline")
            prompt = self._ids[: request.positions[0]]
            self._result.timelines = self._engine.timeline(prompt, request.traced_tokens)
        if self._engine.backend != "sim":
            reads = [read for runs in measured.values() for read in runs["kccl"].reads]
            self._result.stream_bytes_per_s = median(reads)
        self._result.facts = gpu_facts(self._engine)
        self._ends.close()
        gc.collect()
        if request.has_baselines:
            # The reference is opened after the peers are closed: memory does not suffice for both.
            self._show("the check of the timed tokens")
            oracle = self._open_oracle()
            for position, runs in measured.items():
                self._judge(oracle, position, runs, ablated.get(position, []))

    def _judge(
        self, oracle: Oracle | None, position: int, runs: dict[str, Runs], ablated: list[Row]
    ) -> None:
        """Checks the tokens of a position, and adds its rows."""
        prompt, answer = self._ids[:position], runs["kccl"].tokens[0]
        without_overlap = self._without_overlap(prompt, len(answer))
        verdict = self._compare(oracle, prompt, answer)
        if not self._is_first:
            return
        self._result.notes.append(f"kccl at position {position}: {verdict}")
        done = len(self._result.rows)
        self._add_rows(position, runs, verdict, without_overlap)
        self._add_ablated(ablated)
        self._tell(self._result.rows[done:])

    def _keep(self) -> None:
        """Adds rows of timed positions whose tokens were not compared with the reference's."""
        judged = {row["position"] for row in self._result.rows}
        for position, runs in self._measured.items() if self._is_first else ():
            if position in judged:
                continue
            self._result.notes.append(
                f"position {position}: its tokens were not compared with the reference's"
            )
            done = len(self._result.rows)
            self._add_rows(position, runs, None, None)
            self._add_ablated(self._ablated.get(position, []))
            # If printing the table is what has failed before, it may fail again here.
            with suppress(OSError):
                self._tell(self._result.rows[done:])

    # ---- tokens ----------------------------------------------------------------------------------

    def _check(self) -> tuple[list[int], Expected | None]:
        """Checks a short prompt. Returns KCCL's answer, and the reference's choices; the latter
        are None on all ranks but 0.
        """
        prompt = self._ids[:LENGTH]
        answer, _ = self._engine.timed(prompt, LENGTH)
        began = time.monotonic()
        oracle = self._open_oracle()
        known = self._expected(oracle, prompt, answer)
        if not self._request.has_baselines:
            self._oracle = oracle
        if known is not None:
            verdict, took = self._verdict(known), time.monotonic() - began
            self._result.is_right = verdict.is_right
            self._result.notes.append(f"kccl: {verdict}, which took {took:.1f} s")
        return answer, known

    def _open_oracle(self) -> Oracle | None:
        """Returns the reference on rank 0, else None. It reads the weights at its first use."""
        given = self._request.checkpoint, self._engine.backend, self._result.notes
        return open_oracle(*given) if self._is_first else None

    def _compare(self, oracle: Oracle | None, prompt: list[int], answer: list[int]) -> Verdict:
        """Returns how KCCL's answer compares with the reference; an empty Verdict on ranks > 0."""
        known = self._expected(oracle, prompt, answer)
        return Verdict(0, 0, 0) if known is None else self._verdict(known)

    def _verdict(self, known: Expected) -> Verdict:
        return known.ours(has_f16_cache=self._engine.backend != "host")

    def _expected(
        self, oracle: Oracle | None, prompt: list[int], answer: list[int]
    ) -> Expected | None:
        # Ranks meet after each part, because a wait for all parts would exceed the timeout.
        tell = partial(self._engine.of_rank_0, None)
        routers = routers_of(self._engine, self._config.experts, [*prompt, *answer[:-1]])
        if oracle is not None:
            return oracle.expected(prompt, answer, tell, routers)
        for _ in range(num_parts(prompt, answer, self._config.num_layers)):
            tell()
        return None

    def _without_overlap(self, prompt: list[int], num: int) -> list[int] | None:
        """Returns the tokens of a slow run in which no op begins before the one before it has ended
        (see Engine.timed()); None on the host, which has no such run.
        """
        is_host = self._engine.backend == "host"
        return None if is_host else self._engine.timed(prompt, num, overlaps=False)[0]

    # ---- times -----------------------------------------------------------------------------------

    def _time_first_token(self) -> float:
        """Returns the median seconds from a prompt, of which nothing is cached, to its first
        token.
        """
        found: list[float] = []
        began = time.monotonic()
        while len(found) < _FIRST_TOKEN_RUNS:
            # Runs another prompt, so that the timed one is not in the KV cache.
            self._engine.timed(self._ids[:1], 1)
            _, times = self._engine.timed(self._prompt, 1)
            found.append(times[1] - times[0])
            if self._engine.of_rank_0(time.monotonic() - began > _FIRST_TOKEN_S):
                break
        return median(found)

    def _time_first_token_of(self, peer: Peer) -> float:
        found: list[float] = []
        while len(found) < _FIRST_TOKEN_RUNS:
            peer.reset()
            began = time.monotonic()
            peer.extend(self._prompt)
            found.append(time.monotonic() - began)
            if self._agreed(peer, sum(found) >= _FIRST_TOKEN_S):
                break
        return median(found)

    def _agreed(self, peer: Peer, value: Any) -> Any:
        """Returns rank 0's value if all ranks call the peer, and else this rank's."""
        return value if peer.world_size == 1 else self._engine.of_rank_0(value)

    def _prefill(self, prompt: list[int]) -> float:
        """Runs a prompt, which stays in the KV cache. Returns the seconds of a token after it."""
        num = min(_TRIAL_TOKENS, self._engine.context - len(prompt) - 1)
        _, times = self._engine.timed(prompt, num + 1)
        return float(np.median(np.diff(times[1:])))

    def _num_tokens(self, step_s: float, position: int) -> int:
        if self._request.new_tokens is not None:
            return self._request.new_tokens
        room = self._engine.context - position - 1
        return min(int(self._engine.of_rank_0(_tokens_by_time(step_s))), room)

    def _repeat(self, prompt: list[int], num: int, firsts: Sequence[int]) -> dict[str, Runs]:
        """Times KCCL and the peers in turn, every second time in reversed order. Returns library ->
        its runs."""
        runs = {"kccl": Runs()}
        fewer: dict[str, int] = {}
        for peer, first in zip(self._peers, firsts, strict=True):
            _, times = peer.timed(first, 2)
            # A slow peer makes fewer tokens.
            fewer[peer.library] = min(num, self._agreed(peer, _affordable(times[2] - times[1])))
            runs[peer.library] = Runs()

        def ours() -> None:
            runs["kccl"].reads.append(self._engine.bandwidth())
            # The prompt's pass makes the first of these tokens. The others are timed.
            tokens, times = self._engine.timed(prompt, num + 1)
            runs["kccl"].add(tokens, times[1:])

        def theirs(peer: Peer, first: int) -> None:
            peer.rewind()
            tokens, times = peer.timed(first, fewer[peer.library])
            runs[peer.library].add([first, *tokens], times)

        for repeat in range(self._request.repeats):
            peers = zip(self._peers, firsts, strict=True)
            turns: list[Callable[[], None]] = [ours, *(partial(theirs, *each) for each in peers)]
            for turn in turns[:: -1 if repeat % 2 else 1]:
                turn()
        if drafted := self._engine.drafted.proposed:
            accepted = self._engine.drafted.accepted
            self._result.notes.append(
                f"kccl at position {len(prompt)}: {accepted} of {drafted} drafts accepted in a run"
            )
        return runs

    # ---- rows ------------------------------------------------------------------------------------

    def _add_rows(
        self,
        position: int,
        runs: dict[str, Runs],
        verdict: Verdict | None,
        without_overlap: list[int] | None,
    ) -> None:
        """Adds the rows of a position. Without a verdict it is not known whether their tokens are
        right.
        """
        engine = self._engine
        peers = {peer.library: peer for peer in self._peers}
        for library, found in runs.items():
            is_ours, peer = library == "kccl", peers.get(library)
            # Peers with wrong tokens were removed before.
            is_right = found.are_equal()
            if is_ours:
                is_right &= (verdict is None or verdict.is_right) and self._result.is_right
                is_right &= self._equals(position, found.tokens[0], without_overlap)
            num = len(found.steps_us[0])
            row: Row = {name: None for name in COLUMNS} | {
                "library": library,
                "model": self._request.name,
                "backend": engine.backend if peer is None else peer.backend,
                "form": None if peer is None else peer.form or None,
                "world_size": engine.world_size if peer is None else peer.world_size,
                "dtype": self._request.kind_of(engine),
                "drafts": self._request.drafts if is_ours else "off",
                "prompt_tokens": len(self._prompt),
                "new_tokens": num,
                "position": position,
                "bandwidth_gbps": median(runs["kccl"].reads) * 1e-9,
                "token_hash": token_hash(found.tokens[0]),
                "tokens_match": None if verdict is None and is_right else is_right,
            }
            if is_right:
                row |= found.figures()
                first_s = self._first_token_s.get(library)
                if first_s is not None:
                    steps = first_s * 1e6 / row["us_per_token"]
                    row |= {"ttft_ms": first_s * 1e3, "ttft_steps": steps}
                if is_ours:
                    # A token's bytes grow with its position: takes those in the middle of the run.
                    nbytes = self._engine.bytes_per_token(position + num // 2)
                    row["bandwidth_share"] = found.share(nbytes)
            elif is_ours:
                self._result.is_right = False
            if not found.are_equal():
                self._result.notes.append(
                    f"{library}: its tokens at position {position} differ from run to run"
                )
            self._result.rows.append(row)

    def _equals(self, position: int, tokens: list[int], without_overlap: list[int] | None) -> bool:
        if without_overlap is None:
            return True
        found, wanted = token_hash(tokens), token_hash(without_overlap)
        self._result.notes.append(
            f"kccl at position {position}: the hash of {len(tokens)} tokens is {found}, without "
            f"overlap {wanted}"
        )
        return found == wanted

    def _add_ablated(self, found: Sequence[Row]) -> None:
        """Adds rows of ablated kernels, with common fields of KCCL's row of the same position."""
        whole = next(row for row in reversed(self._result.rows) if row["library"] == "kccl")
        same = (
            *("library", "model", "backend", "world_size", "dtype", "drafts"),
            *("new_tokens", "position"),
        )
        for fields in found:
            row: Row = {name: None for name in COLUMNS} | {name: whole[name] for name in same}
            row |= {"bandwidth_gbps": whole["bandwidth_gbps"]} | fields
            if whole["tokens_match"] is False:
                row["whole_us"] = None
            self._result.rows.append(row)


def _tokens_by_time(step_s: float) -> int:
    """Returns how many tokens of `step_s` seconds a run of _RUN_S makes; at most MOST_TOKENS."""
    return min(_affordable(step_s), MOST_TOKENS)


def _affordable(step_s: float) -> int:
    return max(round(_RUN_S / step_s), _LEAST_TOKENS)
