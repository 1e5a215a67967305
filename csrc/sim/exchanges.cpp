// Checks exchanges between the blocks of a grid (grid_exchange.cuh): that each block publishes and
// collects in the right order, and that each slice is collected.
#include <algorithm>

#include "machine.h"

namespace kccl::sim {

// Checks one step of an exchange in a block, and reports a finding if it is wrong. The order must
// be: open, then publish and collect in turn any number of times, then close. A collect must have
// the length of the publish before it. Called once per block for each call of the block or the
// grid, by the thread of the block that enters the call first. exchanges: those that the block has
// open.
void Machine::step_exchange(Exchanges& exchanges, const KcclSimCoopCall& call) {
    const auto step = static_cast<ExchangeStep>(call.step);
    if (step == ExchangeStep::kNone) return;
    const auto at = std::find_if(exchanges.begin(), exchanges.end(), [&](const Exchange& each) {
        return each.state == call.state && each.reach == call.reach;
    });
    if (at == exchanges.end()) {
        if (step == ExchangeStep::kOpen) exchanges.push_back({call.state, call.reach});
        return;
    }
    const auto refuse = [&](KcclSimExchangeMistake mistake, uint64_t value, uint64_t other_value) {
        const Deed by = at->is_published ? at->by : Deed{};
        report_call(kKcclSimExchangeOrder, *current_, {call.name, call.state, {}, by, 0},
                    call.name);
        findings.back().mistake = mistake;
        findings.back().value = value;
        findings.back().other_value = other_value;
    };
    if (step == ExchangeStep::kOpen) {
        at->is_published = false;
    } else if (step == ExchangeStep::kPublish) {
        if (at->is_published) return refuse(kKcclSimPublishesTwice, 0, 0);
        *at = {call.state, call.reach, true, call.num_bytes, deed_of(*current_, steps)};
    } else if (step == ExchangeStep::kCollect) {
        if (!at->is_published) return refuse(kKcclSimCollectsNothing, 0, 0);
        if (call.num_bytes != at->num_bytes) {
            return refuse(kKcclSimOtherLength, call.num_bytes, at->num_bytes);
        }
        at->is_published = false;
    } else {
        if (at->is_published) return refuse(kKcclSimNeverCollects, 0, 0);
        exchanges.erase(at);
    }
}

// Records which slices the running thread's block collects. When all blocks of the rank have
// collected, reports a slice that no block but its publisher has collected, which is probably a
// mistake. Checks nothing if the rank has one block. Called by thread 0 of each block, which has
// told before which slice the block has published (call_begins() in calls.cpp).
void Machine::check_collected(const KcclSimCoopCall& call) {
    Grid& grid = *current_->block->grid;
    const uint32_t num_blocks = grid.launch.num_blocks;
    const OwnSlice& own = current_->block->own_slice;
    if (num_blocks == 1) return;
    const auto argument = [&](const char* name) {
        const auto* const end = call.arguments + call.num_arguments;
        const auto is_it = [name](const KcclSimArgument& each) { return is_same(each.name, name); };
        return std::find_if(call.arguments, end, is_it)->value;
    };
    const uint64_t first = argument("first slice");
    const uint64_t num = argument("number of slices");
    // collect_reduced reads, for each slice that it names, the slice at that place on every rank.
    const uint32_t stride = is_same(call.name, "collect_reduced") ? num_blocks : own.count;
    // Slices that do not exist are not noted: the call itself refuses them.
    if (first > stride || num > stride - first) return;
    const auto key = std::make_tuple(call.state, call.reach, own.epoch);
    Collected& collected = grid.collected[key];
    collected.slices.resize(own.count);
    for (uint64_t slice = first; slice < first + num; ++slice) {
        for (uint64_t row = slice; row < own.count; row += stride) {
            if (row != own.index) collected.slices[row] = true;
        }
    }
    if (++collected.num_blocks < num_blocks) return;
    const auto unseen = std::find(collected.slices.begin(), collected.slices.end(), false);
    const auto index = static_cast<uint64_t>(unseen - collected.slices.begin());
    grid.collected.erase(key);
    if (index == own.count) return;
    const uint64_t before = call.reach == kKcclReachRank ? uint64_t(grid.rank) * num_blocks : 0;
    report_call(kKcclSimExchangeOrder, *current_, {call.name, call.state, {}, {}, 0}, call.name);
    findings.back().mistake = kKcclSimUnseenSlice;
    findings.back().value = before + index;
    findings.back().other_value = num_blocks;
}

}  // namespace kccl::sim
