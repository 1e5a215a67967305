"""What the backends for GPUs need."""

from ...base.errors import BackendError
from .finding import Finding


def cuda() -> Finding:
    """NVIDIA's driver and compiler, the GPUs, and how they reach each other's memory."""
    # Imported here, because they need the compiled core, which is another check's.
    from ...base import env
    from ...gpu import driver, sharing
    from ...jit.nvrtc import compiler_name

    reason = "The cuda backend needs cuda-bindings, NVRTC and NVIDIA's driver."
    gpu = driver.table()
    try:
        compiler = compiler_name()
        count = driver.num_devices()
        devices = [driver.device(ordinal) for ordinal in range(count)]
    except BackendError as error:
        return Finding("no", str(error), reason, gpu.cure)
    if count == 0:
        return Finding(
            "no", f"{compiler}, no GPU", f"{gpu.visible_devices} may hide them.", gpu.cure
        )
    found = ", ".join(f"{each.ordinal}: {each.name} ({each.arch})" for each in devices)
    apart = [(a, b) for a in range(count) for b in range(a) if not driver.can_access(a, b)]
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory."
        cure = f"Choose GPUs with NVLink or peer-to-peer PCIe by {gpu.visible_devices}."
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
    """AMD's GPUs. Never ok, because KCCL cannot use them yet."""
    from ...gpu import hip
    from ...gpu.table import DriverError

    reason = "This version of KCCL has no hip backend yet."
    try:
        found = f"{hip.LIBRARY}: {hip.num_devices()} GPUs"
        cure = 'Use backend="host", which is the default.'
    except DriverError as error:
        found = str(error)
        cure = "Check ROCm and its device files; the host backend needs neither."
    except BackendError as error:
        found = str(error)
        cure = "Install ROCm if this machine has such a GPU; the host backend needs none."
    return Finding("no", found, reason, cure)
