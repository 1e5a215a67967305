"""Facts that several files contain and that must agree: ABI, kernel names, documents, lengths."""

import re
import subprocess
import sys
from pathlib import Path

import collectives
import pytest
import sim_makes
import sim_matrix
from compilers import cxx
from source_tree import ROOT, source_files

from kccl.base import abi
from kccl.bench.in_kernel.data import SHORTEST_TIMED
from kccl.plan import ops, specs
from kccl.plan.spec import Counts

ABI = ROOT / "csrc/include/kccl/abi.inc"
LINES = 400
# Exceptions, which DECISIONS.md explains: file -> its own limit.
LONGER: dict[str, int] = {}
CPP_WIDTH = 100  # as in .clang-format


def test_a_kernel_has_one_name_everywhere():
    files = {path.stem for path in (ROOT / "csrc/include/kccl/kernels").glob("*.cuh")}
    assert set(abi.KERNELS) == files == set(specs.BY_NAME)
    for name in files:
        text = (ROOT / f"csrc/include/kccl/kernels/{name}.cuh").read_text()
        assert re.findall(r"KCCL_KERNEL(?:_OF\(.*\))?\s+void (\w+)\(", text) == [name]
        is_there = re.search(rf"KCCL_DEVICE (Status|void) {name}\(", text)
        assert is_there, f"{name}.cuh has no such function"


def test_the_simulator_makes_every_kernel_of_gpus_in_its_sequences():
    text = (ROOT / "tests/kernels/sequence.cuh").read_text()
    made = set(re.findall(r"call\.kernel == (\w+)", text))
    made |= set(re.findall(r"\bMade<(\w+)>", sim_makes.makes()))
    kinds = [spec for spec in specs.KERNELS if "sim" in spec.targets and spec.takes_type is None]
    assert {spec.constant for spec in kinds} <= made


def test_host_and_kernels_agree_which_launches_of_benches_are_timed():
    text = (ROOT / "bench/in_kernel/chains.cuh").read_text()
    assert f"kShortestTimed = {SHORTEST_TIMED};" in text


def test_the_simulators_matrix_has_every_collective_and_every_all_reduce():
    rows = {
        spec.name if spec.collective == "all_reduce" else spec.collective
        for spec in specs.SPECS
        if "sim" in spec.targets
    }
    assert rows <= set(sim_matrix.COLLECTIVES)


# Files of which each collective has one.
ROOMS = ("kccl/collectives/{}.py", "bench/collectives/{}.py", "tests/support/collectives/{}.py")
# Those without a call of PyTorch. A barrier's are methods of the process group, because it chooses
# the device.
NOT_IN_TORCH = {"barrier", "scan"}


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_file_for_every_collective(room):
    for collective in {spec.collective for spec in specs.SPECS}:
        assert (ROOT / room.format(collective)).is_file()


def test_the_descriptions_of_tests_take_what_the_kernels_take():
    for spec in specs.SPECS:
        moves = collectives.load(spec.collective).MOVES
        counts_bytes = spec.counts in (Counts.BYTES, Counts.CHUNK_BYTES)
        if moves is not None:
            assert (moves.takes, not moves.reduces) == (spec.takes, counts_bytes), spec.name


def test_every_collective_has_calls_of_pytorch():
    files = {path.stem for path in (ROOT / "kccl/interop/torch_collectives").glob("[!_]*.py")}
    assert files == {spec.collective for spec in specs.SPECS} - NOT_IN_TORCH


def test_constants_of_kernels_are_the_abis():
    assert {spec.constant: abi.KERNELS[spec.name] for spec in specs.KERNELS} == {
        name: getattr(abi.lib, name)
        for name in abi.ffi.typeof("enum KcclKernel").relements
        if name != "kKcclNumKernels"
    }


def test_operators_and_dtypes_are_the_abis():
    from kccl.base import dtypes

    assert sorted(abi.OPS, key=abi.OPS.__getitem__) == list(ops.OPS)
    assert sorted(abi.DTYPES, key=abi.DTYPES.__getitem__) == [dtype.name for dtype in dtypes.ALL]


def test_abi_has_no_preprocessor_lines():
    assert re.findall(r"^\s*#.*", ABI.read_text(), re.MULTILINE) == []


