"""Starts the command `kccl`. Ctrl-C ends it without a traceback, even while it imports modules."""

import signal

_INTERRUPTED = 130  # a shell's exit code of a command that was ended by SIGINT


def main() -> int:
    """Runs the command of this process's arguments; see cli.main()."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # The imports take long and need no cleanup. So SIGINT may end the process during them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from . import cli

    try:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        return cli.main()
    except KeyboardInterrupt:
        return _INTERRUPTED
