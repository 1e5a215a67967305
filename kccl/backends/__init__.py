"""Backends: windows, calls and waits on each kind of machine, behind one interface."""
