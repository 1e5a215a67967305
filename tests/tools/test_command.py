"""The command `kccl` while it is loaded."""

import subprocess
import sys

import pytest
from ranks import environment

# A sitecustomize: Ctrl-C comes when the command imports this.
COMES = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == NAME:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kccl.tools.cli", ["--version"]),
        ("kccl.tools.run", ["run", "-n", "1", "--", "true"]),
        ("kccl.tools.warm", ["warm", "--arch", "sm_90a"]),
    ],
)
def test_ctrl_c_while_the_command_is_loaded_is_no_traceback(name, arguments, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(COMES.replace("NAME", repr(name)))
    path = {"PYTHONPATH": f"{tmp_path}:{environment().get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "kccl", *arguments]
    done = subprocess.run(
        command, env=environment(**path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (-2, 130) and done.stderr == ""
