"""The only module that knows names of AMD's driver. So far it counts GPUs and nothing else."""

import ctypes

from ..base.errors import BackendError
from .table import DriverError

LIBRARY = "libamdhip64.so"


def num_devices() -> int:
    """GPUs that this process may use.

    Raises:
        DriverError: A function of the driver failed.
        BackendError: The driver is not there.
    """
    try:
        functions = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendError(str(error)) from error
    found = ctypes.c_int(0)
    for name, args in (("hipInit", (0,)), ("hipGetDeviceCount", (ctypes.byref(found),))):
        code = getattr(functions, name)(*args)
        if code != 0:
            raise DriverError(f"{LIBRARY}: {name} failed with code {code}", code)
    return found.value
