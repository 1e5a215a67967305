"""Formats of weights: how a file stores them, and how executors pack them."""
