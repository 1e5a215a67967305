"""What KCCL is measured beside: MPI, NCCL, PyTorch, FlashInfer, NVSHMEM."""
