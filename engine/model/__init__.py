"""The model as all rooms of the engine see it: configuration, ops, and the executor's interface."""
