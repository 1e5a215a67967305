"""The host backend: ranks are processes or threads of one machine, windows are memfd segments."""

import json
import os
from typing import Any

from ..base.abi import ffi, lib
from ..ranks.mesh import Mesh
from .base import Backend, Settings, fill_op

# Polls between two looks at the clock: some 5 us when every rank has a core. A rank that shares its
# core yields it soon, because what it waits for may be waiting for that core.
_POLLS_OWN_CORE = 400
_POLLS_SHARED_CORE = 1


class HostBackend(Backend):
    """One rank's memory and calls on the host."""

    name = "host"

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Backend."""
        super().__init__(
            mesh,
            settings,
            shares_cores=shares_cores,
            are_threads=are_threads,
            polls_per_check=_POLLS_SHARED_CORE if shares_cores else _POLLS_OWN_CORE,
            timeout=timeout,
        )
        self.can_attach = self._try_to_attach(mesh, timeout)

    def _try_to_attach(self, mesh: Mesh, timeout: float) -> bool:
        """Whether every rank can read every other's memory. Collective.

        Each reads a word of each, because permission depends on the pair, and process ids mean
        something else in another container.
        """
        token = ffi.new("uint64_t *", int.from_bytes(os.urandom(8), "little"))
        mine = {"pid": os.getpid(), "address": int(ffi.cast("uintptr_t", token)), "token": token[0]}
        replies = mesh.allgather(json.dumps(mine).encode(), "start-up", timeout)
        word = ffi.new("uint64_t *")
        is_able = True
        for rank, reply in enumerate(replies):
            theirs = json.loads(reply)
            self._context.pid[rank] = theirs["pid"]
            error = lib.kccl_host_read_peer(
                self.state.idle_context, rank, word, theirs["address"], ffi.sizeof("uint64_t")
            )
            is_able = is_able and error == 0 and word[0] == theirs["token"]
        return all(
            reply == b"1"
            for reply in mesh.allgather(b"01"[is_able : is_able + 1], "start-up", timeout)
        )

    def op(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """See Backend."""
        handle = ffi.new("KcclHostOp *")
        fill_op(handle, self._comm, kernel, dtype, op, **fields)
        if lib.kccl_host_bind(handle) != 0:
            raise AssertionError(f"no kernel {kernel} for {dtype} {op}: the planner let it pass")
        return handle
