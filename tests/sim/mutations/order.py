"""Planted bugs: order, scope, waits and how they end."""

from .mutation import DIVERGENT, LATE, NARROW, RACE, STUCK, TWO_WRITERS, WRONG, Edit, bug

BARRIER = "include/kccl/kernels/barrier_direct.cuh"
TWO_SHOT_PUSH = "include/kccl/kernels/all_reduce_two_shot_push_simple.cuh"

MUTATIONS = (
    bug(
        "barrier_fences_packets_only",
        "a barrier's fence orders its packets, but not what was written before",
        "barriers",
        RACE,
        Edit(
            BARRIER,
            "if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>();",
            "if (leads) mem::fence_packets();",
        ),
    ),
    # ---- Order and scope
    bug(
        "barrier_unfenced",
        "a barrier's packets follow no fence",
        "barriers",
        RACE,
        Edit(
            BARRIER,
            "        if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>();\n",
            "",
        ),
    ),
    bug(
        "barrier_unsynced",
        "a barrier's fence covers only what one thread has written",
        "barriers",
        RACE,
        Edit(BARRIER, "        channel.coop().sync();\n", ""),
    ),
    bug(
        "barrier_acquires_nothing",
        "a barrier's packets are polled but not acquired",
        "barriers",
        RACE,
        Edit(BARRIER, "        mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>();\n", ""),
    ),
    bug(
        "barrier_of_a_device",
        "a barrier's packets are acquired within the device",
        "barriers",
        RACE,
        Edit(
            BARRIER,
            "mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>",
            "mem::fence<mem::Order::kAcquire, mem::Scope::kDevice>",
        ),
    ),
    bug(
        "relaxed_arrive",
        "an arrival releases nothing",
        "pushes",
        RACE,
        Edit(
            "include/kccl/barrier.cuh",
            "mem::store<order, mem::Scope",
            "mem::store<mem::Order::kRelaxed, mem::Scope",
        ),
    ),
    bug(
        "relaxed_await",
        "a wait for arrivals acquires nothing",
        "pushes",
        RACE,
        Edit(
            "include/kccl/barrier.cuh",
            "mem::load<order, mem::Scope",
            "mem::load<mem::Order::kRelaxed, mem::Scope",
        ),
    ),
    bug(
        "arrive_without_sync",
        "the leader arrives before the other threads have written",
        "pulls",
        RACE,
        Edit(
            "include/kccl/barrier.cuh",
            "if constexpr (order == mem::Order::kRelease) coop.sync();",
            "",
        ),
    ),
    bug(
        "arrive_on_the_device",
        "an arrival has device scope",
        "barriers",
        NARROW,
        Edit(
            "include/kccl/barrier.cuh",
            "mem::store<order, mem::Scope::kSystem>",
            "mem::store<order, mem::Scope::kDevice>",
        ),
    ),
    bug(
        "relaxed_push",
        "nothing orders pushed data before the flag that they are written",
        "pushes",
        RACE,
        Edit(
            "include/kccl/rounds.cuh",
            "channel.template arrive<mem::Order::kRelease>(kKcclFlagWritten);",
            "channel.coop().sync();\n"
            "channel.template arrive<mem::Order::kRelaxed>(kKcclFlagWritten);",
        ),
    ),
    bug(
        "one_staging_for_all",
        "every rank pushes to the same part of the staging",
        "pushes",
        RACE,
        Edit(TWO_SHOT_PUSH, "+ owner * part;", "+ 0 * (owner + part);"),
    ),
    bug(
        "chunks_beyond_the_staging",
        "a round is as long as the staging, though its chunks begin on lines",
        "pushes",
        RACE | WRONG,
        Edit(
            TWO_SHOT_PUSH,
            "{count, part * world_size}",
            "{count, static_cast<uint32_t>(comm.layout.staging_bytes / sizeof(T))}",
        ),
    ),
    bug(
        "results_among_the_inputs",
        "results are written where the peers write the inputs of the next round",
        "pushes",
        RACE,
        Edit(
            TWO_SHOT_PUSH,
            ": part_of(rank, channel.parity(), Half::kResult, comm.rank);",
            ": part_of(rank, channel.parity(), Half::kInput, comm.rank);",
        ),
    ),
    bug(
        "results_a_step_too_early",
        "results are read in the step that writes them",
        "pushes",
        RACE | WRONG,
        Edit(TWO_SHOT_PUSH, "take_results(s - 2, parity)", "take_results(s - 2, parity ^ 1u)"),
    ),
    bug(
        "inputs_reduced_unheard",
        "a rank reduces the inputs of the round that its peers are pushing",
        "pushes",
        RACE,
        Edit(TWO_SHOT_PUSH, "reduce(s - 1, parity)", "reduce(s - 1, parity ^ 1u)"),
    ),
    bug(
        "relaxed_signal",
        "a signal releases nothing",
        "signals",
        RACE,
        Edit(
            "include/kccl/kernels/signal.cuh",
            "mem::store<mem::Order::kRelease",
            "mem::store<mem::Order::kRelaxed",
        ),
    ),
    bug(
        "signal_on_the_device",
        "a signal has device scope",
        "signals",
        NARROW,
        Edit(
            "include/kccl/kernels/signal.cuh",
            "mem::Scope::kSystem",
            "mem::Scope::kDevice",
        ),
    ),
    bug(
        "relaxed_wait",
        "a wait acquires nothing",
        "signals",
        RACE,
        Edit(
            "include/kccl/kernels/wait.cuh",
            "mem::load<mem::Order::kAcquire",
            "mem::load<mem::Order::kRelaxed",
        ),
    ),
    bug(
        "consumed_forgotten",
        "a wait does not remember which signals it consumed",
        "signals",
        RACE,
        Edit(
            "include/kccl/kernels/wait.cuh",
            "consumed[source][signal_id] += taken;",
            "",
        ),
    ),
    bug(
        "relaxed_depart",
        "the abort word releases nothing: the record may come after it",
        "one is absent",
        RACE,
        Edit(
            "include/kccl/wait.cuh",
            "mem::store<mem::Order::kRelease",
            "mem::store<mem::Order::kRelaxed",
        ),
    ),
    bug(
        "relaxed_abort",
        "a load of the abort word acquires nothing",
        "one is absent",
        RACE,
        Edit(
            "include/kccl/wait.cuh",
            "mem::load<mem::Order::kAcquire",
            "mem::load<mem::Order::kRelaxed",
        ),
    ),
    bug(
        "flag_before_data",
        "the abort word is stored before the record",
        "one is absent",
        RACE,
        Edit(
            "include/kccl/wait.cuh",
            "        mem::store_plain(abort_record(comm, peer, comm.rank), record);\n"
            "        depart(comm, peer, kKcclGaveUp);\n",
            "        depart(comm, peer, kKcclGaveUp);\n"
            "        mem::store_plain(abort_record(comm, peer, comm.rank), record);\n",
        ),
    ),
    bug(
        "failure_not_claimed",
        "every thread that gives up writes the record",
        "one is absent to many",
        RACE | TWO_WRITERS,
        Edit(
            "include/kccl/wait.cuh",
            "if (!mem::claim(&state->status, record.status)) return;",
            "mem::claim(&state->status, record.status);",
        ),
    ),
    bug(
        "timeout_never_fires",
        "a wait does not read the clock",
        "one is absent",
        STUCK,
        Edit(
            "include/kccl/wait.cuh",
            "} while (++polls < comm.polls_per_check);",
            "} while (true);",
        ),
    ),
    bug(
        "limit_ignored",
        "a wait reads the clock, but does not end at its limit",
        "one is absent",
        LATE,
        Edit(
            "include/kccl/wait.cuh",
            "if (waited_ns <= limit_ns) return true;",
            "if (waited_ns <= ~limit_ns) return true;",
        ),
    ),
    bug(
        "divergent_poll",
        "each thread leaves the poll loop by itself",
        "reductions",
        DIVERGENT,
        Edit(
            "include/kccl/wait.cuh",
            "if (!platform::warp_any(!is_there())) return true;",
            "if (is_there()) return true;",
        ),
    ),
)
