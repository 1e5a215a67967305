"""Makes the communicators of one process group. Ranks find each other through the group's store.

The communicators for host tensors and for messages are made with the group. So when a message is
sent, only its two ranks must call. The communicator for GPU tensors is made at the first call that
needs it, which is therefore collective.
"""

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from ..backends.base import Opener
from ..backends.openers import opener
from ..base import clock
from ..base.env import read
from ..base.errors import Error, Timeout
from ..comm import Communicator
from ..gpu import backend as backend_of_gpus
from ..ranks import job
from ..start import join
from .torch_errors import of_torch
from .torch_messages import Messages
from .torch_streams import free_stream, give_stream, refuse_capture

_POLL_S = 0.002  # between two polls of the store


def backend_for(device: torch.device) -> str:
    """Returns KCCL's backend for tensors on a device. PyTorch for ROCm calls AMD's GPUs "cuda"."""
    return "host" if device.type == "cpu" else backend_of_gpus()


class Communicators:
    """Holds the communicators of a group, by type of device.

    Attributes:
        of: Type of device -> its open communicator.
        devices: Type of device -> the device that its communicator was opened for.
        messages: Sends and receives the group's messages, on a communicator of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Makes the communicators for host tensors and for messages. Collective among the group.

        Raises:
            Timeout, PeerLost: A rank did not call in time, or its process ended.
            BackendError: A rank cannot start, or the ranks are on several machines.
        """
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self.of: dict[str, Communicator] = {}
        self.devices: dict[str, torch.device] = {}
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
            Error: A CUDA graph is being captured.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        refuse_capture(device, "this group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = self._rank, self._world_size
        keys = [f"{device.type}/{each}" for each in range(world_size)]

        def find() -> Opener:
            if rank == 0:
                # All other ranks have connected to rank 0, so they have read the keys. Rank 0
                # deletes the keys, so that a later group of the same name does not read them.
                for key in keys:
                    self._store.delete_key(key)
            return opener(backend_for(device), "number", device.index or 0)

        def exchange(text: str, seconds: float) -> list[str]:
            self._store.set(keys[rank], text)
            return [self._read(peer, key, seconds) for peer, key in enumerate(keys)]

        job_rank = job.JobRank("torch.distributed", rank, world_size, rank, exchange)
        env = replace(read(), timeout=self._timeout_s, first_timeout=self._timeout_s)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            env = replace(env, check=1)
        try:
            comm = join(job_rank, env, find)
        except Error as error:
            raise of_torch(error) from error
        if device.type == "cuda":
            give_stream(comm, device, env.streams)
        self.of[device.type] = comm
        self.devices[device.type] = device
        return comm

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
        for comm in (*self.of.values(), self.messages.comm):
            comm.timeout = seconds

    def close(self) -> None:
        """Closes all communicators of the group on this rank. Idempotent."""
        self.messages.close()
        for comm in self.of.values():
            free_stream(comm)
            comm.close()

    def fail(self) -> None:
        """Makes all ranks' waits fail, those that are under way included."""
        for comm in (self.messages.comm, *self.of.values()):
            comm.abort()
