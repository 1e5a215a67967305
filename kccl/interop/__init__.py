"""KCCL inside other libraries. Only the modules here import them."""
