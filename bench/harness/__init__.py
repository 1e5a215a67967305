"""Checks, times and records contenders, in the same way for every backend and every peer."""
