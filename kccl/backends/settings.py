"""The sizes of the scratch, on which all ranks of a communicator must agree."""

from dataclasses import dataclass

from ..ranks.windows import layout


@dataclass(frozen=True)
class Settings:
    """Sizes, which are the same on all ranks.

    Attributes:
        num_channels: Channels, which are independent sequences of calls.
        blocks_per_channel: Most blocks of one call.
        packet_bytes: Payload bytes of one ll16 or sentinel slot.
        staging_bytes: Bytes of one staging slot.
        exchange_bytes: Payload bytes of all slices of one GridExchange.
        message_bytes: Bytes of the ring in which each peer leaves messages, or on GPUs of all
            pipes from one peer; a power of two, or 0 for none.
        epoch_bits: Width of epochs in bits.
    """

    num_channels: int = 4
    blocks_per_channel: int = 1
    packet_bytes: int = 4096
    staging_bytes: int = 524288
    exchange_bytes: int = 4096
    message_bytes: int = 0
    epoch_bits: int = 32

    @property
    def scratch_channels(self) -> int:
        """Returns the channels of the scratch: each block of a call has one."""
        return self.num_channels * self.blocks_per_channel

    def layout(self, world_size: int) -> dict[str, int]:
        """Returns the fields of KcclLayout."""
        sizes = self.packet_bytes, self.staging_bytes, self.exchange_bytes, self.message_bytes
        return layout(world_size, self.scratch_channels, *sizes)
