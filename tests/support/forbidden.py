"""Runs a command in which the system refuses some calls, as a container's seccomp profile does.

python tests/support/forbidden.py EPERM pidfd_open,sched_setaffinity -- kccl run ...
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_NAMES = (
    *("sched_setaffinity", "sched_getaffinity", "pidfd_open", "memfd_create", "ftruncate"),
    *("socket", "socketpair", "bind", "listen", "connect", "accept4", "getsockopt"),
    *("sendmsg", "recvmsg"),
)
NUMBERS = {
    machine: dict(zip(_NAMES, numbers, strict=True))
    for machine, numbers in {
        "x86_64": (203, 204, 434, 319, 77, 41, 53, 49, 50, 42, 288, 55, 46, 47),
        "aarch64": (122, 123, 434, 279, 46, 198, 199, 200, 201, 203, 242, 209, 211, 212),
    }.items()
}
_LOAD_NUMBER = (0x20, 0, 0, 0)
_ALLOW = (0x06, 0, 0, 0x7FFF0000)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def forbid(names, error):
    """Installs a filter that refuses these calls in this process and its children."""
    numbers = NUMBERS[platform.machine()]
    lines = [_LOAD_NUMBER]
    for name in names:
        lines += [(0x15, 0, 1, numbers[name]), (0x06, 0, 0, 0x00050000 | error)]
    lines.append(_ALLOW)
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    memory = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(lines), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid(sys.argv[2].split(","), getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[4], sys.argv[4:])
