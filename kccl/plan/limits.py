"""What a GPU can launch, for each of the simulator's models: one table for all who refuse more."""

from dataclasses import dataclass

from ..base.errors import InvalidArgument


@dataclass(frozen=True)
class Limits:
    """The limits of a GPU.

    Attributes:
        gpu: Its name, for messages.
        shared_bytes: Most block-shared memory of a block, static and dynamic.
        static_shared_bytes: Most of it in variables, which compilers refuse to exceed.
        reserved_shared_bytes: Shared memory that each block takes besides.
        multiprocessor_shared_bytes: Shared memory of one multiprocessor.
        multiprocessors: Their number.
        threads: Most threads that run on one multiprocessor.
        blocks: Most blocks that run on one multiprocessor.
        argument_bytes: Most bytes of a kernel's arguments; 0 for no limit of that kind.
    """

    gpu: str
    shared_bytes: int
    static_shared_bytes: int
    reserved_shared_bytes: int
    multiprocessor_shared_bytes: int
    multiprocessors: int
    threads: int
    blocks: int
    argument_bytes: int

    def check_launch(self, shared_bytes: int, argument_bytes: int) -> None:
        """Checks what a GPU would refuse.

        Args:
            shared_bytes: Dynamic shared memory of a block.
            argument_bytes: All arguments together.

        Raises:
            InvalidArgument: A GPU would refuse the launch.
        """
        check_shared(shared_bytes, self.shared_bytes, self.gpu)
        if self.argument_bytes and argument_bytes > self.argument_bytes:
            raise InvalidArgument(
                f"the arguments have {argument_bytes} bytes, must have at most "
                f"{self.argument_bytes} on {self.gpu}: put them into an array"
            )

    def resident_blocks(self, block: int, shared_bytes: int) -> int:
        """How many blocks run side by side on the whole GPU, if registers suffice.

        Args:
            block: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
        """
        each = min(self.blocks, self.threads // block)
        if shared_bytes:
            taken = shared_bytes + self.reserved_shared_bytes
            each = min(each, self.multiprocessor_shared_bytes // taken)
        return each * self.multiprocessors


# CUDA C++ Programming Guide, table of compute capabilities; the number of multiprocessors is that
# of an H100 or H200. AMD: the ISA of CDNA3; a compute unit of an MI300X runs 32 waves of 64.
LIMITS = {
    "sm_90": Limits("sm_90", 232_448, 49_152, 1024, 233_472, 132, 2048, 32, 32_764),
    "gfx942": Limits("gfx942", 65_536, 65_536, 0, 65_536, 304, 2048, 32, 0),
}


def check_shared(shared_bytes: int, most: int, gpu: str) -> None:
    """Checks the dynamic shared memory of a block.

    Args:
        shared_bytes: As given.
        most: What a block may have.
        gpu: Its name or architecture, for messages.

    Raises:
        InvalidArgument: It is too much.
    """
    if shared_bytes > most:
        raise InvalidArgument(
            f"shared_bytes is {shared_bytes}, must be at most {most}: a block on {gpu} has no more "
            "shared memory"
        )


def not_resident(grid: int, room: int, name: str, block: int) -> InvalidArgument:
    """The error for blocks that may wait for each other and cannot all run at once.

    Args:
        grid: How many blocks were asked for.
        room: How many run at once.
        name: The kernel.
        block: Threads of a block.
    """
    return InvalidArgument(
        f"grid is {grid}, must be at most {room}: {name} takes a DeviceComm, so its blocks "
        f"may wait for each other, and no more blocks of {block} threads run at once"
    )
