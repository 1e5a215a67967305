"""The libraries that KCCL is compared with: MPI, NCCL, PyTorch, FlashInfer, NVSHMEM."""
