"""gather_objects() gives every rank what the others have passed, or says what it cannot."""

import enum
import math

import numpy as np
import pytest

import kccl

KEPT = [
    None,
    True,
    2**80,
    -0.5,
    math.inf,
    "Grüße\n",
    [],
    {"a": [1, {"b": None}], "": False},
]


def test_what_json_has_arrives_unchanged():
    def main(comm):
        return [comm.gather_objects(value) for value in KEPT]

    for results in kccl.run_threads(main, 2):
        for value, everyone in zip(KEPT, results, strict=True):
            assert everyone == [value, value]
            assert [type(each) for each in everyone] == [type(value)] * 2


CHANGED = {
    "tuple": ((1, 2), r"value is \(1, 2\), a tuple, of which JSON would make a list"),
    "inner tuple": ({"a": [0, (1,)]}, r"value\['a'\]\[1\] is \(1,\), a tuple"),
    "integer key": ({"a": {3: 4}}, r"value\['a'\] has the key 3 of type int, of which JSON would"),
    "no key": ({None: 1}, "value has the key None of type NoneType"),
    "set": ({1}, "value cannot be sent as JSON: .*set"),
    "NumPy's number": (np.int64(1), "value cannot be sent as JSON: .*int64"),
    "an object": (enum.Enum("Colour", "RED").RED, "value cannot be sent as JSON: .*Colour"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_json_changes_on_one_rank_is_refused_on_all(name):
    value, message = CHANGED[name]

    def main(comm):
        heard = "gather_objects failed on rank 0: " if comm.rank == 1 else ""
        with pytest.raises(kccl.InvalidArgument, match=f"^{heard}{message}"):
            comm.gather_objects(value if comm.rank == 0 else 1)
        return comm.gather_objects(comm.rank)

    assert kccl.run_threads(main, 2) == [[0, 1]] * 2
