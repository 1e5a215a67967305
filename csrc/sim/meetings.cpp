// Meetings of the threads of a block or warp: barriers, votes and shuffles.
#include <algorithm>

#include "machine.h"

namespace kccl::sim {

// Models a sync of a block or warp: afterwards each of the threads knows (vector clocks, see
// Knowledge) all that any of them knew before, and what each of them did before. is_block: the
// threads are all living threads of the block, so one counter, at the block's slot of the clock,
// stands for all of them; otherwise (a warp) each thread is added by itself.
void Machine::share_knowledge(const std::vector<Fiber*>& fibers, uint32_t slot, bool is_block) {
    ClockRef ordered, packets, caused, fenced;
    uint32_t last = 0;
    for (const Fiber* fiber : fibers) {
        const Knowledge& each = fiber->knowledge;
        join(ordered, each.ordered);
        join(packets, each.packets);
        join(caused, each.caused);
        join(fenced, fiber->fenced);
        last = std::max(last, each.counter);
    }
    const Clock* told_last = nullptr;
    for (Fiber* fiber : fibers) {
        for (const auto& [event, told] : fiber->knowledge.hearsay) {
            edit(caused).add(event);
            if (told && told.get() != told_last) edit(caused).join(*told);
            told_last = told.get();
        }
        fiber->knowledge.hearsay.clear();
    }
    for (ClockRef* clock : {&ordered, &caused}) {
        if (is_block) {
            edit(*clock).add_block(slot, last);
            continue;
        }
        for (const Fiber* fiber : fibers) edit(*clock).add(fiber->knowledge.now());
    }
    for (Fiber* fiber : fibers) {
        Knowledge& each = fiber->knowledge;
        each.ordered = ordered;
        each.packets = packets;
        each.caused = caused;
        fiber->fenced = fenced;
        each.counter = (is_block ? last : each.counter) + 1;
    }
}

void Machine::meet_block(Meeting meeting, bool is_fenced) {
    Fiber& mine = *current_;
    Block& block = *mine.block;
    // At a sync, what the thread has loaded counts as used (take_loads()). A vote may be part of a
    // poll that found nothing, so there the loads do not count as used.
    if (meeting == Meeting::kSync) take_loads();
    trace(kKcclSimMeetBlock, 0, mine.exchanged);
    check_calls(true);
    if (block.is_incomplete) return wait_incomplete(Fiber::kAtBlock);
    check_lone_calls(Fiber::kAtBlock);
    // A meeting ends, as on GPUs, when all threads have come that have not ended.
    if (block.meeting != Meeting::kNone && block.meeting != meeting) report_divergence(true);
    block.meeting = meeting;
    block.is_fenced = block.is_fenced && is_fenced;
    if (++block.arrived == block.alive) {
        release_block(block);
    } else {
        yield_as(Fiber::kAtBlock);
    }
}

void Machine::release_block(Block& block) {
    std::vector<Fiber*> fibers;
    uint64_t any = 0;
    for (Fiber* fiber : block.fibers) {
        if (fiber->state == Fiber::kEnded) continue;
        fibers.push_back(fiber);
        any |= fiber->exchanged;
    }
    if (block.is_fenced || settings.model == kKcclSimSm90) {
        share_knowledge(fibers, block.slot, true);
    }
    block.arrived = 0;
    block.is_fenced = true;
    block.meeting = Meeting::kNone;
    for (Fiber* fiber : fibers) {
        fiber->exchanged = any;
        if (fiber->state == Fiber::kAtBlock) make_ready(fiber);
    }
}

void Machine::end_in_block(Fiber& fiber) {
    Block& block = *fiber.block;
    ++fiber.warp->ended;
    check_calls(true);
    report_settled();
    if (block.is_incomplete) {
        --block.alive;
        return;
    }
    Warp& warp = *fiber.warp;
    if (warp.arrived != 0 && warp.arrived == warp.num_alive()) release_warp(warp);
    if (--block.alive != 0 && block.arrived == block.alive) release_block(block);
    if (block.alive == 0) {
        let_dependents_in(block);
        ++block.grid->num_ended;
        if (block.grid->has_room()) has_turned_grid_ = true;
    }
    if (block.alive == 0 && !block.copies.pieces.empty()) {
        const Piece& piece = block.copies.pieces.front();
        report(kKcclSimUndrained,
               {piece.issuer, piece.call, piece.site, steps, kKcclSimCopyStarts, true}, piece.to,
               {});
    }
}

void Machine::meet_warp(Meeting meeting) {
    Fiber& mine = *current_;
    Warp& warp = *mine.warp;
    if (mine.num_calls[static_cast<size_t>(Coop::kWarp)] < warp.calls.end ||
        mine.num_calls[static_cast<size_t>(Coop::kBlock)] < warp.num_calls_of_block) {
        check_calls(false);
    }
    if (mine.block->is_incomplete) return wait_incomplete(Fiber::kAtWarp);
    check_lone_calls(Fiber::kAtWarp);
    if (warp.meeting != Meeting::kNone && warp.meeting != meeting) report_divergence(false);
    warp.meeting = meeting;
    if (++warp.arrived == warp.num_alive()) {
        release_warp(warp);
    } else {
        yield_as(Fiber::kAtWarp);
    }
}

void Machine::release_warp(Warp& warp) {
    uint64_t ballot = 0;
    std::vector<uint64_t> brought;
    std::vector<Fiber*> alive;
    for (Fiber* lane : warp.lanes) {
        const bool has_ended = lane->state == Fiber::kEnded;
        brought.push_back(has_ended ? 0 : lane->exchanged);
        if (has_ended) continue;
        ballot |= (lane->exchanged != 0 ? uint64_t{1} : 0) << lane->lane;
        alive.push_back(lane);
    }
    if (warp.meeting == Meeting::kSync) share_knowledge(alive, warp.lanes[0]->block->slot, false);
    for (Fiber* lane : alive) {
        if (warp.meeting == Meeting::kBallot) lane->exchanged = ballot;
        if (warp.meeting == Meeting::kShuffle) {
            lane->exchanged = brought[lane->source_lane % warp.lanes.size()];
        }
    }
    warp.arrived = 0;
    warp.meeting = Meeting::kNone;
    for (Fiber* lane : warp.lanes) {
        if (lane->state == Fiber::kAtWarp) make_ready(lane);
    }
}

}  // namespace kccl::sim
