"""The limits of a launch on each of the simulator's GPU models, in one table."""

from dataclasses import dataclass

from ..base.errors import InvalidArgument


@dataclass(frozen=True)
class Limits:
    """The limits of a GPU.

    Attributes:
        gpu: The GPU's name, for messages.
        shared_bytes: Most block-shared memory of a block, static and dynamic.
        static_shared_bytes: Most block-shared memory in variables. Compilers refuse more.
        reserved_shared_bytes: Shared memory that the GPU takes for each block in addition.
        multiprocessor_shared_bytes: Shared memory of one multiprocessor.
        multiprocessors: Number of multiprocessors.
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
        """Checks a launch by the limits of the GPU.

        Args:
            shared_bytes: Dynamic shared memory of a block.
            argument_bytes: Bytes of all arguments together.

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
        """Returns how many blocks run side by side on the whole GPU, if registers suffice.

        Args:
            block: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
        """
        each = min(self.blocks, self.threads // block)
        if shared_bytes:
            taken = shared_bytes + self.reserved_shared_bytes
            each = min(each, self.multiprocessor_shared_bytes // taken)
        return each * self.multiprocessors


# NVIDIA's numbers are from the CUDA C++ Programming Guide, table of compute capabilities, and the
# number of multiprocessors is that of an H100 or H200. AMD's numbers are from the ISA of CDNA3. A
# compute unit of an MI300X runs 32 waves of 64.
LIMITS = {
    "sm_90": Limits("sm_90", 232_448, 49_152, 1024, 233_472, 132, 2048, 32, 32_764),
    "gfx942": Limits("gfx942", 65_536, 65_536, 0, 65_536, 304, 2048, 32, 0),
}


@dataclass(frozen=True)
class Needs:
    """The resources of a GPU that a compiled kernel needs.

    Attributes:
        threads: Most threads that a block of the kernel may have.
        registers: Registers of each thread.
        static_shared_bytes: Bytes of the kernel's variables in block-shared memory.
    """

    threads: int
    registers: int
    static_shared_bytes: int

    def check_launch(self, name: str, block: int, shared_bytes: int, most: int, gpu: str) -> None:
        """Checks a launch, which a GPU would refuse with an error code that has many reasons.

        Args:
            name: The kernel.
            block: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
            most: Most bytes of shared memory of a block, static and dynamic.
            gpu: The GPU's name or architecture, for messages.

        Raises:
            InvalidArgument: The GPU would refuse the launch.
        """
        check_shared(shared_bytes, most, gpu, self.static_shared_bytes)
        if block > self.threads:
            raise InvalidArgument(
                f"block is {block}, must be at most {self.threads}: the code of {name} allows no "
                f"more threads, by its {self.registers} registers for each thread or by its "
                f"__launch_bounds__; with __launch_bounds__({block}) the compiler makes them fit"
            )


def check_shared(shared_bytes: int, most: int, gpu: str, variables: int = 0) -> None:
    """Checks the shared memory of a block.

    Args:
        shared_bytes: Bytes of the block's dynamic shared memory, as the caller gave them.
        most: Most bytes of shared memory that a block may have.
        gpu: The GPU's name or architecture, for messages.
        variables: Bytes of the kernel's variables in shared memory.

    Raises:
        InvalidArgument: The block has too much.
    """
    if shared_bytes + variables > most:
        used = f" besides the {variables} bytes of the kernel's variables" if variables else ""
        raise InvalidArgument(
            f"shared_bytes is {shared_bytes}, must be at most {max(most - variables, 0)}: a block "
            f"on {gpu} has no more shared memory{used}"
        )


def not_resident(grid: int, room: int, name: str, block: int) -> InvalidArgument:
    """Returns the error for blocks that may wait for each other and cannot all run at once.

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
