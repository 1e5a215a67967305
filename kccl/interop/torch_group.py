"""The process group behind `torch.distributed.init_process_group("kccl")`.

A group makes one communicator for its tensors on the host and one for its tensors on a GPU. It
makes each at the first call that needs it. The ranks find each other through the group's store.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..backends.base import Opener
from ..backends.openers import opener
from ..base.env import read
from ..base.errors import InvalidArgument, Timeout
from ..comm import Communicator
from ..gpu import backend as backend_of_gpus
from ..ranks import bootstrap
from ..start import join
from . import torch_absent as absent
from . import torch_collectives
from .torch_dynamo import untraced
from .torch_tensors import order, refuse_capture
from .torch_work import Work

DEVICES = ("cpu", "cuda")
_POLL_S = 0.002  # between two polls of the store


def backend_for(device: torch.device) -> str:
    """The backend for a device's tensors. AMD's GPUs are "cuda", too, in PyTorch for ROCm."""
    return "host" if device.type == "cpu" else backend_of_gpus()


class ProcessGroup(dist.ProcessGroup):
    """A group of `torch.distributed` whose collectives KCCL runs.

    Tensors must be C-contiguous, of float32, float64, float16, bfloat16, int32 or int64; those of
    broadcast and all_gather may have any dtype. Calls on a GPU go to the current stream. The calls
    of one group run one after another, even on different streams.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Makes the group. It makes no communicator yet.

        Args:
            store: A store of this group alone.
            rank, world_size: This process's rank in the group, and the size of the group.
            timeout: How long ranks wait for each other. Replaces KCCL_TIMEOUT and
                KCCL_FIRST_TIMEOUT.
        """
        super().__init__(rank, world_size)
        self._store = store
        self._name = self._description = ""
        self._timeout_s = timeout.total_seconds()
        # Type of device -> its communicator, and the device of its tensors.
        self._comms: dict[str, Communicator] = {}
        self._devices: dict[str, torch.device] = {}

    # ---- Methods that PyTorch calls; it gives their names ------------------------------------

    def getBackendName(self) -> str:
        return "kccl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    # PyTorch asks the backend for these. The group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> "ProcessGroup":
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        config = dist.get_backend_config(self).split(",")
        return [torch.device(each) for each in DEVICES if f"{each}:kccl" in config]

    # ---- Communicators -----------------------------------------------------------------------

    def communicator(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device. The first call for a device type is collective.

        Raises:
            NotImplementedError: The group was made for other devices.
            Error: The communicator must be made first, and a CUDA graph is being captured.
            Timeout, PeerLost: A rank did not come, or went.
        """
        if device.type in self._comms:
            return self._comms[device.type]
        config = dist.get_backend_config(self)
        if f"{device.type}:kccl" not in config.split(","):
            raise NotImplementedError(
                f"this group was made for {config}, and its tensor is on {device}: a group of "
                'backend "kccl" gets all tensors of the group; use init_process_group("kccl"), and '
                "new_group(backend=...) for calls that another backend shall run"
            )
        return self._open(device)

    def _open(self, device: torch.device) -> Communicator:
        refuse_capture(device, "this group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = self.rank(), self.size()
        keys = [f"{device.type}/{each}" for each in range(world_size)]

        def find() -> Opener:
            if rank == 0:
                # All other ranks have connected with this one, so they have read the keys. Delete
                # them, so that a later group of the same name does not find them.
                for key in keys:
                    self._store.delete_key(key)
            return opener(backend_for(device), "number", device.index or 0)

        def exchange(text: str, seconds: float) -> list[str]:
            self._store.set(keys[rank], text)
            return [self._read(peer, key, seconds) for peer, key in enumerate(keys)]

        job_rank = bootstrap.JobRank("torch.distributed", rank, world_size, rank, exchange)
        env = replace(read(), timeout=self._timeout_s, first_timeout=self._timeout_s)
        self._comms[device.type] = join(job_rank, env, find)
        self._devices[device.type] = device
        return self._comms[device.type]

    def _read(self, peer: int, key: str, seconds: float) -> str:
        # Why not Store.wait(): Ctrl-C does not interrupt it.
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise Timeout(
                    f"rank {self.rank()} waited {seconds:.3g} s for rank {peer} to make "
                    "its first call on this process group",
                    rank=self.rank(),
                    peer=peer,
                    collective="start-up",
                    waited_s=seconds,
                )
            time.sleep(_POLL_S)
        text: str = self._store.get(key).decode()
        return text

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long ranks wait for each other from now on."""
        self._timeout_s = timeout.total_seconds()
        for comm in self._comms.values():
            comm.timeout = self._timeout_s

    def shutdown(self) -> None:
        """Closes this rank's communicators. dist.destroy_process_group() calls it. Idempotent."""
        for comm in self._comms.values():
            comm.close()

    def abort(self) -> None:
        """Makes all ranks' waits fail, and closes this rank's communicators."""
        for comm in self._comms.values():
            comm.abort()
            comm.close()

    # ---- Collectives -------------------------------------------------------------------------

    @untraced
    def barrier(self, opts: Any) -> Work:
        """dist.barrier: on the GPU if the group has a communicator for it, or if device_ids says.

        On the GPU, wait() of the result waits until all ranks' streams have reached the barrier.
        """
        device = self._devices.get("cuda", torch.device("cpu"))
        if opts.device_ids:
            given = torch.device("cuda", opts.device_ids[0])
            if device.type == "cuda" and device != given:
                raise InvalidArgument(f"device_ids is {opts.device_ids}, must be [{device.index}]")
            device = given
        comm = self._comms.get(device.type) or self._open(device)
        stream = order(comm, device)
        if stream is None:
            comm.barrier()
        else:
            comm.barrier(stream=stream)
        return Work(comm, [], stream, opts, blocks_host=True)

    def run(
        self,
        x: torch.Tensor,
        results: list[torch.Tensor],
        opts: Any,
        call: Callable[[Communicator], Any],
    ) -> Work:
        """Makes a call on the communicator for the device of `x`.

        Args:
            x: A tensor of the call.
            results: The tensors that it writes.
            opts: PyTorch's options of the call.
            call: Makes the call.
        """
        comm = self.communicator(x.device)
        stream = order(comm, x.device)
        call(comm)
        return Work(comm, results, stream, opts)


for _name, _absent_call in absent.METHODS.items():
    setattr(ProcessGroup, _name, untraced(_absent_call))
for _collective in torch_collectives.NAMES:
    for _name, _method in torch_collectives.load(_collective).GROUP_METHODS.items():
        setattr(ProcessGroup, _name, untraced(_method))
