"""Processes that cannot be ranks are told so: helpers of ranks, other namespaces, few files."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from long import long_after
from ranks import AT_ONCE, LAUNCHER, environment, eventually, facts, run, start, whole

import kccl
from kccl.ranks import job, launchers

HELPER = """
import subprocess
helper = "import kccl; kccl.init()"

def help_():
    done = subprocess.run([sys.executable, "-c", helper], capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()[-1]

def fork():
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            kccl.init()
        except kccl.BackendError as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.wait()
    return os.read(reads, 4096).decode()

def ask():
    return [help_(), (1, fork())] if int(os.environ["KCCL_RANK"]) == WHO else []

said = ask()
comm = kccl.init()
said += ask()
x = comm.all_reduce(np.ones(3, np.float32))
second = kccl.init()
y = second.all_reduce(np.ones(3, np.float32))
say(rank=comm.rank, said=said, pid=os.getpid(), sums=[x.tolist(), y.tolist()])
"""


@pytest.mark.parametrize("who", long_after(1, [0, 1]))
def test_a_process_that_a_rank_starts_is_no_rank_and_harms_nobody(who):
    code, said, err = run(2, HELPER.replace("WHO", str(who)))
    assert (code, err) == (0, "")
    assert [fact["sums"] for fact in said.values()] == [[[2.0] * 3] * 2] * 2
    # Two before the rank's kccl.init(), and two after.
    assert len(said[who]["said"]) == 4
    for returned, text in said[who]["said"]:
        assert returned == 1
        assert f"process {said[who]['pid']} is rank {who}, and this one" in text
        assert "without KCCL_RANK, KCCL_RENDEZVOUS, KCCL_WORLD_SIZE" in text


# Rank 0 has not imported kccl when it starts a helper, so the helper has no claim to see.
EARLY = """
import hashlib, os, subprocess, sys, threading, time
rank, folder = int(os.environ["KCCL_RANK"]), sys.argv[1]
place = f"place 0 {os.getuid()} {os.environ['KCCL_RENDEZVOUS']}"
place = "kccl-" + hashlib.sha256(place.encode()).hexdigest()[:32]

def is_there(name):
    return os.path.exists(os.path.join(folder, name))

def until(is_so):
    while not is_so():
        time.sleep(0.01)

def helper_has_its_place():
    return place in open("/proc/net/unix").read()

def note(name, text=""):
    with open(os.path.join(folder, name + "~"), "w") as file:
        file.write(text)
    os.rename(os.path.join(folder, name + "~"), os.path.join(folder, name))
"""

HELPS = """
import kccl, sys, numpy as np
try:
    comm = kccl.init()
    said = str(comm.all_reduce(np.ones(1))[0])
except kccl.BackendError as error:
    said = str(error)
open(sys.argv[1] + "/helper", "w").write(said)
"""

GIVES_BACK = (
    EARLY
    + """
if rank == 0:
    helper = subprocess.Popen([sys.executable, "-c", HELPS, folder])
    until(helper_has_its_place)
    threading.Thread(target=lambda: (helper.wait(), note("helped", str(helper.pid)))).start()
else:
    until(lambda: is_there("helped"))
import kccl, numpy as np
note(f"rank{rank}", str(kccl.init().all_reduce(np.ones(1))[0]))
"""
)

IS_TOLD = (
    EARLY
    + """
if rank == 0:
    helper = subprocess.Popen([sys.executable, "-c", HELPS, folder], stdin=subprocess.PIPE)
    until(lambda: is_there("rank1"))
    until(helper_has_its_place)
    note("helped", str(helper.pid))
import kccl, numpy as np
try:
    said = str(kccl.init().all_reduce(np.ones(1))[0])
except kccl.BackendError as error:
    said = str(error)
    helper.communicate()
note(f"rank{rank}", said)
"""
)


def run_with_an_early_helper(program, helper, tmp_path):
    """What the ranks and the helper said, by name."""
    text = program.replace("HELPS", repr(helper))
    command = [*LAUNCHER, "-n", "2", "--", sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_text() for file in tmp_path.iterdir()}


def test_a_helper_that_still_waits_gives_the_ranks_place_back(tmp_path):
    said = run_with_an_early_helper(GIVES_BACK, HELPS, tmp_path)
    assert [said["rank0"], said["rank1"]] == ["2.0", "2.0"]
    assert "which started it, is rank 0 and has called kccl.init() after it" in said["helper"]
    assert f"this one, process {said['helped']} (" in said["helper"]


@pytest.mark.long
def test_a_rank_is_told_which_helper_has_its_place(tmp_path):
    helper = HELPS + "sys.stdin.read()\n"  # until rank 0 has been told
    said = run_with_an_early_helper(IS_TOLD, helper, tmp_path)
    assert [said["helper"], said["rank1"]] == ["2.0", "2.0"]
    told = f"another process is rank 0 already: process {said['helped']} ("
    assert told in said["rank0"] and "This process started it" in said["rank0"]


WRAPPER = """
import os, re, subprocess, sys
import kccl
program = "import kccl, numpy as np; print(kccl.init().all_reduce(np.ones(1)))"
program = [sys.executable, "-c", program]
told = subprocess.run(program, capture_output=True, text=True).stderr
name = re.search(r"only starts the rank, and this one is it, start it without (\\w+)", told)[1]
environ = {each: text for each, text in os.environ.items() if each != name}
sys.stdout.write(subprocess.run(program, env=environ, capture_output=True, text=True).stdout)
"""


def test_the_program_that_a_wrapper_starts_is_told_how_it_becomes_the_rank():
    """The wrapper imports kccl, and looks like a rank that starts a helper."""
    command = [*LAUNCHER, "-n", "2", "--", sys.executable, "-c", WRAPPER]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.count("[2.]") == 2, done.stderr


def test_a_job_that_a_rank_starts_has_ranks_of_its_own():
    inner = [*LAUNCHER, "-n", "2", "--", sys.executable, "-c", "import kccl; kccl.init()"]
    program = f"""
import subprocess
comm = kccl.init()
if comm.rank == 0:
    subprocess.run({inner!r}, check=True)
comm.barrier()
say(rank=comm.rank)
"""
    code, said, err = run(2, program)
    assert (code, err) == (0, "") and sorted(said) == [0, 1]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "job-1"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"},
    ],
    ids=["torchrun", "openmpi", "mpich"],
)
def test_the_claim_is_of_one_job(variables, monkeypatch):
    """A child's job of its own has other variables."""
    monkeypatch.setenv("KCCL_RANK_PROCESS", "")
    job.claim(variables)
    claim = os.environ["KCCL_RANK_PROCESS"]
    pid, _, digest = claim.partition("/")
    assert int(pid) == os.getpid()
    job.claim(variables | {"KCCL_RANK_PROCESS": claim})
    parents = {"KCCL_RANK_PROCESS": f"{os.getppid()}/{digest}"}
    with pytest.raises(kccl.BackendError, match="is rank 0, and this one"):
        job.claim(variables | parents)
    last = list(variables)[-1]
    job.claim(variables | parents | {last: "another"})
    job.claim(launchers.without_launcher(variables) | parents)


def test_a_second_process_with_a_ranks_variables_does_not_end_the_job():
    """It was started before the rank called kccl.init(), so it has no claim to see."""
    variables = {"KCCL_RENDEZVOUS": f"twice {os.getpid()}", "KCCL_WORLD_SIZE": "3"}
    program = """
try:
    comm = kccl.init()
    say(rank=comm.rank, sum=comm.all_reduce(np.ones(1)).tolist())
except kccl.BackendError as error:
    say(error=str(error))
"""
    twice = [start(program, KCCL_RANK="1", **variables) for _ in range(2)]
    zero = start(program, KCCL_RANK="0", **variables)
    # Rank 0 meets both of rank 1 before rank 2 comes.
    assert eventually(lambda: any(each.poll() is not None for each in twice), 60)
    two = start(program, KCCL_RANK="2", **variables)
    said = [fact for each in (*twice, zero, two) for fact in facts(each.communicate(timeout=60)[0])]
    assert sorted(fact["rank"] for fact in said if "rank" in fact) == [0, 1, 2]
    (error,) = [fact["error"] for fact in said if "error" in fact]
    assert "another process is rank 1 already. If a rank started this process" in error
    assert "if this one is rank 1, the other one must not" in error


@pytest.mark.parametrize("option", ["-n", "-U"])
def test_a_rank_in_another_namespace_is_told_at_once(option):
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, option, "true"]).returncode:
        pytest.skip(f"unshare {option} is not possible here")
    program = "import kccl; kccl.init()"
    shell = f'[ $KCCL_RANK = 1 ] && exec {unshare} {option} "$0" -c "$1"; exec "$0" -c "$1"'
    command = [*LAUNCHER, "-n", "2", "--", "sh", "-c", shell, sys.executable, program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    kind = {"-n": "network", "-U": "user"}[option]
    assert f"this rank is in another {kind} namespace than `kccl run`" in done.stderr
    assert "rank 0 lost rank 1 at start-up" in done.stderr


def test_a_time_out_of_start_up_names_namespaces():
    variables = {"KCCL_RENDEZVOUS": f"alone {os.getpid()}", "KCCL_WORLD_SIZE": "2"}
    rank = start("kccl.init()", KCCL_RANK="1", KCCL_FIRST_TIMEOUT="0.5", **variables)
    assert "or is in another network or user namespace" in rank.communicate(timeout=60)[1]


def limited(number, command):
    shell = f'ulimit -n {number}; exec "$@"'
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("options", [[], ["--label"]])
def test_too_few_descriptors_for_kccl_run_are_a_sentence_with_the_number_needed(options):
    command = [*LAUNCHER, "-n", "5", *options, "--", sys.executable, "-c", "pass"]
    done = limited(12, command)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    found = re.search(
        r"kccl run of 5 ranks needs \d+ file descriptors, \d+ are open, and the limit is 12: raise "
        r"it, as by `ulimit -n (\d+)`",
        done.stderr,
    )
    assert limited(found[1], command).returncode == 0


@pytest.mark.long
def test_too_few_descriptors_for_init_are_a_sentence_with_the_number_needed():
    program = whole("""
comm = kccl.init()
comm.all_reduce(np.ones(4, np.float32))
comm.all_reduce(np.ones(1 << 20, np.float32))
""")  # fmt: skip
    command = [*LAUNCHER, "-n", "8", "--", sys.executable, "-c", program]
    done = limited(40, command)
    found = re.search(
        r"kccl.init\(\) of 8 ranks needs \d+ file descriptors, \d+ are open, and the limit is 40: "
        r"raise it, as by `ulimit -n (\d+)`",
        done.stderr,
    )
    done = limited(found[1], command)
    assert done.returncode == 0, done.stderr


# What is wrong on rank WHO alone, before it has met the others, and what all are told.
WRONG = {
    "backend": ('backend = "nope"', r"backend is 'nope', must be one of auto, host"),
    "simulator": ('backend = "sim"', r"use kccl.run_threads\(main, world_size"),
    "number": ('os.environ["KCCL_TIMEOUT"] = "soon"', r"KCCL_TIMEOUT='soon' must be a number"),
    "flag": ('os.environ["KCCL_CHECK"] = "2"', r"KCCL_CHECK=2 must be 0 or 1"),
    "variable": ('os.environ["KCCL_TIMEOUTS"] = "1"', r"KCCL_TIMEOUTS is unknown"),
    "limit": (
        'os.environ["KCCL_FIRST_TIMEOUT"] = "-1"',
        r"KCCL_FIRST_TIMEOUT is -1.0, must be positive",
    ),
    "tuning": ('os.environ["KCCL_TUNING"] = "/nowhere.json"', r"/nowhere.json"),
    "descriptors": (
        "import resource, kccl.start; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4096))",
        r"kccl.init\(\) of 3 ranks needs \d+ file descriptors",
    ),
}
STARTS = """
backend, began = "auto", time.monotonic()
rank = int(os.environ.get("KCCL_RANK", os.environ.get("PMI_RANK", "-1")))
if rank == WHO:
    WRONG
try:
    kccl.init(backend)
except kccl.Error as error:
    say(rank=rank, type=type(error).__name__, text=str(error), seconds=time.monotonic() - began)
    # The others hear of it while this process lives.
    time.sleep(1)
"""


@pytest.mark.parametrize("name", long_after(2, WRONG))
def test_all_raise_why_one_rank_cannot_start(name):
    wrong, reason = WRONG[name]
    who = sorted(WRONG).index(name) % 3
    program = STARTS.replace("WHO", str(who)).replace("WRONG", wrong)
    code, said, err = run(3, program)
    assert code == 0 and sorted(said) == [0, 1, 2], err
    for fact in said.values():
        assert fact["seconds"] < AT_ONCE
        assert re.search(reason, fact["text"]), fact
        assert fact["type"] == said[who]["type"]
        assert f"start-up failed on rank {who}: " in fact["text"] or fact["rank"] == who
