"""Makes mpi4py's collectives by KCCL, for messages of every form that mpi4py takes.

Each function makes one call of Intracomm. (mpi_communicator.py makes calls with plain NumPy arrays
itself, which is faster.) It raises ByMpi, before anything is sent, if MPI must make the call.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base.abi import MAX_WORLD_SIZE
from ..base.errors import InvalidArgument
from ..plan.ops import Op
from .mpi_messages import ByMpi, Message
from .mpi_opening import Link
from .mpi_types import reduction

# Reductions for which this MPI accepts one array as send and receive buffer. mpi4py would make such
# a call on this rank, so KCCL must not refuse it: the other ranks would wait for it.
_TWICE = {"Scan", "Exscan"} if MPI.get_vendor()[0] == "Open MPI" else set()


def _root(link: Link, root: Any) -> int:
    try:
        number = operator.index(root)
    except TypeError as error:
        raise ByMpi("a root that is no number") from error
    if not 0 <= number < link.size:
        raise ByMpi("a root that is no rank")
    return number


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


def _check_same(a: Any, b: Any) -> None:
    """Raises ByMpi unless a equals b. May be used only where mpi4py would refuse the call, too."""
    if a != b:
        raise ByMpi("sizes that differ")


def _keep_blocks(recv: Message, got: Any, sizes: Sequence[int]) -> None:
    """Copies received blocks to the beginnings of a message's blocks, which may be longer.

    `got` has the received blocks, one after another, and `sizes` their lengths in bytes.

    Raises:
        InvalidArgument: A block of the message is too short. The other ranks have made the call.
    """
    # The bytes of a block behind the received ones keep their values.
    room = recv.given().copy()
    begin = start = 0
    for size, block in zip(sizes, recv.sizes, strict=True):
        if size > block:
            raise InvalidArgument(
                f"a block of the receive buffer has {block} bytes, and {size} bytes have come for "
                "it: give the ranks the same lengths"
            )
        room[begin : begin + size] = got[start : start + size]
        begin, start = begin + block, start + size
    recv.keep(room)


def _reduction(message: Message, op: Any) -> tuple["np.dtype[Any]", Op]:
    if not isinstance(op, MPI.Op):
        raise ByMpi("an op that is none")
    found = reduction(message.datatype, op)
    if found is None:
        raise ByMpi("an operator or a datatype that KCCL does not reduce")
    return found


def _pair(
    sendbuf: Any, recvbuf: Any, blocks: tuple[int, int] = (1, 1)
) -> tuple[Message | None, Message]:
    """Returns a reduction's send message, which is None in place, and its receive message."""
    if _is_in_place(sendbuf):
        return None, Message(recvbuf, blocks[0], writable=True)
    recv = Message(recvbuf, blocks[1], writable=True)
    send = Message(sendbuf, blocks[0], writable=False)
    _check_same(send.datatype.handle, recv.datatype.handle)
    return send, recv


def _reduce_to_all(
    name: str, call: Any, send: Message | None, recv: Message, op: Any, **options: Any
) -> None:
    """Makes a reduction by `call`, a method of Link, into `recv`. If `send` is None, the call is in
    place, and its input is in `recv`. `name` is MPI's name of the call.
    """
    dtype, reducer = _reduction(recv, op)
    room = recv.room()
    x = recv.given() if send is None else send.given()
    if send is None and room is not x:
        np.copyto(room, x)
    elif send is not None:
        _check_same(x.size, room.size)
        if x.size and x.ctypes.data == room.ctypes.data:
            if name not in _TWICE:
                raise ByMpi("a buffer that is given twice")
            x = x.copy()
    call(
        room.view(dtype) if send is None else x.view(dtype),
        out=None if send is None else room.view(dtype),
        op=reducer,
        **options,
    )
    recv.keep(room)


def all_reduce(link: Link, sendbuf: Any, recvbuf: Any, op: Any) -> None:
    """Makes Allreduce."""
    _reduce_to_all("Allreduce", link.all_reduce, *_pair(sendbuf, recvbuf), op)


def scan(link: Link, sendbuf: Any, recvbuf: Any, op: Any, *, exclusive: bool) -> None:
    """Makes Scan, or Exscan if `exclusive`."""
    name = "Exscan" if exclusive else "Scan"
    _reduce_to_all(name, link.scan, *_pair(sendbuf, recvbuf), op, exclusive=exclusive)


def reduce(link: Link, sendbuf: Any, recvbuf: Any, op: Any, root: Any) -> None:
    """Makes Reduce. Only the root has a receive buffer."""
    root = _root(link, root)
    if link.rank == root:
        _reduce_to_all("Reduce", link.reduce, *_pair(sendbuf, recvbuf), op, root=root)
        return
    send = Message(sendbuf, 1, writable=False)
    dtype, name = _reduction(send, op)
    link.reduce(send.given().view(dtype), root=root, op=name)


def reduce_scatter_block(link: Link, sendbuf: Any, recvbuf: Any, op: Any) -> None:
    """Makes Reduce_scatter_block."""
    send, recv = _pair(sendbuf, recvbuf, (link.size, 1))
    _reduce_scatter(link, send, recv, None, op)


