"""Shapes of models for tests."""

from kccl.engine.files.random_weights import MODELS

OF_MONOKERNEL = [
    name
    for name, config in MODELS.items()
    if not name.startswith("tiny") and config.experts is None
]
"""The names of those that people run and that the monokernel runs."""
