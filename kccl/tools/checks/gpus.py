"""What the backends for GPUs need."""

import ctypes

from ...base.errors import BackendError
from .finding import Finding


def cuda() -> Finding:
    """NVIDIA's driver and compiler, the GPUs, and how they reach each other's memory."""
    # Imported here, because they need the compiled core, which is another check's.
    from ...base import env
    from ...gpu import driver, sharing
    from ...jit.nvrtc import compiler_name

    reason = "The cuda backend needs cuda-bindings, NVRTC and NVIDIA's driver."
    cure = "pip install 'kccl[cuda]', and the driver where the GPU is; the host backend needs none."
    try:
        compiler = compiler_name()
        count = driver.num_devices()
        devices = [driver.device(ordinal) for ordinal in range(count)]
    except BackendError as error:
        return Finding("no", str(error), reason, cure)
    if count == 0:
        return Finding("no", f"{compiler}, no GPU", "CUDA_VISIBLE_DEVICES may hide them.", cure)
    found = ", ".join(f"{each.ordinal}: {each.name} ({each.arch})" for each in devices)
    apart = [(a, b) for a in range(count) for b in range(a) if not driver.can_access(a, b)]
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory."
        cure = "Choose GPUs with NVLink or peer-to-peer PCIe by CUDA_VISIBLE_DEVICES."
        return Finding("warn", f"{compiler}; {found}", reason, cure)
    forced = env.read().windows
    for each in devices:
        # "peer" is for ranks that are threads. This check is about processes.
        way = sharing.choose(each, are_threads=False, forced="" if forced == "peer" else forced)
        if way.caveat:
            cure = (
                "After a loss, expect comm.shrink() to fail where it does not with file "
                "descriptors. Windows are given back when the process ends."
            )
            return Finding(
                "warn", f"{compiler}; {found}; windows by CUDA IPC", f"{way.caveat}.", cure
            )
    return Finding("ok", f"{compiler}; {found}; all reach each other's memory")


def hip() -> Finding:
    """AMD's GPUs."""
    return _gpus("libamdhip64.so", "hipInit", "hipGetDeviceCount", "hip", "ROCm")


def _gpus(library: str, init: str, count: str, backend: str, driver: str) -> Finding:
    """Looks for GPUs that this version of KCCL cannot use. Never ok."""
    reason = f"This version of KCCL has no {backend} backend yet."
    try:
        functions = ctypes.CDLL(library)
    except OSError as error:
        cure = f"Install {driver} if this machine has such a GPU; the host backend needs none."
        return Finding("no", str(error), reason, cure)
    number = ctypes.c_int(0)
    for name, code in (
        (init, getattr(functions, init)(0)),
        (count, getattr(functions, count)(ctypes.byref(number))),
    ):
        if code != 0:
            cure = f"Check {driver} and its device files; the host backend needs neither."
            return Finding("no", f"{library}: {name} failed with code {code}", reason, cure)
    return Finding(
        "no", f"{library}: {number.value} GPUs", reason, 'Use backend="host", which is the default.'
    )
