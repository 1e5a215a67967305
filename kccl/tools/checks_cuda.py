"""The check of `kccl doctor` for the cuda backend."""

from ..base import env
from ..base.errors import BackendError
from ..gpu import driver, sharing
from ..jit.nvrtc import compiler_name


def look() -> tuple[str, ...]:
    """The fields of a checks.Finding: status, found, reason, cure."""
    reason = "The cuda backend needs cuda-bindings, NVRTC and NVIDIA's driver."
    cure = "pip install 'kccl[cuda]', and the driver where the GPU is; the host backend needs none."
    try:
        compiler = compiler_name()
        count = driver.num_devices()
        devices = [driver.device(ordinal) for ordinal in range(count)]
    except BackendError as error:
        return ("no", str(error), reason, cure)
    if count == 0:
        return ("no", f"{compiler}, no GPU", "CUDA_VISIBLE_DEVICES may hide them.", cure)
    found = ", ".join(f"{each.ordinal}: {each.name} ({each.arch})" for each in devices)
    apart = [(a, b) for a in range(count) for b in range(a) if not driver.can_access(a, b)]
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory."
        cure = "Choose GPUs with NVLink or peer-to-peer PCIe by CUDA_VISIBLE_DEVICES."
        return ("warn", f"{compiler}; {found}", reason, cure)
    forced = env.read().windows
    for each in devices:
        # "peer" is for ranks that are threads. This check is about processes.
        way = sharing.choose(each, are_threads=False, forced="" if forced == "peer" else forced)
        if way.caveat:
            cure = (
                "After a loss, expect comm.shrink() to fail where it does not with file "
                "descriptors. Windows are given back when the process ends."
            )
            return ("warn", f"{compiler}; {found}; windows by CUDA IPC", f"{way.caveat}.", cure)
    return ("ok", f"{compiler}; {found}; all reach each other's memory")
