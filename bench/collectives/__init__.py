"""The benchmarked collectives, one file each: inputs, expected outputs, calls of peers."""
