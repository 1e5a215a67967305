"""Whose GPUs the tests here drive: the first vendor's whose driver is here, else NVIDIA's."""

from kccl.gpu import driver

BACKEND = driver.backend()
WARP_SIZE = driver.table().warp_size
