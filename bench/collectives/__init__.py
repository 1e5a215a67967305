"""The benchmarked collectives, a file each: inputs, expected outputs, and how a peer is called."""
