"""The executors, which run a model's program, and the ranks, each of which has an executor."""
