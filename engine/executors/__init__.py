"""The executors, which run a program, and the ranks that they run on."""
