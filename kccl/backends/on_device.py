"""Makes the backends of ranks that drive GPUs."""

from dataclasses import dataclass

from ..base import abi
from ..gpu import driver
from ..ranks.mesh import Mesh
from .base import Backend
from .gpu import GpuBackend
from .settings import Settings
from .shapes import SIZES
from .staged import StagedBackend


@dataclass(frozen=True)
class OnDevice:
    """See Opener: makes the backends of a rank that drives one GPU.

    Attributes:
        device: The GPU, of the vendor that driver.choose() has chosen.
    """

    device: driver.Device
    most_ranks = abi.MAX_WORLD_SIZE
    spans_nodes = True

    @property
    def name(self) -> str:
        """See Opener."""
        return driver.table().backend

    @classmethod
    def of_process(cls, local_rank: int) -> "OnDevice":
        """Makes a process's opener: for its current device, else for the one of its local rank."""
        return cls(driver.pick_device(local_rank))

    @classmethod
    def of_thread(cls, rank: int) -> "OnDevice":
        """Makes a thread's opener. If there are more ranks than GPUs, ranks share GPUs."""
        return cls(driver.device(rank % max(driver.num_devices(), 1)))

    @classmethod
    def number(cls, ordinal: int) -> "OnDevice":
        """Makes the opener of a rank that drives the GPU of this number in its process."""
        return cls(driver.device(ordinal))

    def settings(self, epoch_bits: int) -> Settings:
        """See Opener."""
        return Settings(**SIZES, epoch_bits=epoch_bits)

    def __call__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> Backend:
        """See Opener."""
        make = StagedBackend if mesh.homes else GpuBackend
        return make(
            self.device,
            mesh,
            settings,
            shares_cores=shares_cores,
            are_threads=are_threads,
            timeout=timeout,
        )
