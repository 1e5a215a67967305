"""Defines what a probe of GPUs measures: readings, matrices, and their expected ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .parts import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity that a probe measures.

    Attributes:
        unit: Its unit.
        text: Its description, for tables.
        advice: What to check on a machine if a reading is out of its range.
    """

    unit: str
    text: str
    advice: str


_CLOCK = "the GPU's clock (nvidia-smi -q -d CLOCK,PERFORMANCE names what holds it down)"
_SHARED = "whether another program uses the GPU, and whether it is a part of one (MIG, a vGPU)"
_MEMORY = "ECC errors and remapped rows (nvidia-smi -q -d ECC,ROW_REMAPPER), " + _SHARED
_LINKS = "the links' state and errors (nvidia-smi nvlink -s and -e, rocm-smi --showxgmierr)"
_PCIE = (
    "the width and speed of the PCIe link (lspci -vv, LnkSta), and the NUMA node of this process"
)
_L2 = _CLOCK + ", then " + _SHARED

QUANTITIES = {
    "clock_mhz": Quantity(unit="MHz", text="clock of the compute units", advice=_CLOCK),
    "unit_to_unit_us": Quantity(
        unit="us", text="a word between two compute units, one way, mean", advice=_L2
    ),
    "same_half_us": Quantity(unit="us", text="of these, units of one half", advice=_L2),
    "other_half_us": Quantity(unit="us", text="of these, units of two halves", advice=_L2),
    "near_ticks": Quantity(unit="cycles", text="a load of a near line of L2", advice=_L2),
    "far_ticks": Quantity(unit="cycles", text="a load of a far line of L2", advice=_L2),
    "granule_bytes": Quantity(
        unit="bytes", text="neighbouring bytes that are near together", advice=_L2
    ),
    "memory_gbps": Quantity(unit="GB/s", text="reads from the GPU's memory", advice=_MEMORY),
    "cache_gbps": Quantity(unit="GB/s", text="reads from L2", advice=_L2),
    "poll_us": Quantity(unit="us", text="one poll, idle", advice=_L2),
    "loaded_poll_us": Quantity(unit="us", text="one poll under a full stream", advice=_MEMORY),
    "loaded_unit_to_unit_us": Quantity(
        unit="us", text="a word between two compute units under a full stream", advice=_MEMORY
    ),
    "loaded_gbps": Quantity(unit="GB/s", text="that stream", advice=_MEMORY),
    "host_us": Quantity(unit="us", text="a word between host and GPU, one way", advice=_PCIE),
    "from_host_gbps": Quantity(unit="GB/s", text="reads from pinned host memory", advice=_PCIE),
    "to_host_gbps": Quantity(unit="GB/s", text="writes to pinned host memory", advice=_PCIE),
    "peer_us": Quantity(unit="us", text="a word from GPU to GPU, one way", advice=_LINKS),
    "peer_gbps": Quantity(unit="GB/s", text="writes from GPU to GPU", advice=_LINKS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A measured number.

    Attributes:
        of: Id of the device; or for a pair both ids, as in "gpu0 > gpu1", in the data's direction.
        what: A key of QUANTITIES.
        figure: The number, in that quantity's unit.
    """

    of: str
    what: str
    figure: Figure

    def __post_init__(self) -> None:
        _known(self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Measured numbers of pairs.

    Attributes:
        of: Id of the device whose parts are the pairs; "gpus" for pairs of GPUs.
        what: A key of QUANTITIES.
        rows, columns: Ids of devices, numbers of compute units, or offsets in bytes.
        values: `[row][column]`; None for a pair that was not measured.
        source: Id of the Source.
    """

    of: str
    what: str
    rows: tuple[str | int, ...]
    columns: tuple[str | int, ...]
    values: tuple[tuple[float | None, ...], ...]
    source: str

    def __post_init__(self) -> None:
        _known(self.what)
        width = len(self.columns)
        if len(self.values) != len(self.rows) or any(len(row) != width for row in self.values):
            raise ValueError(
                f"matrix {self.what!r} of {self.of!r} must be {len(self.rows)} x {width}"
            )
        known = [value for row in self.values for value in row if value is not None]
        if not all(math.isfinite(value) for value in known):
            raise ValueError(f"matrix {self.what!r} of {self.of!r} must be finite, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of a quantity on the GPUs of a healthy machine.

    Attributes:
        what: A key of QUANTITIES.
        low, high: The ends of the range.
        source: Id of the Source from which they are derived.
    """

    what: str
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        _known(self.what)
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"range of {self.what!r} is {self.low} to {self.high}")


def _known(what: str) -> None:
    if what not in QUANTITIES:
        raise ValueError(f"quantity is {what!r}, must be one of {', '.join(QUANTITIES)}")
