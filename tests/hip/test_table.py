"""AMD's table: the names that hip-python knows, compiled code, and what `kccl doctor` says."""

import dataclasses
import re
import subprocess
import sys

import hip_runtime
import pytest

from kccl.base.abi import ffi
from kccl.base.errors import BackendError
from kccl.gpu import code_object, vendors
from kccl.gpu.cuda import CUDA
from kccl.gpu.hip import HIP
from kccl.jit.hiprtc import HIPRTC
from kccl.tools.checks import gpus

KERNELS = """
struct Pair { char bytes[100]; };
__attribute__((global)) void one(float* x, int n, double d, char c) { x[0] = n + d + c; }
__attribute__((global)) void two(Pair pair, long* p) { *p = pair.bytes[3]; }
"""


def test_hip_python_knows_every_name():
    binding = pytest.importorskip("rocm.bindings.hip", reason="hip-python is not installed")
    for name in filter(None, [*dataclasses.astuple(HIP.names), *HIP.queue.values()]):
        assert callable(getattr(binding, name)), name
    for name in (HIP.multiprocessors, HIP.shared_bytes, HIP.maps_memory, HIP.exports_memory):
        assert hasattr(binding.hipDeviceAttribute_t, f"hipDeviceAttribute{name}")
    error = binding.hipError_t
    coherent = binding.hipHostMallocCoherent
    numbers = {
        "out_of_memory": error.hipErrorOutOfMemory,
        "not_ready": error.hipErrorNotReady,
        "is_accessible": error.hipErrorPeerAccessAlreadyEnabled,
        "stream_flags": binding.hipStreamNonBlocking,
        "host_flags": binding.hipHostMallocPortable | binding.hipHostMallocMapped | coherent,
    }
    for name, wanted in numbers.items():
        assert getattr(HIP, name) == int(wanted), name
    assert HIP.queue.keys() <= {name for name, _ in ffi.typeof("KcclGpuQueue").fields}


def test_the_tests_runtime_has_amds_numbers():
    binding = pytest.importorskip("rocm.bindings.hip", reason="hip-python is not installed")
    enums = [each for each in vars(binding).values() if hasattr(each, "__members__")]
    theirs = {name: int(value) for enum in enums for name, value in enum.__members__.items()}
    theirs["hipStreamNonBlocking"] = int(binding.hipStreamNonBlocking)
    for ours, name in {
        "MaxThreadsPerBlock": "MAX_THREADS_PER_BLOCK",
        "SharedSizeBytes": "SHARED_SIZE_BYTES",
        "NumRegs": "NUM_REGS",
    }.items():
        theirs[f"hipFuncAttribute{ours}"] = theirs[f"HIP_FUNC_ATTRIBUTE_{name}"]
    texts = [path.read_text() for path in sorted(hip_runtime.HERE.iterdir())]
    ours = re.findall(r"constexpr int kHip(\w+) = (\w+);", "".join(texts))
    assert len(ours) > 30
    assert {name: int(value, 0) for name, value in ours} == {
        name: theirs[f"hip{name}"] for name, _ in ours
    }


def test_parameters_are_those_that_amds_compiler_wrote(tmp_path):
    pytest.importorskip("ziglang")
    zig = [sys.executable, "-m", "ziglang"]
    path = {end: str(tmp_path / f"k.{end}") for end in ("hip", "s", "o", "hsaco")}
    (tmp_path / "k.hip").write_text(KERNELS)
    flags = ["--cuda-device-only", "-nogpulib", "-nogpuinc", "--offload-arch=gfx942"]
    target = ["-target", "amdgcn-amd-amdhsa", "-mcpu=gfx942"]
    for command in (
        ["clang", "-x", "hip", *flags, "-S", path["hip"], "-o", path["s"]],
        ["clang", *target, "-c", path["s"], "-o", path["o"]],
        ["ld.lld", "-shared", path["o"], "-o", path["hsaco"]],
    ):
        subprocess.run([*zig, *command], check=True)
    code = (tmp_path / "k.hsaco").read_bytes()
    assert code_object.parameters(code) == {
        "_Z3onePfidc": ((0, 8), (8, 4), (16, 8), (24, 1)),
        "_Z3two4PairPl": ((0, 100), (104, 8)),
    }
    with pytest.raises(BackendError, match="no ELF file"):
        code_object.parameters(b"PTX")
    with pytest.raises(BackendError, match="metadata cannot be read"):
        code_object.parameters(code.replace(b"amdhsa.kernels", b"amdhsa.lernels"))


# ---- kccl doctor ---------------------------------------------------------------------------------


def test_doctor_names_the_gpus(amd):
    found = gpus.hip()
    assert found.status == "ok"
    assert re.search(r"^hipRTC 7\.15 \(.*\); 0: simulated MI300X \(gfx942\), 1: .*7:", found.found)


def test_doctor_explains_a_missing_driver(amd):
    amd("hipInit", 100)
    vars(HIP).pop("binding", None)
    found = gpus.hip()
    assert (found.status, found.cure) == ("no", HIP.cure)
    assert "hipInit failed: hipErrorNoDevice (100)" in found.found
    assert "ROCm" in found.reason and "-m pip install 'hip-python>=10'" in found.cure


def test_doctor_names_the_gpus_of_both_vendors(amd, monkeypatch):
    """A process drives GPUs of one vendor: the second vendor's are found by another process."""
    monkeypatch.setattr(vendors, "_chosen", CUDA)
    for name, value in hip_runtime.environment().items():
        monkeypatch.setenv(name, value)
    found = gpus.hip()
    assert (found.status, found.reason) == ("ok", "")
    assert "0: simulated MI300X (gfx942)" in found.found
    monkeypatch.setattr(gpus, "_PROGRAM", "raise SystemExit('no such program')")
    found = gpus.hip()
    assert found.status == "no" and "this check failed: no such program" in found.found


# hip-python before 10 has no rocm.version.
@pytest.mark.parametrize("missing", ["hip", "rocm.version"])
def test_doctor_explains_missing_bindings(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for owner in (HIP, HIPRTC):
        for known in ("binding", "full_name"):
            monkeypatch.delitem(vars(owner), known, raising=False)
    found = gpus.hip()
    assert found.status == "no" and found.found.startswith("hipRTC cannot be loaded: ")
    assert missing in found.found and "pip install" not in found.found
    assert found.cure == HIPRTC.cure and "-m pip install 'hip-python>=10'" in found.cure
    with pytest.raises(BackendError, match=rf"hip-python cannot be imported: .*{missing}"):
        _ = HIP.binding


def test_doctor_warns_of_gpus_that_are_apart(amd, monkeypatch):
    monkeypatch.setenv("HIP_RUNTIME_APART", "1")
    found = gpus.hip()
    assert found.status == "warn" and "GPUs 1 and 0 cannot access" in found.reason
    assert "Infinity Fabric" in found.cure and "HIP_VISIBLE_DEVICES" in found.cure


def test_other_architectures_are_refused(amd, monkeypatch):
    monkeypatch.setenv("HIP_RUNTIME_ARCH", "gfx1100")
    found = gpus.hip()
    assert (
        found.status == "no" and "arch is 'gfx1100', must be one of gfx942, gfx950" in found.found
    )
