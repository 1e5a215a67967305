"""Names: what is public exists, and one concept has one word."""

import re

import pytest
from source_tree import ROOT, identifiers, source_files


@pytest.mark.parametrize("package", ["kccl", "kccl.topology"])
def test_all_names_only_what_exists(package):
    module = __import__(package, fromlist=["__all__"])
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


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
FOREIGN |= {"_allgather_base"}
FOREIGN |= {"MPI_Allgather", "allreduce_fusion", "create_allreduce_fusion_workspace"}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_refused_words_are_in_no_identifier():
    refused = re.compile("|".join(map(re.escape, REFUSED)))
    found = []
    for path in source_files(".", "cuh", "cu", "h", "hpp", "inc", "cpp", "py"):
        for name in identifiers(path):
            match = refused.search(_snake_case(name))
            if match and name not in FOREIGN:
                found.append(f"{path.relative_to(ROOT)}: {name}, say {REFUSED[match[0]]}")
    assert found == []
