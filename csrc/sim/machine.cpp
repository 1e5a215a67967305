// The main loop of the machine, which runs its threads until nothing can move. Launches are in
// launches.cpp, the choice of the next thread in moves.cpp, barriers in meetings.cpp, and the
// functions that kernels call in engine.cpp.
#include "machine.h"

#include <algorithm>

#include "../include/kccl/targets/host_floats.h"
#include "faults.h"

namespace kccl::sim {

Machine* running = nullptr;

Machine::Machine(const KcclSimSettings& given)
    : settings(given), memory(slots, calls, *this, steps) {
    constexpr uint64_t kLongestNs = 100'000'000;
    constexpr uint64_t kShortestNs = 1'000'000;
    const uint64_t quarter_ns = settings.hang_ns == 0 ? kLongestNs : settings.hang_ns / 4;
    watch_period_ns_ = std::clamp(quarter_ns, kShortestNs, kLongestNs);
    restart(settings.seed);
}

void Machine::restart(uint64_t new_seed) {
    seed = new_seed;
    random_ = Random(seed);
    ranks_.assign(settings.world_size, {});
    running_.clear();
    warps_.clear();
    first_warp_ = num_threads_ = 0;
    copying_.clear();
    to_wake_.clear();
    next_warp_ = nullptr;
    ready_.clear();
    // A fiber that the last run left in the middle of a kernel must not continue there, so it gets
    // a new context.
    idle_fibers_.clear();
    for (Fiber& fiber : fibers_) {
        if (fiber.state != Fiber::kIdle) fiber.has_context = false;
        fiber.state = Fiber::kIdle;
        fiber.polled.clear();
        idle_fibers_.push_back(&fiber);
    }
    slots.clear();
    calls.clear();
    alike.clear();
    openings.clear();
    slot_counters_.clear();
    met_outside_ = {};
    memory.hosts = {};
    choose_style();
    const bool is_exhaustive = style_.schedule == kKcclSimExhaustive;
    tape.rewind();
    memory.restart(weakness_, random_.next(), is_exhaustive ? &tape : nullptr,
                   settings.checks != 0);
    steps = switches = torn_packets = late_copies = clock_ns = 0;
    changes_ = changes_at_wake_ = passed_ns_ = halted_ns_ = 0;
    idle_rounds_ = 0;
    has_turned_grid_ = has_failed_call = false;
    is_interrupted_.store(false, std::memory_order_relaxed);
    lacks_.clear();
    waits.clear();
    findings.clear();
    events.assign(settings.trace_events, {});
    num_events = next_event_ = 0;
}

// ---- The loop -----------------------------------------------------------------------------------

void Machine::body(void* argument) {
    auto* fiber = static_cast<Fiber*>(argument);
    while (true) {
        Grid& grid = *fiber->block->grid;
        grid.entry(grid.launch.arguments);
        running->end_thread();
    }
}

Machine::Halt Machine::move() {
    Machine* const before = running;
    running = this;
    is_late_ = false;
    num_sampled_ = 0;
    idle_ticks_ = 0;
    const Watch watch(*this, watch_period_ns_);
    Halt halt = Halt::kAllEnded;
    while (true) {
        start_pending();
        if (running_.empty()) break;
        current_ = nullptr;
        switch_away();
        if (!findings.empty()) {
            halt = Halt::kFound;
            break;
        }
        if (has_turned_grid_) {
            has_turned_grid_ = false;
            const std::vector<std::shared_ptr<Grid>> grids = running_;
            for (const std::shared_ptr<Grid>& grid : grids) {
                while (grid->has_room()) start_block(*grid);
                if (grid->alive == 0) end_grid(*grid);
            }
            halt = Halt::kGridEnded;
            break;
        }
        if (!ready_.is_empty() || wake_stored() || complete_copy() || wake_pollers()) continue;
        halt = Halt::kStuck;
        if (!lacks_.empty()) {
            report_lack(lacks_.front());
            halt = Halt::kFound;
        }
        break;
    }
    running = before;
    return halt;
}

void Machine::run() {
    const host::DefaultFloats floats;
    const Faults faults;
    while (findings.empty()) {
        switch (move()) {
            case Halt::kAllEnded:
            case Halt::kFound: return;
            case Halt::kGridEnded: break;
            case Halt::kStuck:
                if (settings.ends_when_stuck != 0 || !has_pollers() || has_unstarted()) {
                    report_stuck(kKcclSimDeadlock);
                } else if (!pass_time(0)) {
                    report_overdue();
                }
        }
    }
}

// Tells whether there are blocks that have not begun because they find no room (most_resident). If
// running blocks poll for one of them, it finds no room however much time passes: a deadlock.
bool Machine::has_unstarted() const {
    return std::any_of(running_.begin(), running_.end(), [](const std::shared_ptr<Grid>& grid) {
        return grid->blocks.size() < grid->launch.num_blocks;
    });
}

bool Machine::has_pollers() const {
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            for (const Fiber* fiber : block->fibers) {
                if (fiber->state == Fiber::kPolling) return true;
            }
        }
    }
    return false;
}

void Machine::end_thread() {
    Fiber& mine = *current_;
    end_poll();
    trace(kKcclSimThreadEnds, 0, 0);
    mine.state = Fiber::kEnded;
    end_in_block(mine);
    if (--mine.block->grid->alive == 0) has_turned_grid_ = true;
    switch_away();
}

}  // namespace kccl::sim
