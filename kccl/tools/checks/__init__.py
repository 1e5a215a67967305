"""The checks of `kccl doctor`. Each function checks one thing and returns one Finding."""

from collections.abc import Callable

from . import gpus, host, optional
from .finding import Finding

# (name, whether the host backend needs it, check)
CHECKS: tuple[tuple[str, bool, Callable[[], Finding]], ...] = (
    ("compiled core", True, host.compiled_core),
    ("shared memory", True, host.shared_memory),
    ("process ends", True, host.process_ends),
    ("sockets", True, host.abstract_sockets),
    ("variables", True, host.variables),
    ("1 rank", True, host.exchange(1)),
    ("2 ranks", True, host.exchange(2)),
    ("cores", False, host.cores),
    ("CPU quota", False, host.quota),
    ("MPI", False, optional.mpi),
    ("Open MPI, for baselines", False, optional.open_mpi),
    ("simulator", False, optional.simulator),
    ("CUDA", False, gpus.cuda),
    ("HIP", False, gpus.hip),
    ("plots", False, optional.packages),
    ("PyTorch", False, optional.torch),
)
