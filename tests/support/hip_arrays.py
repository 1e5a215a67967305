"""NumPy arrays on GPUs through kccl.gpu alone, and back."""

import numpy as np

from kccl.base import dtypes
from kccl.gpu import driver
from kccl.gpu.arrays import DeviceArray
from kccl.gpu.memory import Memory


def to_gpu(array, ordinal):
    """A copy on a device. Calls on it go to the device's default stream."""
    array = np.ascontiguousarray(array)
    device = driver.device(ordinal)
    stream = driver.legacy_stream()
    memory = Memory(device, max(array.nbytes, 1), stream)
    with device.current():
        driver.write(memory.address, array.reshape(-1).view(np.uint8), stream)
    return DeviceArray(memory.address, array.shape, dtypes.of(array.dtype), ordinal, memory)


def ordinal_of(comm):
    """The number of the communicator's device. Collective."""
    return comm.empty(1).device


def from_gpu(array):
    """The elements, after what the device's default stream has to do."""
    kind = dtypes.to_numpy(array.dtype)
    with driver.device(array.device).current():
        data = driver.read(array.address, array.nbytes, driver.legacy_stream())
    return np.frombuffer(data, kind).reshape(array.shape)
