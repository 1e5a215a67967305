"""Planted bugs: launches that begin before the one before has ended."""

from .mutation import RACE, STUCK, Edit, bug

LAUNCH = "include/kccl/dependent_launch.cuh"
CHANNEL = "include/kccl/channel.cuh"
_WAITS = "        if (is_launch) mem::await_kernels_before();\n"
_LETS_IN = "        if (has_dependent_) mem::launch_dependents();\n"


def _without_wait(kernel, program):
    return bug(
        f"dependent_{kernel}_without_wait",
        f"{kernel} does not wait for the kernels before it",
        program,
        RACE,
        Edit(f"include/kccl/kernels/{kernel}.cuh", "    mem::await_kernels_before();\n", ""),
    )


MUTATIONS = (
    bug(
        "dependent_without_wait",
        "a call does not wait for the kernels before it",
        "dependents",
        RACE,
        Edit(LAUNCH, _WAITS, ""),
    ),
    bug(
        "dependent_waits_in_one_thread",
        "only the first thread of a call waits for the kernels before it",
        "dependents of all kinds",
        RACE,
        Edit(
            LAUNCH,
            "if (is_launch) mem::await_",
            "if (is_launch && platform::thread_in_block() == 0) mem::await_",
        ),
        max_seeds=8,
    ),
    bug(
        "dependent_waits_behind_the_state",
        "a call waits for the kernels before it when it has read the channel's state",
        "dependents",
        RACE,
        Edit(LAUNCH, _WAITS, ""),
        Edit(
            CHANNEL,
            "        state_ = mem::load_words(channel_state(comm, index_));\n",
            "        state_ = mem::load_words(channel_state(comm, index_));\n"
            "        if (opening == Opening::kLaunch) mem::await_kernels_before();\n",
        ),
    ),
    bug(
        "dependent_waits_at_its_call",
        "a call waits for the kernels before it when it enters",
        "dependents",
        RACE,
        Edit(LAUNCH, _WAITS, ""),
        Edit(
            LAUNCH,
            "void begin_call(uint32_t last) {",
            "void begin_call(uint32_t last) { if (is_launch_) mem::await_kernels_before();",
        ),
    ),
    *(_without_wait(kernel, "one-sided dependents") for kernel in ("put", "get", "signal", "wait")),
    *(_without_wait(kernel, "dependents of grids") for kernel in ("grid_sync", "grid_exchange")),
    bug(
        "dependents_let_in_before_the_wait",
        "a call lets the next one in before it has waited itself",
        "chains of dependents",
        STUCK,
        Edit(LAUNCH, _WAITS, "        if (is_launch) mem::launch_dependents();\n" + _WAITS),
        Edit(LAUNCH, _LETS_IN, ""),
    ),
    bug(
        "dependents_let_in_always",
        "a call lets the next one in although the two take much of the device",
        "chains of large dependents",
        STUCK,
        Edit(LAUNCH, _LETS_IN, "        if (is_launch_) mem::launch_dependents();\n"),
    ),
    bug(
        "dependents_let_in_at_late",
        "a call takes a dependent that comes late for one that comes early",
        "chains of large dependents",
        STUCK,
        Edit(
            CHANNEL, "call.dependent == kKcclEarlyDependent", "call.dependent != kKcclNoDependent"
        ),
    ),
)
