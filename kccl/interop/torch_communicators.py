"""Makes the communicators of one process group. Ranks find each other through the group's store.

The communicators for host tensors and for messages are made with the group. So when a message is
sent, only its two ranks must call. The communicator for GPU tensors is made at the first call that
needs it, which is therefore collective.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ..backends.base import Opener
from ..backends.openers import opener
from ..base import clock
from ..base.env import Env, read
from ..base.errors import Error, Timeout
from ..comm import Communicator
from ..gpu import backend as backend_of_gpus
from ..ranks import job
from ..start import join
from . import torch_cuda
from .torch_errors import InvalidArgument, of_torch
from .torch_far_messages import GPUS, FarMessages
from .torch_machines import Machines, machines_of
from .torch_messages import Messages
from .torch_streams import free_stream, give_stream, refuse_capture

_POLL_S = 0.002  # between two polls of the store


def backend_for(device: torch.device) -> str:
    """Returns KCCL's backend for tensors on a device. PyTorch for ROCm calls AMD's GPUs "cuda"."""
    return "host" if device.type == "cpu" else backend_of_gpus()


class Communicators:
    """Holds the communicators of a group, by type of device.

    Attributes:
        of: Type of device -> its open communicator; or Machines for host tensors, if the ranks are
            on several machines.
        devices: Type of device -> the device that its communicator was opened for.
        messages: Sends and receives the group's messages, on a communicator of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Makes the communicators for host tensors and for messages. Collective among the group.

        Raises:
            Timeout, PeerLost: A rank did not call in time, or its process ended.
            BackendError: A rank cannot start.
        """
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self.of: dict[str, Communicator] = {}
        self.devices: dict[str, torch.device] = {}
        self._machine_keys: list[str] = []
        self._machines = self._find_machines()
        self.messages: Messages | FarMessages
        if len(self._machines) > 1:
            machines = self._open_machines()
            self.of["cpu"] = cast(Communicator, machines)
            self.devices["cpu"] = torch.device("cpu")
            self.messages = FarMessages(machines.far, rank)
            return
        comm = self.open(torch.device("cpu"))
        try:
            parted = comm.split(0)
        except Error as error:
            comm.close()
            raise of_torch(error) from error
        assert parted is not None
        self.messages = Messages(parted)

    def open(self, device: torch.device) -> Communicator:
        """Makes the communicator for a device. Collective among the group.

        Raises:
            Error: A CUDA graph is being captured, or PyTorch has other functions for streams.
            NotImplementedError: The ranks are on several machines.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        if len(self._machines) > 1:
            raise NotImplementedError(GPUS)
        refuse_capture(device, "this group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda":
            torch_cuda.check(device.index)
        env = self._env()
        comm = self._join(
            device.type,
            range(self._world_size),
            env,
            lambda: opener(backend_for(device), "number", device.index or 0),
        )
        if device.type == "cuda":
            give_stream(comm, device, env.streams)
        self.of[device.type] = comm
        self.devices[device.type] = device
        return comm

    def _env(self) -> Env:
        env = replace(read(), timeout=self._timeout_s, first_timeout=self._timeout_s)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            env = replace(env, check=1)
        return env

    def _join(
        self, kind: str, ranks: Sequence[int], env: Env, find: Callable[[], Opener]
    ) -> Communicator:
        """Makes a communicator of some ranks of the group, which all call this."""
        keys = [f"{kind}/{each}" for each in ranks]
        rank = ranks.index(self._rank)

        def found() -> Opener:
            if rank == 0:
                # All other ranks have connected to rank 0, so they have read the keys. Rank 0
                # deletes the keys, so that a later group of the same name does not read them.
                self._delete(keys)
                if len(ranks) == self._world_size:
                    self._delete(self._machine_keys)
            return find()

        def exchange(text: str, seconds: float) -> list[str]:
            self._store.set(keys[rank], text)
            return [self._read(peer, key, seconds) for peer, key in zip(ranks, keys, strict=True)]

        job_rank = job.JobRank("torch.distributed", rank, len(ranks), rank, exchange)
        try:
            return join(job_rank, env, found)
        except Error as error:
            raise of_torch(error) from error

    def _find_machines(self) -> list[list[int]]:
        """Returns the ranks of each machine. Collective."""
        if self._world_size == 1:
            return [[0]]
        self._machine_keys = [f"cpu/machine/{each}" for each in range(self._world_size)]
        mine = f"{job.machine_id()} {read().ranks_per_node}"
        if self._rank == 0:
            mine = f"{secrets.token_hex(8)} {mine}"
        self._store.set(self._machine_keys[self._rank], mine)
        everyone = [
            self._read(peer, key, self._timeout_s) for peer, key in enumerate(self._machine_keys)
        ]
        self._nonce, everyone[0] = everyone[0].split(" ", 1)
        names, pretended = zip(*(each.rsplit(" ", 1) for each in everyone), strict=True)
        if len(set(pretended)) > 1:
            raise InvalidArgument(
                f"KCCL_RANKS_PER_NODE is {', '.join(pretended)} on the ranks, must be the same"
            )
        return machines_of(names, int(pretended[0]))

    def _open_machines(self) -> Machines:
        """Makes the communicator of this machine's ranks, and connects the machines."""
        ranks = next(each for each in self._machines if self._rank in each)
        env = replace(self._env(), ranks_per_node=0)
        near = self._join("cpu", ranks, env, lambda: opener("host", "number", 0))
        try:
            limit = timedelta(seconds=self._timeout_s)
            # Gloo's keys stay in the store. So a later group of the same name has others.
            store = dist.PrefixStore(f"far/{self._nonce}", self._store)
            machines = Machines(
                near, self._machines, self._rank, store, limit, checks=bool(env.check)
            )
            # All ranks are connected, so they have read the keys. None makes a later group of the
            # same name before the barrier.
            if self._rank == 0:
                self._delete(self._machine_keys)
            machines.barrier()
            return machines
        except Error as error:
            near.close()
            raise of_torch(error) from error

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _read(self, peer: int, key: str, seconds: float) -> str:
        # Polls, because Ctrl-C does not interrupt Store.wait().
        deadline = clock.now() + seconds
        while not self._store.check([key]):
            if clock.now() > deadline:
                missing = "make this process group"
                if not key.startswith("cpu"):
                    missing = "make its first call with a tensor on a GPU on this process group"
                raise Timeout(
                    f"rank {self._rank} waited {seconds:.3g} s for rank {peer} to {missing}",
                    rank=self._rank,
                    peer=peer,
                    collective="start-up",
                    waited_s=seconds,
                )
            time.sleep(_POLL_S)
        text: str = self._store.get(key).decode()
        return text

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of all open communicators, and of those that are opened later."""
        self._timeout_s = seconds
        for comm in self.of.values():
            comm.timeout = seconds
        self.messages.set_timeout(seconds)

    def check(self) -> None:
        """Raises the error of a call that is known to have failed, of any communicator."""
        for comm in self.of.values():
            comm.check()
        self.messages.check()

    def close(self) -> None:
        """Closes all communicators of the group on this rank. Idempotent."""
        self.messages.close()
        for comm in self.of.values():
            free_stream(comm)
            comm.close()

    def fail(self) -> None:
        """Makes all ranks' waits fail, those that are under way included."""
        self.messages.abort()
        for comm in self.of.values():
            comm.abort()
