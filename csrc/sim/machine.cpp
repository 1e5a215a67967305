// Launches, and the loop that moves threads. Barriers are in meetings.cpp; what kernels call is in
// engine.cpp.
#include "machine.h"

#include <algorithm>

namespace kccl::sim {

Machine* running = nullptr;

Machine::Machine(const KcclSimSettings& given)
    : settings(given), memory(slots, calls, *this, steps) {
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
    // A fiber that was left in the middle of a kernel needs a new context.
    idle_fibers_.clear();
    for (Fiber& fiber : fibers_) {
        if (fiber.state != Fiber::kIdle) fiber.has_context = false;
        fiber.state = Fiber::kIdle;
        fiber.polled.clear();
        idle_fibers_.push_back(&fiber);
    }
    slots.clear();
    calls.clear();
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
    has_ended_grid_ = false;
    findings.clear();
    events.assign(settings.trace_events, {});
    num_events = next_event_ = 0;
}

// ---- Launches -----------------------------------------------------------------------------------

std::shared_ptr<Grid> Machine::enqueue(const KcclSimLaunch& launch) {
    auto grid = std::make_shared<Grid>();
    grid->launch = launch;
    grid->rank = launch.rank;
    grid->entry = launch.entry;
    // 64-byte aligned, because a parameter may ask for it.
    grid->arguments.resize(launch.argument_bytes / 8 + 9);
    const uint64_t begin = reinterpret_cast<uint64_t>(grid->arguments.data());
    auto* at = reinterpret_cast<uint8_t*>((begin + 63) / 64 * 64);
    const auto* from = static_cast<const uint8_t*>(launch.arguments);
    std::copy(from, from + launch.argument_bytes, at);
    grid->launch.arguments = at;
    ranks_[static_cast<size_t>(launch.rank)].stream.push_back(grid);
    return grid;
}

void Machine::start_pending() {
    for (Rank& rank : ranks_) {
        if (rank.stream.empty() || rank.stream.front()->number != 0) continue;
        start(rank.stream.front());
    }
}

void Machine::start(const std::shared_ptr<Grid>& grid) {
    const KcclSimLaunch& launch = grid->launch;
    const Rank& rank = ranks_[static_cast<size_t>(grid->rank)];
    grid->number = next_grid_++;
    grid->alive = launch.num_blocks * launch.threads_per_block;
    running_.push_back(grid);
    num_threads_ += grid->alive;
    memory.begin_launch(grid->number);
    note_change();
    for (uint32_t b = 0; b < launch.num_blocks; ++b) {
        auto block = std::make_unique<Block>();
        block->grid = grid.get();
        block->index = b;
        block->slot = slots.of(grid->rank, static_cast<int32_t>(b));
        block->alive = launch.threads_per_block;
        if (block->slot + 1 >= slot_counters_.size()) slot_counters_.resize(block->slot + 2);
        block->copies.next_counter = slot_counters_[block->slot + 1] + 1;
        for (uint32_t t = 0; t < launch.threads_per_block; ++t) {
            if (t % settings.warp_size == 0) {
                grid->warps.push_back(std::make_unique<Warp>());
                grid->warps.back()->index = first_warp_ + static_cast<uint32_t>(warps_.size());
                grid->warps.back()->level = 1 + random_.below(Ready::kLevels - 2);
                warps_.push_back(grid->warps.back().get());
            }
            if (idle_fibers_.empty()) {
                fibers_.emplace_back();
                fibers_.back().index = static_cast<uint32_t>(fibers_.size() - 1);
                idle_fibers_.push_back(&fibers_.back());
            }
            Fiber& fiber = *idle_fibers_.back();
            idle_fibers_.pop_back();
            fiber.block = block.get();
            fiber.warp = grid->warps.back().get();
            fiber.lane = t % settings.warp_size;
            fiber.warp->lanes.push_back(&fiber);
            block->fibers.push_back(&fiber);
            const auto stack = reinterpret_cast<uint64_t>(stacks_.at(fiber.index));
            fiber.self = {t,
                          launch.threads_per_block,
                          b,
                          launch.num_blocks,
                          stack,
                          Stacks::kBytes,
                          reinterpret_cast<uint64_t>(launch.arguments),
                          launch.argument_bytes};
            fiber.knowledge = {};
            fiber.knowledge.agent = {block->slot, t};
            fiber.knowledge.counter = slot_counters_[block->slot] + 1;
            fiber.knowledge.launch = grid->number;
            fiber.knowledge.ordered = fiber.fenced = rank.ordered;
            fiber.knowledge.caused = rank.caused;
            // Between two launches caches are written back and invalidated, as if all threads
            // fenced.
            fiber.knowledge.released.fill(rank.ordered);
            fiber.has_turn = false;
            fiber.looked_ns = 0;
            begin_poll(fiber);
            fiber.level = level_of(fiber);
            make_ready(&fiber);
        }
        grid->blocks.push_back(std::move(block));
    }
}

void Machine::end_grid(Grid& grid) {
    Rank& rank = ranks_[static_cast<size_t>(grid.rank)];
    for (const std::unique_ptr<Block>& block : grid.blocks) {
        uint32_t last = 0;
        for (Fiber* fiber : block->fibers) {
            Knowledge& each = fiber->knowledge;
            last = std::max(last, each.counter);
            each.settle_hearsay();
            join(rank.ordered, each.ordered);
            join(rank.caused, each.caused);
            for (const ClockRef& seen : each.to_acquire) join(rank.ordered, seen);
            fiber->state = Fiber::kIdle;
            idle_fibers_.push_back(fiber);
            each = {};
            fiber->fenced = {};
        }
        for (ClockRef* clock : {&rank.ordered, &rank.caused}) {
            edit(*clock).add_block(block->slot, last);
            edit(*clock).add_block(block->slot + 1, block->copies.next_counter);
        }
        slot_counters_[block->slot] = last;
        slot_counters_[block->slot + 1] = block->copies.next_counter;
    }
    for (const std::unique_ptr<Warp>& warp : grid.warps) {
        warps_[warp->index - first_warp_] = nullptr;
    }
    for (; !warps_.empty() && warps_.front() == nullptr; ++first_warp_) warps_.pop_front();
    memory.end_launch(grid.number);
    grid.has_ended = true;
    num_threads_ -= grid.launch.num_blocks * grid.launch.threads_per_block;
    note_change();
    rank.stream.pop_front();
    std::erase_if(running_, [&grid](const auto& each) { return each.get() == &grid; });
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
        if (has_ended_grid_) {
            has_ended_grid_ = false;
            const std::vector<std::shared_ptr<Grid>> grids = running_;
            for (const std::shared_ptr<Grid>& grid : grids) {
                if (grid->alive == 0) end_grid(*grid);
            }
            halt = Halt::kGridEnded;
            break;
        }
        if (!ready_.is_empty() || wake_stored() || complete_copy() || wake_pollers()) continue;
        halt = Halt::kStuck;
        break;
    }
    running = before;
    return halt;
}

void Machine::run() {
    while (findings.empty()) {
        switch (move()) {
            case Halt::kAllEnded:
            case Halt::kFound: return;
            case Halt::kGridEnded: break;
            case Halt::kStuck:
                if (settings.ends_when_stuck != 0 || !has_pollers()) {
                    report_stuck(kKcclSimDeadlock);
                } else if (!pass_time(0)) {
                    report_overdue();
                }
        }
    }
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
    if (--mine.block->grid->alive == 0) has_ended_grid_ = true;
    switch_away();
}

}  // namespace kccl::sim
