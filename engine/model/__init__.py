"""A model as the engine sees it: configuration, ops, and what an executor does."""
