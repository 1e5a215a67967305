"""Compiles device source at run time, and caches the result on disk."""
