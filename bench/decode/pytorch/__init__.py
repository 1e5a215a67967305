"""A decode step in plain PyTorch, the peer on GPUs. Whoever imports this package uses PyTorch."""