def reduce_scatter(link: Link, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: Any) -> None:
    """Makes Reduce_scatter."""
    if recvcounts is None:
        raise ByMpi("no recvcounts")
    send, recv = _pair(sendbuf, recvbuf)
    counts = _counts(recvcounts, link.size)
    if send is not None:
        _check_same(recv.counts[0], counts[link.rank])
        _check_same(send.counts[0], sum(counts))
    else:
        _check_same(recv.counts[0], sum(counts))
    _reduce_scatter(link, send, recv, counts, op)


def _reduce_scatter(
    link: Link, send: Message | None, recv: Message, counts: Sequence[int] | None, op: Any
) -> None:
    dtype, name = _reduction(recv, op)
    x = (recv if send is None else send).given().view(dtype)
    if send is None:
        # In place, MPI puts the result at the beginning of the buffer, and leaves the rest.
        part = np.empty(x.size // link.size if counts is None else counts[link.rank], dtype)
        link.reduce_scatter(x, out=part, op=name, counts=counts)
        room = recv.room()
        if room is not x:
            room[:] = recv.given()
        room[: part.nbytes] = part.view(np.uint8)
        recv.keep(room)
        return
    room = recv.room()
    if counts is None:
        _check_same(x.nbytes, room.size * link.size)
    link.reduce_scatter(x, out=room.view(dtype), op=name, counts=counts)
    recv.keep(room)


def _counts(counts: Any, size: int) -> list[int]:
    try:
        found = [operator.index(each) for each in counts]
    except TypeError as error:
        raise ByMpi("recvcounts that are no numbers") from error
    if len(found) != size or min(found) < 0:
        raise ByMpi("recvcounts that are none")
    return found


def broadcast(link: Link, buf: Any, root: Any) -> None:
    """Makes Bcast."""
    root = _root(link, root)
    message = Message(buf, 1, writable=link.rank != root)
    x = message.given() if link.rank == root else message.room()
    if link.rank == root and not x.flags.writeable:
        x = x.copy()
    link.broadcast(x, root=root)
    if link.rank != root:
        message.keep(x)


def _own(link: Link, block: Any, whole: Message) -> Any:
    """Returns this rank's block, which is its input in a call in place. `block` has the bytes of
    all blocks of the message `whole`.
    """
    begin = sum(whole.sizes[: link.rank])
    return block[begin : begin + whole.sizes[link.rank]]


def all_gather(link: Link, sendbuf: Any, recvbuf: Any, *, is_vector: bool) -> None:
    """Makes Allgather, or Allgatherv if `is_vector`."""
    recv = Message(recvbuf, link.size, writable=True, is_vector=is_vector)
    if _is_in_place(sendbuf):
        room = recv.given()
        x = _own(link, room, recv).copy()
    else:
        room = recv.room()
        x = Message(sendbuf, 1, writable=False).given()
    if x.size == recv.sizes[link.rank]:
        link.all_gather(x, out=room, counts=recv.sizes if is_vector else None)
        recv.keep(room)
    else:
        # KCCL compares the lengths that ranks send and expect. The other ranks expect what this
        # rank sends, and not the length of its block in the receive buffer.
        sizes = [*recv.sizes] if is_vector else [x.size] * link.size
        sizes[link.rank] = x.size
        got = np.empty(sum(sizes), np.uint8)
        link.all_gather(x, out=got, counts=sizes if is_vector else None)
        _keep_blocks(recv, got, sizes)


def gather(link: Link, sendbuf: Any, recvbuf: Any, root: Any) -> None:
    """Makes Gather. Only the root has a receive buffer."""
    root = _root(link, root)
    if link.rank != root:
        link.gather(Message(sendbuf, 1, writable=False).given(), root=root)
        return
    recv = Message(recvbuf, link.size, writable=True)
    if _is_in_place(sendbuf):
        x = _own(link, recv.given(), recv).copy()
    else:
        x = Message(sendbuf, 1, writable=False).given()
    room = recv.room()
    if x.size == recv.sizes[root]:
        link.gather(x, root=root, out=room)
        recv.keep(room)
        return
    got = np.empty(x.size * link.size, np.uint8)
    link.gather(x, root=root, out=got)
    _keep_blocks(recv, got, [x.size] * link.size)


def scatter(link: Link, sendbuf: Any, recvbuf: Any, root: Any) -> None:
    """Makes Scatter. Only the root has a send buffer."""
    root = _root(link, root)
    if link.rank != root:
        recv = Message(recvbuf, 1, writable=True)
        room = recv.room()
        link.scatter(None, root=root, out=room)
        recv.keep(room)
        return
    send = Message(sendbuf, link.size, writable=False)
    x = send.given()
    if _is_in_place(recvbuf):
        link.scatter(x, root=root, out=np.empty(send.sizes[root], np.uint8))
        return
    recv = Message(recvbuf, 1, writable=True)
    room = recv.room()
    if recv.sizes[0] == send.sizes[root]:
        link.scatter(x, root=root, out=room)
        recv.keep(room)
        return
    got = np.empty(send.sizes[root], np.uint8)
    link.scatter(x, root=root, out=got)
    _keep_blocks(recv, got, [got.size])


def all_to_all(link: Link, sendbuf: Any, recvbuf: Any) -> None:
    """Makes Alltoall."""
    recv = Message(recvbuf, link.size, writable=True)
    if _is_in_place(sendbuf):
        x = recv.given().copy()
    else:
        x = Message(sendbuf, link.size, writable=False).given()
    room = recv.room()
    if x.size == room.size:
        link.all_to_all(x, out=room)
        recv.keep(room)
        return
    got = np.empty(x.size, np.uint8)
    link.all_to_all(x, out=got)
    _keep_blocks(recv, got, [x.size // link.size] * link.size)


# In the calls below a rank knows only its own lengths. So each call is an all_to_all with counts,
# which all ranks make, even with counts of 0. KCCL compares the length that a rank sends with the
# length that the receiver expects.


def all_to_all_parts(link: Link, sendbuf: Any, recvbuf: Any) -> None:
    """Makes Alltoallv."""
    _check_few(link)
    recv = Message(recvbuf, link.size, writable=True, is_vector=True)
    if _is_in_place(sendbuf):
        _move_parts(link, recv.given().copy(), recv.sizes, recv, recv.sizes)
        return
    send = Message(sendbuf, link.size, writable=False, is_vector=True)
    _move_parts(link, send.given(), send.sizes, recv, recv.sizes)


def gather_parts(link: Link, sendbuf: Any, recvbuf: Any, root: Any) -> None:
    """Makes Gatherv. Only the root has a receive buffer."""
    _check_few(link)
    root = _root(link, root)
    recv = None
    if link.rank == root:
        recv = Message(recvbuf, link.size, writable=True, is_vector=True)
    if recv is not None and _is_in_place(sendbuf):
        x = _own(link, recv.given(), recv).copy()
    else:
        x = Message(sendbuf, 1, writable=False).given()
    sends, nothing = [0] * link.size, [0] * link.size
    sends[root] = x.size
    _move_parts(link, x, sends, recv, nothing if recv is None else recv.sizes)


def scatter_parts(link: Link, sendbuf: Any, recvbuf: Any, root: Any) -> None:
    """Makes Scatterv. Only the root has a send buffer."""
    _check_few(link)
    root = _root(link, root)
    x, sends = np.empty(0, np.uint8), [0] * link.size
    if link.rank == root:
        send = Message(sendbuf, link.size, writable=False, is_vector=True)
        x, sends = send.given(), send.sizes
    receives = [0] * link.size
    if link.rank == root and _is_in_place(recvbuf):
        # With MPI.IN_PLACE the root's own part is not copied, so it is left out of the call.
        begin = sum(sends[:root])
        x = np.delete(x, slice(begin, begin + sends[root]))
        sends = [*sends[:root], 0, *sends[root + 1 :]]
        _move_parts(link, x, sends, None, receives)
        return
    recv = Message(recvbuf, 1, writable=True)
    receives[root] = recv.sizes[0]
    _move_parts(link, x, sends, recv, receives)


def _check_few(link: Link) -> None:
    if link.size > MAX_WORLD_SIZE:
        raise ByMpi("lengths that only their ranks know, of more ranks than a group has")


def _move_parts(
    link: Link, x: Any, sends: Sequence[int], recv: Message | None, receives: Sequence[int]
) -> None:
    """Sends each rank its part of `x`, and stores the parts that come from all ranks.

    Args:
        link: The communicator that makes the call.
        x: The bytes of all parts, one after another.
        sends, receives: The number of bytes to each rank, and from each rank.
        recv: The message in which received parts are stored; None if this rank receives nothing.
    """
    room = np.empty(0, np.uint8) if recv is None else recv.room()
    own = sends[link.rank]
    fits = own == receives[link.rank]
    # The other ranks do not know the lengths of this rank's part for itself. If they differ, this
    # rank still makes the call, because the others wait for it, and raises the error afterwards.
    comes = list(receives)
    comes[link.rank] = own
    out = room if fits else np.empty(sum(comes), np.uint8)
    if np.may_share_memory(x, out):
        x = x.copy()
    link.all_to_all(x, out=out, send_counts=sends, recv_counts=comes)
    if fits and recv is not None:
        recv.keep(out)
    elif recv is not None:
        _keep_blocks(recv, out, comes if len(recv.sizes) > 1 else [own])


NAMES: dict[Callable[..., None], str] = {
    all_reduce: "Allreduce",
    scan: "Scan and Exscan",
    reduce: "Reduce",
    reduce_scatter_block: "Reduce_scatter_block",
    reduce_scatter: "Reduce_scatter",
    broadcast: "Bcast",
    all_gather: "Allgather and Allgatherv",
    gather: "Gather",
    scatter: "Scatter",
    all_to_all: "Alltoall",
    all_to_all_parts: "Alltoallv",
    gather_parts: "Gatherv",
    scatter_parts: "Scatterv",
}
"""MPI's names of the calls."""
