"""The core's objects for several instruction sets: no CPU gets code that it lacks.

gcc makes some lambdas of device code weak symbols. Each kernels_*.cpp compiles them for its own
instruction set, and the linker takes the first one for all.
"""

import re

import pytest
from elftools.elf.elffile import ELFFile
from source_tree import ROOT

OBJECTS = ROOT / "build" / "objects" / "kccl"


def linked():
    """Returns the objects in the order in which they are linked."""
    text = (ROOT / "csrc/host/build_ffi.py").read_text()
    names = re.findall(r'"([\w/]+)\.cpp"', text)
    folders = [OBJECTS / ("csrc" if "/" in name else "engine/host") for name in names]
    paths = [folder / f"{name}.o" for folder, name in zip(folders, names, strict=True)]
    return paths if OBJECTS.exists() else []


def instructions(path):
    """Returns the options that let the compiler use more than every CPU has."""
    return set(re.findall(r"'(-m[a-z0-9]+)'", path.with_suffix(".command").read_text()))


def functions(path):
    """Returns the names of the functions that the linker may take from another object."""
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        return {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC"
            and symbol["st_info"]["bind"] != "STB_LOCAL"
            and symbol["st_shndx"] != "SHN_UNDEF"
        }


def taken_from_larger_sets(objects):
    """Returns each function that an object gets from one with instructions which it may not use.

    Args:
        objects: The instructions and the functions of each object, in the order of linking.
    """
    first = {}
    return {
        name
        for instructions, functions in objects
        for name in sorted(functions)
        if not first.setdefault(name, instructions) <= instructions
    }


def test_no_object_gets_a_function_with_instructions_that_it_may_not_use():
    paths = linked()
    if not paths:
        pytest.skip("the core was not compiled in this checkout")
    objects = [(instructions(path), functions(path)) for path in paths]
    assert len([each for each, _ in objects if each]) in (0, 5), "AVX2, AVX-512 and VNNI on x86"
    assert not taken_from_larger_sets(objects)


def test_a_function_of_a_larger_set_in_front_is_found():
    baseline, avx2 = (set(), {"f", "g"}), ({"-mavx2"}, {"g", "h"})
    assert taken_from_larger_sets([baseline, avx2]) == set()
    assert taken_from_larger_sets([avx2, baseline]) == {"g"}
