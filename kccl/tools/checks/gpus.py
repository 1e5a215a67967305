"""Checks what the backends for GPUs need: driver, compiler, GPUs, access to each other's memory."""

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ...base.errors import BackendError
from .finding import LIMIT_S, Finding

if TYPE_CHECKING:
    from ...gpu.table import Table


def cuda() -> Finding:
    """Reports NVIDIA's driver and compiler, the GPUs, and whether they can access each other."""
    return _gpus("cuda")


def hip() -> Finding:
    """Reports AMD's GPUs and their driver, as cuda() does NVIDIA's."""
    return _gpus("hip")


# The program's argument is the name of a function of this module.
_PROGRAM = """
import dataclasses, json, sys
from kccl.tools.checks import gpus
print(json.dumps(dataclasses.asdict(getattr(gpus, sys.argv[1])())))
"""


def _elsewhere(backend: str) -> Finding:
    """Runs a backend's check in a new process, because one process drives GPUs of one vendor."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, backend],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise BackendError(f"the process for this check failed: {done.stderr.strip()[-400:]}")
    return Finding(**json.loads(done.stdout))


def _gpus(backend: str) -> Finding:
    # Imported here, because the import needs the compiled core. Another check reports if that is
    # missing.
    from ...gpu import driver

    gpu = driver.VENDORS[backend]
    reason = f"The {backend} backend needs {gpu.needs}."
    try:
        compiler = gpu.compiler.full_name
        count = int(gpu.call(gpu.names.num_devices))
        if count == 0:
            reason = f"{gpu.visible_devices} may hide them."
            return Finding("no", f"{compiler}, no GPU", reason, gpu.cure)
        # Choosing a vendor is final for a process. So it is chosen only when a GPU has been found.
        if not driver.may_choose(gpu):
            return _elsewhere(backend)
        driver.choose(gpu)
        return _together(gpu, compiler, count)
    except BackendError as error:
        return _refused(gpu, error, reason)


def _refused(gpu: "Table", error: BackendError, reason: str) -> Finding:
    """Turns an error into a Finding. If the error's text ends with a known cure, splits it off."""
    found = str(error)
    for cure in (gpu.cure, gpu.compiler.cure):
        if found.endswith(cure):
            return Finding("no", found.removesuffix(cure).rstrip(". "), reason, cure)
    return Finding("no", found, reason, gpu.cure)


def _together(gpu: "Table", compiler: str, count: int) -> Finding:
    """Checks whether the GPUs can access each other's memory, and by which way of sharing."""
    from ...base import env
    from ...gpu import driver, sharing

    devices = [driver.device(ordinal) for ordinal in range(count)]
    found = ", ".join(f"{each.ordinal}: {each.name} ({each.arch})" for each in devices)
    apart = [(a, b) for a in range(count) for b in range(a) if not driver.can_access(a, b)]
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other's memory."
        cure = f"Choose GPUs with {gpu.paths} by {gpu.visible_devices}."
        return Finding("warn", f"{compiler}; {found}", reason, cure)
    forced = env.read().windows
    for each in devices:
        # Ignores KCCL_WINDOWS=peer, which is for ranks that are threads. Here ranks are processes.
        way = sharing.choose(each, are_threads=False, forced="" if forced == "peer" else forced)
        if way.caveat:
            cure = (
                "After a loss, expect comm.shrink() to fail where it does not with file "
                "descriptors. Windows are given back when the process ends."
            )
            return Finding(
                "warn", f"{compiler}; {found}; windows by {gpu.handles}", f"{way.caveat}.", cure
            )
    return Finding("ok", f"{compiler}; {found}; all reach each other's memory")
