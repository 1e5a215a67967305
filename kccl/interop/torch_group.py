"""The process group behind `torch.distributed.init_process_group("kccl")`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import Error, WaitFailed
from ..comm import Communicator
from . import torch_collectives, torch_profile
from .torch_calls import is_async, only
from .torch_communicators import Communicators
from .torch_dynamo import untraced
from .torch_errors import InvalidArgument, of_torch
from .torch_messages import Call, MessageWork
from .torch_monitored import monitored_barrier
from .torch_offers import Offers
from .torch_queue import AnyWork, Queue
from .torch_split import split_group
from .torch_streams import Place, enqueue
from .torch_versions import init_group
from .torch_work import CoalescedWork, Work

DEVICES = ("cpu", "cuda")


class ProcessGroup(Offers, dist.ProcessGroup):
    """A group of `torch.distributed` whose collectives KCCL runs.

    Tensors must be dense: C-contiguous, or permuted, as in torch.channels_last, with the same
    strides on all ranks. Calls that reduce take the dtypes of comm.all_reduce, and others take any
    dtype. Calls on a GPU are enqueued on the current stream or, if they are asynchronous, on one
    beside it. The calls of one group run one after another, even on different streams.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
    ) -> None:
        """Makes the group and its communicators for host tensors and messages. Collective.

        Args:
            store: A store that no other group uses.
            rank, world_size: This process's rank in the group, and the size of the group.
            timeout: How long ranks wait for each other. Replaces KCCL_TIMEOUT and
                KCCL_FIRST_TIMEOUT.
        """
        init_group(self, store, rank, world_size)
        self._store = store
        self._name = self._description = ""
        self._timeout = timeout
        self._sequence = 0
        # Since start_coalescing(): the messages held back, else None; and the Works of collectives.
        self._coalesced: list[Call] | None = None
        self._coalesced_works: list[AnyWork] = []
        # Backend of each device type, as ["cpu:gloo", "cuda:kccl"]; None until _pairs() is called.
        self._config: list[str] | None = None
        # The calls of the communicator for host tensors.
        self._queue = Queue()
        # Type of device -> its communicator, once communicator() has found that this group has it.
        self._ready: dict[str, Communicator] = {}
        self._comms = Communicators(store, rank, world_size, timeout.total_seconds())

    # ---- Methods that PyTorch calls by these names -------------------------------------------

    def getBackendName(self) -> str:
        return "kccl"

    def name(self) -> str:
        return "kccl"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _get_backend(self, device: torch.device) -> Any:
        return self

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each.split(":")[0]) for each in self._pairs()]

    def _pairs(self) -> list[str]:
        if self._config is None:
            self._config = str(dist.get_backend_config(self)).split(",")
        return self._config

    def _has(self, device_type: str) -> bool:
        return f"{device_type}:kccl" in self._pairs()

    def eager_connect_single_device(self, device: "torch.device | None") -> None:
        # PyTorch calls this before it has registered the group. communicator() works only after.
        if device is not None and device.type not in self._comms.of:
            self._comms.open(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. dist.new_group() calls it on ranks that will not be in the new group."""

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> dist.ProcessGroup | None:
        """Returns a new group of some ranks; None on other ranks. dist.split_group calls it.

        If this group has several backends, the new group has them too, or only those for
        `device_types` if given. All ranks of this group must call it then.

        Raises:
            InvalidArgument: A rank is not in this group, or is given twice, or no backend has one
                of the device types.
        """
        return split_group(self, ranks, timeout, (group_name, group_desc), device_types)

    def _split_others(self, *_: Any) -> dist.ProcessGroup | None:
        """Splits the group of the other backends. A group of KCCL alone has none."""
        return None

    def _part(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        others: dist.ProcessGroup | None,
    ) -> "ProcessGroup":
        """Makes the group of some of its ranks. `others` is what _split_others() returned."""
        return ProcessGroup(store, rank, world_size, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long ranks wait for each other from now on."""
        self._timeout = timeout
        self._comms.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Makes the asynchronous calls that nobody has waited for, and closes this rank's
        communicators. dist.destroy_process_group() calls this. Idempotent.
        """
        self._queue.close()
        self._comms.close()

    def abort(self) -> None:
        """Makes all ranks' waits fail, and closes this rank's communicators.

        Asynchronous calls on the host that are not begun fail at once. If the ranks are on several
        machines, a wait within gloo still ends at the group's timeout, here and on the others. The
        communicators are closed then, and this method does not wait for that.
        """
        self._comms.fail()
        error = of_torch(Error("the process group was aborted before this call was made"))
        self._queue.abort(error, self._comms.close)

    # ---- Calls -------------------------------------------------------------------------------

    def communicator(self, device: torch.device) -> Communicator:
        """Returns the communicator for tensors on a device. The first call for a GPU is collective.

        Raises:
            NotImplementedError: The group was made for other devices.
            Error: The communicator must be made first, and a CUDA graph is being captured.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        if not self._has(device.type):
            raise NotImplementedError(
                f"this group was made for {','.join(self._pairs())}, and its tensor is on "
                f'{device}: use init_process_group("kccl") for tensors on the host and on GPUs, '
                "or name a backend for each device, that of kccl last"
            )
        comm = self._comms.of.get(device.type) or self._comms.open(device)
        self._ready[device.type] = comm
        return comm

    @untraced
    def barrier(self, opts: Any = None) -> Any:
        """Runs dist.barrier: on the GPU if device_ids names one or the group has used one.

        On a GPU, the result's wait() blocks the host until all ranks' streams are at the barrier.
        """
        device = self._device_of_barrier(opts)
        comm = self._comms.of.get(device.type) or self._comms.open(device)
        device = self._comms.devices[device.type]

        def call(comm: Communicator) -> None:
            if device.type == "cpu":
                comm.barrier()
            else:
                comm.barrier(stream=torch.cuda.current_stream(device))

        made = torch_profile.recorded(call, "barrier") if torch_profile.is_on() else call
        if device.type == "cpu":
            return self._on_host(comm, [], opts, made)
        return self._on_gpu(comm, device, made, [], [], opts, blocks_host=True)

    def _device_of_barrier(self, opts: Any) -> torch.device:
        ids = getattr(opts, "device_ids", None)
        device = self._comms.devices.get("cuda", torch.device("cpu"))
        if not ids:
            return device
        if device.type == "cuda" and device.index != ids[0]:
            raise InvalidArgument(f"device_ids is {ids}, must be [{device.index}]")
        return torch.device("cuda", ids[0])

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        results: list[torch.Tensor],
        opts: Any,
        call: Callable[[Communicator], Any],
    ) -> AnyWork:
        """Makes a call on the communicator for the device of its tensors.

        Args:
            inputs: The tensors that the call reads.
            results: The tensors that the call writes.
            opts: PyTorch's options of the call.
            call: Makes the call on the communicator that it is given.
        """
        device = (inputs or results)[0].device
        kind = device.type
        comm = self._ready.get(kind) or self.communicator(device)
        if torch_profile.is_on():
            call = torch_profile.recorded(call)
        if kind == "cpu":
            return self._on_host(comm, results, opts, call)
        return self._on_gpu(comm, device, call, inputs, results, opts)

    def _on_host(
        self,
        comm: Communicator,
        results: list[torch.Tensor],
        opts: Any,
        call: Callable[[Communicator], Any],
    ) -> AnyWork:
        """Makes a call on the host, or puts it into the queue if it is asynchronous."""
        self._sequence += 1
        work: AnyWork
        if is_async(opts):
            work = self._queue.add(lambda: call(comm), results, self._sequence)
        else:
            try:
                self._queue.make(lambda: call(comm))
            except Error as error:
                raise of_torch(error) from error
            work = Work(comm, results, sequence=self._sequence)
        if self._coalesced is not None:
            self._coalesced_works.append(work)
        return work

    def _on_gpu(
        self,
        comm: Communicator,
        device: torch.device,
        call: Callable[[Communicator], Any],
        inputs: Sequence[torch.Tensor],
        results: list[torch.Tensor],
        opts: Any,
        *,
        blocks_host: bool = False,
    ) -> Work:
        """Enqueues a call. If it is asynchronous, wait() raises its Timeout or PeerLost."""
        self._sequence += 1
        place: Place | None = None
        failure: Error | None = None
        in_background = is_async(opts)
        try:
            place = enqueue(comm, device, call, is_async=in_background)
        except Error as error:
            failure = of_torch(error)
            if not (in_background and isinstance(error, WaitFailed)):
                raise failure from error
        work = Work(
            comm,
            results,
            place,
            inputs,
            sequence=self._sequence,
            blocks_host=blocks_host,
            error=failure,
        )
        if self._coalesced is not None:
            self._coalesced_works.append(work)
        return work

    @untraced
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Runs dist.monitored_barrier, through the store."""
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(self._store, self.rank(), self.size(), limit, wait_all_ranks)

    # ---- Messages ----------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Begins a send, for dist.send and dist.isend. Takes any dtype."""
        return self._message(Call(only(tensors), peer, tag, receives=False))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Begins a receive from one rank, for dist.recv and dist.irecv. Takes any dtype."""
        return self._message(Call(only(tensors), peer, tag, receives=True))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Begins a receive from any rank, for dist.recv and dist.irecv. Takes any dtype."""
        return self._message(Call(only(tensors), None, tag, receives=True))

    # PyTorch's C++ looks up the method by this name.
    recvAnysource = recv_anysource

    def _message(self, call: Call) -> MessageWork | None:
        if self._coalesced is not None:
            self._coalesced.append(call)
            return None
        return self._begin([call])

    def _begin(self, calls: list[Call]) -> MessageWork:
        start = self._comms.messages.start
        if torch_profile.is_on():
            start = torch_profile.recorded(start, torch_profile.name_of(calls, self.rank()))
        try:
            return start(calls)
        except Error as error:
            raise of_torch(error) from error

    def start_coalescing(self, device: "torch.device | None" = None) -> None:
        """Holds later messages back until end_coalescing(). Collectives still run at once."""
        if self._coalesced is not None:
            raise InvalidArgument("calls are coalesced already: end_coalescing() must come first")
        self._coalesced, self._coalesced_works = [], []

    def end_coalescing(self, device: "torch.device | None" = None) -> Any:
        """Begins the messages that were held back, all together. Returns one Work for them and for
        the collectives that were made since start_coalescing().
        """
        calls, self._coalesced = self._coalesced, None
        made, self._coalesced_works = self._coalesced_works, []
        if calls is None:
            raise InvalidArgument("no calls are coalesced: start_coalescing() must come first")
        if not made:
            return self._begin(calls)
        return CoalescedWork([*made, self._begin(calls)] if calls else made)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing


METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(ProcessGroup, name) for name in ("send", "recv", "recv_anysource")
}
for _collective in torch_collectives.NAMES:
    METHODS |= torch_collectives.load(_collective).GROUP_METHODS
for _name, _method in METHODS.items():
    setattr(ProcessGroup, _name, untraced(_method))