def test_compilers_and_cffi_agree_on_every_offset(tmp_path):
    compiler = cxx()
    structs = re.findall(r"typedef struct (\w+)", ABI.read_text())
    fields = [(struct, name) for struct in structs for name, _ in abi.ffi.typeof(struct).fields]
    lines = [f'std::printf("%zu\\n", sizeof({struct}));' for struct in structs]
    lines += [f'std::printf("%zu\\n", offsetof({struct}, {name}));' for struct, name in fields]
    (tmp_path / "abi.cpp").write_text(
        "#include <cstddef>\n#include <cstdio>\n"
        f'#include "{ABI.with_name("abi.h")}"\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )
    program = tmp_path / "abi"
    subprocess.run([compiler, "-std=c++20", tmp_path / "abi.cpp", "-o", program], check=True)
    told = [int(line) for line in subprocess.check_output([program], text=True).split()]
    known = [abi.ffi.sizeof(struct) for struct in structs]
    known += [abi.ffi.offsetof(struct, name) for struct, name in fields]
    assert len(fields) > 40
    assert told == known


def test_files_are_short_enough_to_be_read():
    long = {}
    for path in source_files(".", "py", "cuh", "cu", "h", "hpp", "cpp", "inc"):
        where = path.relative_to(ROOT).as_posix()
        length = path.read_text().count("\n")
        if length >= LONGER.get(where, LINES):
            long[where] = length
    assert long == {}


def test_lines_of_cpp_are_as_wide_as_clang_format_makes_them():
    """It leaves comments as they are."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in source_files(".", "cuh", "cu", "h", "hpp", "inc", "cpp")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > CPP_WIDTH
    ]
    assert wide == []


DOCUMENTS = [*ROOT.glob("*.md"), *(path for path in source_files(".", "md") if path.parent != ROOT)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document: Path):
    missing = []
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text()):
        # Only paths that begin with a folder of the root, and names of files.
        if not re.fullmatch(r"[\w./-]+", quoted):
            continue
        is_path = "/" in quoted and quoted.split("/")[0] in FOLDERS
        is_file = "/" not in quoted and re.fullmatch(
            r"[A-Za-z_]\w*\.(?:py|md|cuh|cpp|toml)", quoted
        )
        if is_path and not any((base / quoted).exists() for base in (ROOT, document.parent)):
            missing.append(quoted)
        if is_file and not any(path.name == quoted for path in EVERY_FILE):
            missing.append(quoted)
    assert missing == []


def anchors(document: Path) -> set[str]:
    """What links to headings of the document may say behind the "#", by GitHub's rules."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_lead_somewhere(document: Path):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        where, _, anchor = link.partition("#")
        if "://" in where:
            continue
        target = document if not where else document.parent / where
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize(
    ("document", "lines", "width"), [("bench/LOG.md", 12, 160), ("DECISIONS.md", 15, 120)]
)
def test_dated_entries_are_short(document, lines, width):
    text = (ROOT / document).read_text()
    # A link of an index cannot be broken into lines.
    lengthy = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in lengthy if not re.fullmatch(r"- \[.*\]\(#[^)]*\)", line)] == []
    _, *entries = re.split(r"^## (?=\d{4}-\d\d-\d\d )", text, flags=re.MULTILINE)
    assert len(entries) == text.count("\n## "), "a heading has no date"
    for entry in entries:
        heading, *body = filter(str.strip, entry.splitlines())
        assert len(body) < lines, heading


def test_the_index_of_decisions_names_each_entry_once():
    index, *entries = re.split(r"^## ", (ROOT / "DECISIONS.md").read_text(), flags=re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]\(#(\d{4}-\d\d-\d\d)", index, re.MULTILINE)
    headings = [entry.splitlines()[0] for entry in entries]
    assert sorted(f"{date} {title}" for title, date in listed) == sorted(headings)


FOLDERS = {"csrc", "kccl", "bench", "engine", "topology", "tests", "examples"}
EVERY_FILE = [
    *source_files(".", "py", "md", "cuh", "h", "cpp", "inc"),
    ROOT / "pyproject.toml",
]


# Modules that `import kccl` must not load.
LAZY = (
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "torch",
    "matplotlib",
    "rich",
    "cffi",
    "kccl._core",
)


def test_records_name_no_path_of_a_machine():
    """They are published, and such a path says nothing to others."""
    for path in sorted((ROOT / "bench" / "records").glob("*.json*")):
        found = re.findall(r"""[\s"'(=](/(?:[\w.-]+/)+[\w.-]+)""", path.read_text())
        assert not found, f"{path.name} has {found[0]}"


def test_import_is_quick_and_loads_no_library():
    """It takes a fourth of NumPy's own time; imports of both take turns."""
    program = (
        "import sys, time\n"
        "started = time.perf_counter()\n"
        "import MODULE\n"
        "print(time.perf_counter() - started)\n"
        f"print(*(name for name in {LAZY} if name in sys.modules))\n"
    )
    seconds = {"kccl": [], "numpy": []}
    for module in [*seconds] * 5:
        command = [sys.executable, "-c", program.replace("MODULE", module)]
        took, loaded, _ = subprocess.check_output(command, text=True).split("\n")
        seconds[module].append(float(took))
        assert module == "numpy" or loaded == ""
    assert min(seconds["kccl"]) < min(seconds["numpy"])
