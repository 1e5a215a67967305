"""What `kccl doctor` says where something is missing: the fault, the reason, and the cure once."""

import pytest

from kccl.base.errors import BackendError
from kccl.gpu.cuda import CUDA
from kccl.gpu.hip import HIP
from kccl.jit.hiprtc import HIPRTC, said
from kccl.tools import cli, doctor
from kccl.tools.checks import gpus, host
from kccl.tools.checks.finding import Finding

# As hip-python words it.
NO_LIBRARY = (
    "failed to dlopen 'b'libhiprtc.so'': b'libhiprtc.so: cannot open shared object file: No such "
    "file or directory'"
)


@pytest.mark.parametrize("vendor", [CUDA, HIP], ids=["cuda", "hip"])
@pytest.mark.parametrize("whose", ["driver", "compiler"])
def test_a_cure_is_said_once(monkeypatch, capsys, vendor, whose):
    cure = vendor.cure if whose == "driver" else vendor.compiler.cure

    def fail(*_):
        raise BackendError(f"it cannot be loaded: gone. {cure}")

    monkeypatch.setitem(vars(vendor), "call", fail)
    monkeypatch.setattr(type(vendor.compiler), "full_name", "a compiler")
    found = gpus._gpus(vendor.backend)
    assert (found.found, found.cure) == ("it cannot be loaded: gone", cure)
    monkeypatch.setattr(doctor, "CHECKS", (("GPUs", False, lambda: found),))
    assert cli.main(["doctor"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(cure) == 1


def test_names_of_libraries_are_texts(monkeypatch):
    assert said(RuntimeError(NO_LIBRARY)) == (
        "failed to dlopen 'libhiprtc.so': libhiprtc.so: cannot open shared object file: No such "
        "file or directory"
    )
    assert said(RuntimeError("no b'x")) == "no b'x"

    def missing():
        raise RuntimeError(NO_LIBRARY)

    hiprtc = type("Binding", (), {"hiprtcVersion": staticmethod(missing)})
    monkeypatch.setattr("kccl.jit.hiprtc.binding_of", lambda name: hiprtc)
    monkeypatch.delitem(vars(HIPRTC), "binding", raising=False)
    with pytest.raises(BackendError, match=r"^hipRTC cannot be loaded: failed to dlopen 'libhip"):
        _ = HIPRTC.binding


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("KCCL_TIMEOUT", "soon", "KCCL_TIMEOUT='soon' must be a number."),
        ("KCCL_TIMEOUTS", "1", "KCCL_TIMEOUTS is unknown, must be one of "),
    ],
)
def test_a_wrong_variable_is_named_with_its_cure(monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    found = host.variables()
    assert found.status == "no" and found.reason.startswith(reason)
    assert found.cure.startswith("Correct the variable, or unset it")


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def fail():
        raise KeyError("x")

    checks = (("odd", True, fail), ("well", True, lambda: Finding("ok", "fine")))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "KeyError: 'x'" in told and "fine" in told
