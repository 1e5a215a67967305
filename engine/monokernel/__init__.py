"""The monokernel: one launch decodes a whole request. kernels/ has its device code."""
