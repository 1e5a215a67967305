"""Starts the command `kccl`. Ctrl-C ends it without a traceback, also while it is still loaded."""

import signal

_INTERRUPTED = 130  # as a shell says of a command that signal 2 ended


def main() -> int:
    """Runs the command of this process's arguments; see cli.main()."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # Loading takes longest, and leaves nothing to tidy up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from . import cli

    try:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        return cli.main()
    except KeyboardInterrupt:
        return _INTERRUPTED
