"""What tests of benchmarks share."""

import sys

import pytest


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither PyTorch nor llama.cpp is installed."""
    for name in ("torch", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, None)
