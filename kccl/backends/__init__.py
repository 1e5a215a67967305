"""Backends: how windows, calls and waits are made on one kind of machine."""
