"""The helpers that every room of the engine uses."""
