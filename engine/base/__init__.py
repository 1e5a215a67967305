"""The helpers that all packages of the engine use."""
