"""What `kccl doctor` says of the cuda backend."""

from . import gpu
from .errors import BackendError
from .jit_cuda import compiler_name


def look() -> tuple[str, ...]:
    """Status, what was found, reason, cure: the fields of checks.Finding."""
    reason = "The cuda backend needs cuda.bindings, NVRTC and NVIDIA's driver."
    cure = "pip install 'kccl[cuda]', and the driver where the GPU is; the host backend needs none."
    try:
        compiler = compiler_name()
        count = gpu.num_devices()
        devices = [gpu.device(ordinal) for ordinal in range(count)]
    except BackendError as error:
        return ("no", str(error), reason, cure)
    if count == 0:
        return ("no", f"{compiler}, no GPU", "CUDA_VISIBLE_DEVICES may hide them.", cure)
    found = ", ".join(f"{each.ordinal}: {each.name} ({each.arch})" for each in devices)
    apart = [(a, b) for a in range(count) for b in range(a) if not gpu.can_access(a, b)]
    fds = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    if not all(gpu.attribute(ordinal, fds) for ordinal in range(count)):
        reason = "Their memory cannot be exported as file descriptors, so there are no windows."
        return ("no", f"{compiler}; {found}", reason, "Use the host backend.")
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory."
        cure = "Choose GPUs with NVLink or peer-to-peer PCIe by CUDA_VISIBLE_DEVICES."
        return ("warn", f"{compiler}; {found}", reason, cure)
    return ("ok", f"{compiler}; {found}; all reach each other's memory")
