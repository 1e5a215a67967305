"""A decode step in plain PyTorch, as a peer on GPUs. Modules of this package import PyTorch."""
