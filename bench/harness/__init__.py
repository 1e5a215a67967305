"""Checking, timing, rows and documents: the same for every backend and every peer."""
