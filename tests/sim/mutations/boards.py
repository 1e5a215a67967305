"""Planted bugs: the board of an exchange and the lengths of slices."""

from .mutation import (
    ACCEPTED_CALL,
    NARROW,
    RACE,
    REFUSED_CALL,
    REUSED,
    STALE,
    STUCK,
    TWO_WRITERS,
    Edit,
    bug,
)

GRID_EXCHANGE = "include/kccl/grid_exchange.cuh"
PUBLISH = "include/kccl/publish.cuh"
WINDOW = "include/kccl/window.cuh"

MUTATIONS = (
    bug(
        "await_previous_once",
        "a block awaits packets of two slices a thread only",
        "more slices than threads",
        REUSED,
        Edit(
            GRID_EXCHANGE,
            "first < num_slices(); first += kAtOnce * num_threads_",
            "first < 1; first += kAtOnce * num_threads_",
        ),
        max_seeds=5,
    ),
    bug(
        "await_previous_stride",
        "of the slices that a thread looks for at once, both are the same",
        "more slices than threads",
        REUSED,
        Edit(GRID_EXCHANGE, "first + n * num_threads_ + thread_", "first + thread_"),
        max_seeds=5,
    ),
    bug(
        "board_scrub_last",
        "the last packet of the board is not scrubbed",
        "last word of a board",
        STALE,
        Edit(
            GRID_EXCHANGE,
            "comm.layout.exchange_bytes / kPayloadBytes;\n    mem::Packet",
            "comm.layout.exchange_bytes / kPayloadBytes - 1;\n    mem::Packet",
        ),
        # One packet in 16 exchanges, whose reader must be early.
        max_seeds=60,
    ),
    bug(
        "board_scrub_slot",
        "the last slot of the board is not scrubbed",
        "last words of a board",
        STALE,
        Edit(
            GRID_EXCHANGE,
            "kKcclNumExchangeSlots * comm.layout.exchange_bytes / kPayloadBytes",
            "(kKcclNumExchangeSlots - 1) * comm.layout.exchange_bytes / kPayloadBytes",
        ),
    ),
    bug(
        "board_last_sync",
        "blocks go on before the peers have scrubbed their boards",
        "last words of a board",
        TWO_WRITERS,
        Edit(GRID_EXCHANGE, "return status == kKcclOk ? blocks.sync() : status;", "return status;"),
    ),
    bug(
        "board_relaxed_scrub",
        "a rank says without a release that its board is scrubbed",
        "last words of a board",
        TWO_WRITERS,
        Edit(GRID_EXCHANGE, "arrive<mem::Order::kRelease>", "arrive<mem::Order::kRelaxed>"),
    ),
    bug(
        "board_relaxed_await",
        "a rank hears without an acquire that boards are scrubbed",
        "last words of a board",
        TWO_WRITERS,
        Edit(GRID_EXCHANGE, "await<mem::Order::kAcquire>", "await<mem::Order::kRelaxed>"),
    ),
    bug(
        "exchange_absent_once",
        "epochs of absent blocks are stored for one block a thread",
        "exchanges of a large grid",
        STUCK,
        Edit(
            GRID_EXCHANGE,
            "             absent += stride) {",
            "             absent += kKcclMaxBlocks) {",
        ),
        max_seeds=5,
    ),
    bug(
        "exchange_close_unsynced",
        "a GridExchange is opened again before the leader has stored the epoch",
        "parts of exchanges opened anew",
        RACE,
        Edit(
            GRID_EXCHANGE,
            (
                "            mem::store_plain(epoch_word(absent), epoch_);\n"
                "        }\n"
                "        block().sync();"
            ),
            "            mem::store_plain(epoch_word(absent), epoch_);\n        }",
        ),
    ),
    bug(
        "exchange_room",
        "slices may be a line longer than the board has room for",
        "longest exchange",
        ACCEPTED_CALL,
        Edit(
            GRID_EXCHANGE,
            "total > slot_packets_",
            "total > slot_packets_ + num_slices() * kLinePackets",
        ),
    ),
    bug(
        "exchange_room_less",
        "slices that fill the board are refused",
        "last words of a board",
        REFUSED_CALL,
        Edit(GRID_EXCHANGE, "total > slot_packets_", "total >= slot_packets_"),
    ),
    bug(
        "exchange_layout_longer",
        "short slices lie as the longer ones before them",
        "lengths of exchanges",
        RACE,
        Edit(
            GRID_EXCHANGE,
            "if (num_packets != num_packets_) lay_out",
            "if (num_packets > num_packets_) lay_out",
        ),
        max_seeds=5,
    ),
    bug(
        "collect_fence_leader",
        "only one thread orders what the block reads behind collect()",
        "exchanges",
        RACE,
        Edit(
            PUBLISH,
            "    if constexpr (order == mem::Order::kAcqRel) {\n        mem::fence",
            (
                "    if (order == mem::Order::kAcqRel && exchange.thread() == 0) {\n"
                "        mem::fence"
            ),
        ),
    ),
    bug(
        "collect_one_more",
        "collect() loses a packet if there is one more than threads",
        "lengths of exchanges",
        STALE,
        Edit(PUBLISH, "words && total <= size", "words && total <= size + 1"),
        max_seeds=5,
    ),
    bug(
        "collect_two",
        "collect() leaves out turns of long slices",
        "lengths of exchanges",
        TWO_WRITERS,
        Edit(PUBLISH, "done += kAtOnce * size", "done += (kAtOnce + 1) * size"),
        max_seeds=5,
    ),
    bug(
        "exchange_after",
        "a thread's next packet is the first one of the next slice",
        "lengths of exchanges",
        RACE,
        Edit(
            GRID_EXCHANGE,
            "return {at.slice + 1, at.packet - num_packets_};",
            "return {at.slice + 1, 0};",
        ),
        max_seeds=5,
    ),
    bug(
        "exchange_three_slots",
        "exchanges use only three slots",
        "parts of exchanges",
        REUSED,
        Edit(
            GRID_EXCHANGE,
            "offset_ == kKcclNumExchangeSlots * slot_packets_",
            "offset_ == 3 * slot_packets_",
        ),
    ),
    bug(
        "exchange_reopen_slot",
        "an exchange that is opened again begins at the wrong slot",
        "parts of exchanges",
        REUSED,
        Edit(GRID_EXCHANGE, "((epoch_ & 2 * step_) != 0 ? 2 : 0)", "0"),
    ),
    bug(
        "exchange_order",
        "collect_reduced() adds up from the last rank",
        "lengths of exchanges",
        STALE,
        Edit(
            PUBLISH,
            "positions[row] = position + row * rows.stride;",
            "positions[row] = position + (rows.num - 1 - row) * rows.stride;",
        ),
        max_seeds=5,
    ),
    bug(
        "board_halves",
        "the boards of the two reaches overlap",
        "exchanges of both reaches",
        NARROW,
        Edit(
            WINDOW,
            "comm.layout.board + slots * 2 * comm.layout.exchange_bytes",
            "comm.layout.board + slots * comm.layout.exchange_bytes",
        ),
    ),
    bug(
        "exchange_epochs_shared",
        "the two reaches count their exchanges together",
        "exchanges of both reaches",
        STALE,
        Edit(WINDOW, "uint64_t(reach) * kKcclMaxBlocks + block", "0 * uint64_t(reach) + block"),
    ),
)
