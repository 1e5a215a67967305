"""KCCL inside other libraries. Each library is imported by its module here, and by nothing else."""
