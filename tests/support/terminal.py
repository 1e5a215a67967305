"""Runs a command under a pseudo-terminal, and keeps the screen that a person would see."""

import time
from pathlib import Path

import pexpect
import pyte
from ranks import environment

# Lines that the screen keeps after they have scrolled away.
_HISTORY = 5000
# Seconds for what takes a second or two on an idle machine.
LIMIT_S = 60
_CTRL_C, _CTRL_D = "\x03", "\x04"


class Terminal:
    """A command on a terminal. A context manager, which ends the command.

    Attributes:
        screen: What pyte made of the command's output.
    """

    def __init__(self, command, columns=80, rows=24, cwd=None, **variables):
        """Starts the command.

        Args:
            command: A list of words, or a line for sh.
            columns, rows: The size of the window.
            cwd: The folder to run in.
            variables: Environment variables; None removes one.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        given = {"TERM": "xterm-256color"} | variables
        env = environment()
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI", "TTY_COMPATIBLE"):
            env.pop(name, None)
        for name, value in given.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        self.screen = pyte.HistoryScreen(columns, rows, history=_HISTORY, ratio=1)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._process = pexpect.spawn(
            words[0], words[1:], env=env, cwd=cwd, dimensions=(rows, columns), timeout=LIMIT_S
        )
        # Ctrl-C ends a command at once, not 50 ms later.
        self._process.delaybeforesend = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.close(force=True)

    def kill(self, number):
        """Sends a signal to the command alone."""
        self._process.kill(number)

    @property
    def lines(self):
        """The lines that the window shows or has shown, without blanks at their ends."""
        columns = range(self.screen.columns)
        gone = ["".join(line[at].data for at in columns) for line in self.screen.history.top]
        lines = [line.rstrip() for line in (*gone, *self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self):
        """The lines as one text."""
        return "\n".join(self.lines)

    @property
    def words(self):
        """The text with each run of blanks and line ends as one blank."""
        return " ".join(self.text.split())

    @property
    def hides_cursor(self):
        return self.screen.cursor.hidden

    def wait_for(self, text, limit=LIMIT_S):
        """Reads until the window shows a text."""
        self._read(lambda: text in self.text or text in self.words, limit, f"no {text!r}")

    def type(self, text):
        self._process.send(text)

    def interrupt(self):
        """Types Ctrl-C."""
        self._process.send(_CTRL_C)

    def end_input(self):
        """Types Ctrl-D, at the beginning of a line."""
        self._process.send(_CTRL_D)

    def wait_for_child(self, limit=LIMIT_S):
        """Reads until the command has started a process of its own."""
        pid = self._process.pid
        file = Path(f"/proc/{pid}/task/{pid}/children")
        self._read(lambda: bool(file.read_text()), limit, "no child")

    def end(self, limit=LIMIT_S):
        """Waits for the command's end, and returns its exit code as a shell would."""
        self._read(lambda: False, limit, "still running", until_end=True)
        self._process.close(force=True)
        signal = self._process.signalstatus
        return 128 + signal if signal else self._process.exitstatus

    def _read(self, is_done, limit, what, until_end=False):
        deadline = time.monotonic() + limit
        while not is_done():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} within {limit} s; the screen:\n{self.text}")
            try:
                chunk = self._process.read_nonblocking(1 << 16, timeout=0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                if until_end or is_done():
                    return
                raise AssertionError(f"{what} before the end; the screen:\n{self.text}") from None
            self.raw += chunk
            self._stream.feed(chunk)


def check_ended_well(terminal):
    """Checks that a command left no traceback, and the terminal as it was."""
    for word in ("Traceback", "Exception ignored", "Error in sys.excepthook"):
        assert word not in terminal.text, terminal.text
    assert not terminal.hides_cursor, terminal.text
