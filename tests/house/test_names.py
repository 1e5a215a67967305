"""Names: what is public exists, and one concept has one word."""

import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from source_tree import ROOT, identifiers, source_files

PUBLIC = ["kccl", "kccl.base.dtypes", "kccl.bench", "kccl.engine", "kccl.gpu"]
PUBLIC += ["kccl.tools.probe", "kccl.topology", "kccl.interop.mpi"]
FOR_PYTORCH = [
    pytest.param(name, marks=pytest.mark.long) for name in ("kccl.interop", "kccl.interop.torch")
]


@pytest.mark.parametrize("package", [*PUBLIC, *FOR_PYTORCH])
def test_a_public_module_shows_what_is_public_and_nothing_else(package):
    if package in ("kccl.interop", "kccl.interop.torch"):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    module = importlib.import_module(package)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
    assert dir(module) == sorted(module.__all__)
    found: dict[str, object] = {}
    exec(f"from {package} import *", found)
    assert set(module.__all__) == set(found) - {"__builtins__"}


def test_import_and_dir_load_nothing_that_a_program_may_not_need():
    program = "import sys, kccl; dir(kccl); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name for name in loaded if name.startswith("kccl")}
    modules = ("", ".copying", ".dtypes", ".errors")
    assert ours == {"kccl", *(f"kccl.base{module}" for module in modules)}
    assert not {"numpy", "torch", "rich", "mpi4py", "cffi"} & set(loaded)


# One concept, one word: the refused word, and the word to use.
REFUSED = {
    "nranks": "world_size",
    "num_ranks": "world_size",
    "n_ranks": "world_size",
    "n_devices": "world_size",
    "my_rank": "rank",
    "cur_rank": "rank",
    "my_pe": "rank",
    "npes": "world_size",
    "remote_rank": "peer",
    "dst_rank": "peer",
    "source_rank": "root",
    "sym_mem": "window",
    "ipc_buffer": "window",
    "semaphore": "signal",
    "workspace": "scratch",
    "buf_id": "parity",
    "allpair": "one_shot",
    "fullmesh": "one_shot",
    "1stage": "one_shot",
    "rsag": "two_shot",
    "2stage": "two_shot",
    "nvls": "multimem",
    "low_latency": "ll8, ll16",
    "num_sms": "num_blocks",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}
# MPI's, NCCL's, PyTorch's and FlashInfer's own names; the out-of-band exchange is named as mpi4py
# names its own.
FOREIGN = {"Allreduce", "allreduce", "allgather", "Iallreduce", "Iallgather", "Allgather"}
FOREIGN |= {"Allgatherv"}
FOREIGN |= {"_allgather_base", "source_rank", "_source_rank"}
FOREIGN |= {"MPI_Allgather", "allreduce_fusion", "create_allreduce_fusion_workspace"}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_refused_words_are_in_no_identifier():
    refused = re.compile("|".join(map(re.escape, REFUSED)))
    # Most files have no such word at all, and are not parsed.
    joined = {word.lower().replace("_", "") for word in REFUSED}
    files = defaultdict(list)
    for path in source_files(".", "cuh", "cu", "h", "hpp", "inc", "cpp", "py"):
        text = path.read_text().lower().replace("_", "")
        if not any(word in text for word in joined):
            continue
        for name in identifiers(path):
            files[name].append(path.relative_to(ROOT))
    found = [
        f"{', '.join(map(str, files[name]))}: {name}, say {REFUSED[match[0]]}"
        for name in files.keys() - FOREIGN
        if (match := refused.search(_snake_case(name)))
    ]
    assert found == []


# Words that the engine had before its glossary, and the word to use.
OLD_WORDS_OF_THE_ENGINE = {
    "Round": "Decision, token_step",
    "crew": "block",
    "board": "exchange_buffer",
}


def test_the_engine_has_no_words_of_before_its_glossary():
    # Most files have none of them at all, and are not parsed.
    suspect = re.compile("|".join(OLD_WORDS_OF_THE_ENGINE))
    found = {
        f"{path.relative_to(ROOT)}: {name}, say {OLD_WORDS_OF_THE_ENGINE[word]}"
        for path in source_files("engine", "cuh", "h", "inc", "cpp", "py")
        if suspect.search(path.read_text())
        for name in identifiers(path)
        for word in OLD_WORDS_OF_THE_ENGINE.keys() & {name, *_snake_case(name).split("_")}
    }
    assert found == set()


def test_files_of_tests_have_names_of_their_own():
    """pytest takes two files of one name for one module, and fails to collect the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
