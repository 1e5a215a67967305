"""Names for addresses of simulated memory, for reports."""

import bisect
import threading
from collections.abc import Callable, Mapping

from ..base import abi
from ..base.abi import ffi

# Takes an offset in a region, and returns the name of the byte there, as in "flag 'written' on
# channel 0, from rank 2".
Namer = Callable[[int], str]

_PACKET_BYTES = 16


class Regions:
    """Names of address ranges. A new range replaces the one with the same first address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._known: dict[int, tuple[int, Namer]] = {}
        # First address of a range -> the name of all its bytes together. Removed ranges stay here.
        self._wholes: dict[int, str] = {}

    def add(self, address: int, num_bytes: int, name: Namer, whole: str = "") -> None:
        """Adds a range of addresses with its names.

        Args:
            address, num_bytes: The range.
            name: Returns the name of each byte.
            whole: Names all its bytes together, as in "window 0 of rank 1".
        """
        with self._lock:
            if address not in self._known:
                bisect.insort(self._begins, address)
            self._known[address] = num_bytes, name
            self._wholes[address] = whole

    def whole(self, address: int) -> str:
        """Returns the name of the range that begins or began at `address`; "" if it has none."""
        with self._lock:
            return self._wholes.get(address, "")

    def remove(self, address: int) -> None:
        """Forgets the range that begins at `address`."""
        with self._lock:
            self._begins.remove(address)
            del self._known[address]

    def name(self, address: int) -> str:
        """Returns the name of an address; the address itself if it is in no known range."""
        with self._lock:
            index = bisect.bisect_right(self._begins, address) - 1
            if index < 0:
                return f"{address:#x}"
            begin = self._begins[index]
            num_bytes, name = self._known[begin]
        return name(address - begin) if address - begin < num_bytes else f"{address:#x}"


def window_namer(layout: Mapping[str, int], world_size: int, rank: int) -> Namer:
    """Returns the function that names the bytes of KCCL's own window.

    Args:
        layout: The fields of KcclLayout.
        world_size: Number of ranks of the communicator.
        rank: The rank that owns the window.
    """
    flags = {value: name for name, value in abi.members("KcclFlag", "kKcclFlag").items()}
    families = {value: name for name, value in abi.members("KcclGridWords", "kKcclGrid").items()}
    reaches = {value: name for name, value in abi.members("KcclReach", "kKcclReach").items()}
    regions = [name for name, _ in ffi.typeof("KcclLayout").fields if not name.endswith("_bytes")]
    if layout["message_bytes"] == 0:
        # Without pipes the layout has no region for them.
        regions.remove("messages")
    line = abi.LINE_BYTES

    def words(region: str, at: int) -> str:
        if region == "abort":
            return f"abort word from rank {at // 4}"
        if region == "records":
            return f"abort record from rank {at // line}"
        if region == "flags":
            rest, source = divmod(at // line, world_size)
            channel, flag = divmod(rest, abi.NUM_FLAGS)
            return f"flag '{flags[flag]}' on channel {channel}, from rank {source}"
        if region == "signals":
            signal_id, source = divmod(at // line, world_size)
            return f"signal {signal_id} from rank {source}"
        if region == "grid":
            family, block = divmod(at // line, abi.MAX_BLOCKS + abi.GRID_COUNTER_LINES)
            if at % line >= 8:
                return f"mark {at % line // 4 - 2} of what block {block} has open"
            is_counter = block >= abi.MAX_BLOCKS
            whose = (
                f"counter {(block - abi.MAX_BLOCKS) // 2}"
                if is_counter
                else f"count of block {block}"
            )
            return f"grid {whose}, for its {families[family]}"
        if region == "exchanges":
            reach, block = divmod(at // 4, abi.MAX_BLOCKS)
            return f"epoch of block {block}'s exchanges, reach '{reaches[reach]}'"
        if region == "board":
            slot, at = divmod(at, 2 * layout["exchange_bytes"])
            reach, slot = divmod(slot, abi.NUM_EXCHANGE_SLOTS)
            packet, half = divmod(at // 8, _PACKET_BYTES // 8)
            board = f"the exchange's board, reach '{reaches[reach]}', slot {slot}"
            return f"half {half} of packet {packet} on {board}"
        if region == "sentinel":
            slot, at = divmod(at, layout["packet_bytes"])
            rest, source = divmod(slot, world_size)
            channel, slot = divmod(rest, abi.NUM_SENTINEL_SLOTS)
            return f"sentinel byte {at} on channel {channel}, slot {slot}, from rank {source}"
        if region == "messages":
            source, at = divmod(at, layout["message_bytes"])
            return f"byte {at} of the pipes from rank {source}"
        if region == "packets":
            slot, at = divmod(at, 2 * layout["packet_bytes"])
            rest, source = divmod(slot, world_size)
            channel, parity = divmod(rest, 2)
            packet, half = divmod(at // 8, _PACKET_BYTES // 8)
            slot_name = f"channel {channel}, parity {parity}, from rank {source}"
            return f"half {half} of packet {packet} on {slot_name}"
        assert region == "staging"
        slot, at = divmod(at, layout["staging_bytes"])
        rest, half = divmod(slot, 2)
        channel, parity = divmod(rest, 2)
        what = ("input", "result")[half]
        return f"byte {at} of the {what} in the staging slot of channel {channel}, parity {parity}"

    def name(offset: int) -> str:
        # If regions begin at the same offset, all but the last are empty. The list is reversed and
        # max() takes the first of equals, so this finds the last one.
        before = (each for each in reversed(regions) if layout[each] <= offset)
        region = max(before, key=layout.__getitem__)
        return f"{words(region, offset - layout[region])}, in rank {rank}'s window"

    return name


def state_namer(rank: int) -> Namer:
    """Returns the function that names the bytes of a rank's KcclState."""
    fields = [(field.offset, name) for name, field in ffi.typeof("KcclState").fields]

    def name(offset: int) -> str:
        return f"{max(each for each in fields if each[0] <= offset)[1]} in rank {rank}'s state"

    return name


def bytes_namer(what: str) -> Namer:
    """Returns the function that names bytes of memory that has no further structure."""
    return lambda offset: f"byte {offset} of {what}"
