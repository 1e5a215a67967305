"""Which kernel runs a call: what kernels there are, what was measured, the choice."""
