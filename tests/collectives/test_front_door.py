"""The collectives show signature, text and types in help(), inspect, an editor and mypy, although C
answers the calls.
"""

import inspect
import pydoc
import subprocess
import sys
import textwrap

import jedi
import pytest
from programs import OF_DATA

import kccl
from kccl.base.abi import fastcall


@pytest.fixture(scope="module")
def comm():
    return kccl.run_threads(lambda comm: comm, 1)[0]


@pytest.mark.parametrize("name", OF_DATA)
def test_c_answers_the_call(comm, name):
    collective = getattr(comm, name)
    assert type(collective).__call__ is fastcall.Dispatcher.__call__


@pytest.mark.parametrize("name", OF_DATA)
def test_signature_and_doc_are_those_of_the_call(comm, name):
    collective = getattr(comm, name)
    parameters = inspect.signature(collective).parameters
    assert next(iter(parameters)) == "x"
    assert {"stream", "channel", "algorithm"} < set(parameters)
    first, _, rest = collective.__doc__.partition("\n")
    assert first.startswith(f"{name}(x, ") and "channel=0" in first
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in rest
    words = " ".join(rest.split())
    assert "is not C-contiguous" in words or "strided ones as in all_reduce" in words


def test_barrier_has_a_signature(comm):
    assert str(inspect.signature(comm.barrier)) == "()"


@pytest.mark.parametrize("name", [*OF_DATA, "barrier"])
def test_help_of_the_call_and_of_the_class(comm, name):
    doc = inspect.getdoc(type(getattr(comm, name)))
    (line, *_) = doc.splitlines()
    assert line in pydoc.plain(pydoc.render_doc(getattr(comm, name)))
    assert line in pydoc.plain(pydoc.render_doc(kccl.Communicator))
    assert inspect.getdoc(getattr(kccl.Communicator, name)) == doc


def test_an_editor_shows_arguments_and_doc():
    script = jedi.Script("import kccl\ncomm = kccl.init()\ncomm.all_reduce(")
    (found,) = script.get_signatures(3, len("comm.all_reduce("))
    assert [param.name for param in found.params[:3]] == ["x", "out", "op"]
    assert "element-wise reduction" in found.docstring()
    completions = jedi.Script("import kccl\nkccl.init().").complete(2, len("kccl.init()."))
    assert {*OF_DATA, "barrier", "put", "split"} <= {each.name for each in completions}


RIGHT = """
    import numpy as np
    import kccl

    comm = kccl.init()
    x = np.zeros(4, np.float32)
    y = comm.all_reduce(x, op="max")
    y += comm.broadcast(x, root=0)
    op = comm.all_reduce.prepare(x)
    op()
    comm.all_gather(x)
    comm.barrier()
    comm.barrier.prepare(channel=1)()
    part = comm.split(comm.rank % 2)
    if part is not None:
        part.all_reduce(x)
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """mypy(text): what mypy prints for a user's file."""
    # Here mypy finds no project's settings. Later runs reuse its cache of kccl and NumPy.
    folder = tmp_path_factory.mktemp("mypy")

    def run(text):
        file = folder / "user.py"
        file.write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", file]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout

    return run


@pytest.mark.long
def test_mypy_accepts_a_right_program_and_knows_the_types(mypy):
    assert mypy(RIGHT) == "Success: no issues found in 1 source file\n"
    told = mypy(RIGHT + "    reveal_type(comm.all_reduce(x))\n    reveal_type(comm)\n")
    assert "ndarray[" in told and "kccl.comm.Communicator" in told


WRONG = {
    'comm.all_reduce(x, op="maximum")': 'expected "Literal[',
    "comm.all_reduce(x, root=0)": 'Unexpected keyword argument "root"',
    "comm.all_reduce()": 'Missing positional argument "x"',
    'comm.broadcast(x, root="0")': 'incompatible type "str"; expected "int"',
    "comm.all_reduce.prepar(x)": 'has no attribute "prepar"',
    "comm.reduce_scater(x)": 'has no attribute "reduce_scater"',
    "comm.all_reduce(x).rank": 'has no attribute "rank"',
}


@pytest.mark.long
def test_mypy_finds_what_is_wrong(mypy):
    told = mypy(RIGHT + "".join(f"    {line}\n" for line in WRONG)).splitlines()
    first = len(textwrap.dedent(RIGHT).splitlines()) + 1
    for number, (line, said) in enumerate(WRONG.items(), first):
        assert [each for each in told if f":{number}: error" in each and said in each], line
