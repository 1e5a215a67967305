"""Each function of the driver and of hipRTC fails once: the error names it and its code."""

import dataclasses
import re

import numpy as np
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.gpu import driver, library, sharing
from kccl.gpu.hip import HIP

CODE = 999  # hipErrorUnknown
# Functions that a working program calls, and what makes it call each.
AT_START = (
    "hipGetDeviceCount",
    "hipGetDevice",
    "hipSetDevice",
    "hipDeviceGetName",
    "hipDeviceGetUuid",
    "hipGetDevicePropertiesR0600",
    "hipDeviceGetAttribute",
    "hipStreamCreateWithFlags",
    "hipExtMallocWithFlags",
    "hipHostMalloc",
    "hipMemsetD8Async",
    "hipMemcpyHtoDAsync",
    "hipStreamSynchronize",
    "hipDriverGetVersion",
)
AT_CALLS = (
    "hipModuleLoadData",
    "hipModuleGetFunction",
    "hipFuncGetAttribute",
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    "hipThreadExchangeStreamCaptureMode",
    "hipModuleLaunchKernel",
    "hipGraphCreate",
    "hipGraphAddKernelNode",
    "hipGraphInstantiateWithFlags",
    "hipGraphLaunch",
)
OF_VMM = (
    "hipMemGetAllocationGranularity",
    "hipMemCreate",
    "hipMemAddressReserve",
    "hipMemMap",
    "hipMemSetAccess",
)
OF_COMPILER = (
    "hiprtcCreateProgram",
    "hiprtcAddNameExpression",
    "hiprtcGetLoweredName",
    "hiprtcGetCodeSize",
    "hiprtcGetCode",
)
WORLD = 1
EMPTY = "#include <kccl/platform.cuh>\nKCCL_KERNEL void k() {}"


def main(comm):
    x = to_gpu(np.ones(4, np.float32), ordinal_of(comm))
    comm.all_reduce(x)
    comm.check()
    comm.barrier.prepare()()
    comm.check()
    return from_gpu(x).sum()


def run():
    return kccl.run_threads(main, WORLD, backend="hip")


@pytest.fixture(autouse=True)
def fresh(amd, monkeypatch):
    """Kernels are loaded anew."""
    monkeypatch.setattr(library, "_loaded", {})


# The name that hip-python has for a function of another name.
def shown(function):
    return function.removesuffix("R0600")


@pytest.mark.parametrize("function", [*AT_START, *AT_CALLS])
def test_a_failure_is_named_with_its_code(amd, function):
    amd(function, CODE)
    with pytest.raises(kccl.BackendError, match=rf"{shown(function)} failed: \w+ \({CODE}\)"):
        run()
    amd(function, 0)
    assert run() == [4]


@pytest.mark.parametrize("function", OF_VMM)
def test_without_mappings_windows_are_plain_memory(amd, function):
    amd(function, CODE)
    with pytest.raises(kccl.BackendError, match=rf"'vmm' is impossible: {function} failed: .*999"):
        vmm()
    assert run() == [4]


def vmm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KCCL_WINDOWS", "vmm")
        return run()


def hide(function, monkeypatch):
    """As in a driver without the function: hip-python says so when it is first called."""

    def missing(*args):
        raise RuntimeError(f"failed to dlsym {function}")

    monkeypatch.setattr(HIP.binding, function, missing)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("old", r"version 70051831, and imports memory by file descriptors from 70100000"),
        ("missing", "hipMemExportToShareableHandle cannot be called: failed to dlsym"),
        ("refused", r"hipMemExportToShareableHandle failed: hipErrorNotSupported \(801\)"),
    ],
)
def test_without_descriptors_processes_share_windows_by_ipc(amd, monkeypatch, way, reason):
    if way == "old":
        monkeypatch.setenv("HIP_RUNTIME_VERSION", "70051831")
    elif way == "missing":
        hide("hipMemExportToShareableHandle", monkeypatch)
    else:
        amd("hipMemExportToShareableHandle", 801)
    device = driver.device(0)
    found = sharing.choose(device, are_threads=False, forced="")
    assert found.way == "ipc" and re.search(reason, found.reason), found
    assert "HIP IPC handles" in found.caveat
    with pytest.raises(kccl.BackendError, match=rf"'vmm' is impossible: .*{reason}"):
        sharing.choose(device, are_threads=False, forced="vmm")
    # Threads need not export.
    assert sharing.choose(device, are_threads=True, forced="").way == "vmm"


@pytest.mark.parametrize("function", OF_COMPILER)
def test_a_failure_of_the_compiler_is_named(amd, function):
    amd(function, 11)
    with pytest.raises(kccl.BackendError, match=rf"{function} failed: HIPRTC_ERROR_INTERNAL_ERROR"):
        kccl.compile(f"{EMPTY}  // {function}", ["k"], target="hip", arch="gfx942")


def test_an_address_that_the_driver_does_not_give_is_named(amd):
    amd("hipGetProcAddress", CODE)
    with pytest.raises(kccl.BackendError, match=r"hipGetProcAddress failed.* for hipGraph"):
        HIP.function_address("hipGraphLaunch")


def test_what_does_not_compile_has_its_log(amd):
    with pytest.raises(kccl.CompileError, match=r"mine does not compile with hipRTC 7\.15"):
        HIP.compiler.compile("KCCL_KERNEL void k() { y; }", ["k"], arch="gfx942", name="mine")


def test_the_rest_of_the_drivers_functions_are_named(amd):
    device = driver.device(0)
    for name in ("hipDeviceSynchronize", "hipEventCreateWithFlags", "hipStreamQuery"):
        amd(name, CODE)
        with device.current(), pytest.raises(kccl.BackendError, match=rf"{name} failed.*999"):
            {
                "hipDeviceSynchronize": lambda: driver.synchronize(device),
                "hipEventCreateWithFlags": lambda: driver.intervals_us(0, []),
                "hipStreamQuery": lambda: driver.has_finished(0),
            }[name]()
        amd(name, 0)


def test_no_function_of_the_table_is_left_out(amd):
    """Every function by which the runtime can be told to fail is one that hip-python loads."""
    known = {shown(each) for each in (*AT_START, *AT_CALLS, *OF_VMM)}
    unused = {
        *("hipDeviceCanAccessPeer", "hipDeviceEnablePeerAccess", "hipDeviceSynchronize"),
        *("hipStreamQuery", "hipMemcpyDtoHAsync"),
        # Programs and benches call these.
        *("hipStreamDestroy", "hipMemcpyDtoDAsync", "hipStreamBeginCapture", "hipStreamEndCapture"),
        *("hipEventCreateWithFlags", "hipEventRecord", "hipEventSynchronize"),
        *("hipEventElapsedTime", "hipEventDestroy"),
        # Calls between nodes poll with it: tests/hip/test_hip_nodes.py.
        "hipEventQuery",
        # What they return is ignored: there is nobody to tell.
        *("hipGraphDestroy", "hipGraphExecDestroy", "hipFree", "hipHostFree"),
        *("hipIpcCloseMemHandle", "hipMemRelease", "hipMemAddressFree", "hipMemUnmap"),
    }
    assert set(filter(None, dataclasses.astuple(HIP.names))) - known == unused
