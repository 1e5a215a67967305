"""The names that findings of the simulator give to the bytes of a window."""

import pytest

from kccl.sim.regions import window_namer

# In their order.
REGIONS = {
    "abort": "abort word from rank 0",
    "records": "abort record from rank 0",
    "signals": "signal 0 from rank 0",
    "flags": "on channel 0, from rank 0",
    "grid": "grid count of block 0, for its",
    "exchanges": "epoch of block 0's exchanges",
    "messages": "byte 0 of the pipes from rank 0",
    "packets": "half 0 of packet 0 on channel 0, parity 0, from rank 0",
    "staging": "byte 0 of the input in the staging slot of channel 0",
    "board": "half 0 of packet 0 on the exchange's board",
    "sentinel": "sentinel byte 0 on channel 0, slot 0, from rank 0",
}


@pytest.mark.parametrize("message_bytes", [0, 256])
def test_the_first_byte_of_every_region_is_named(message_bytes):
    layout = {name: 65536 * index for index, name in enumerate(REGIONS)}
    sizes = dict.fromkeys(("packet_bytes", "staging_bytes", "exchange_bytes"), 256)
    layout |= sizes | {"message_bytes": message_bytes}
    known = dict(REGIONS)
    if message_bytes == 0:
        # Without pipes the layout gives them no place.
        layout["messages"] = 0
        del known["messages"]
    name = window_namer(layout, world_size=2, rank=1)
    for region, what in known.items():
        assert what in name(layout[region]), name(layout[region])
        assert name(layout[region]).endswith("in rank 1's window")
