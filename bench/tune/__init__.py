"""Measures which algorithm is fastest at which size."""
