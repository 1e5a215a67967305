// Launches: when they begin, what their threads know (Knowledge) at the beginning, and how they
// end.
#include <algorithm>
#include <utility>

#include "machine.h"

namespace kccl::sim {

bool Machine::can_launch(const KcclSimLaunch& launch) const {
    const bool has_room = settings.most_blocks == 0 || launch.num_blocks <= settings.most_blocks;
    return launch.rank >= 0 && launch.rank < static_cast<int32_t>(settings.world_size) &&
           launch.num_blocks > 0 && has_room && launch.threads_per_block > 0 &&
           launch.threads_per_block % settings.warp_size == 0;
}

std::shared_ptr<Grid> Machine::enqueue(const KcclSimLaunch& launch) {
    auto grid = std::make_shared<Grid>();
    grid->launch = launch;
    grid->rank = launch.rank;
    grid->entry = launch.entry;
    grid->code = code_around(reinterpret_cast<const void*>(launch.entry));
    // The copy of the arguments is aligned to 64 bytes, because a parameter's type may need that.
    grid->arguments.resize(launch.argument_bytes / 8 + 9);
    const uint64_t begin = reinterpret_cast<uint64_t>(grid->arguments.data());
    auto* at = reinterpret_cast<uint8_t*>((begin + 63) / 64 * 64);
    const auto* from = static_cast<const uint8_t*>(launch.arguments);
    std::copy(from, from + launch.argument_bytes, at);
    grid->launch.arguments = at;
    grid->launch.arrays = nullptr;
    grid->owner = edges.new_owner();
    for (uint32_t i = 0; i < launch.num_arrays; ++i) {
        const KcclSimArray& each = launch.arrays[i];
        grid->arrays.push_back(
            {each.address, each.num_bytes, kKcclSimEdgeArray, launch.rank, -1, each.name});
    }
    grid->arrays.push_back({reinterpret_cast<uint64_t>(at), launch.argument_bytes,
                            kKcclSimEdgeArguments, launch.rank, -1, 0});
    std::deque<Stream>& streams = ranks_[static_cast<size_t>(launch.rank)].streams;
    if (launch.stream >= streams.size()) streams.resize(launch.stream + 1);
    std::deque<std::shared_ptr<Grid>>& launches = streams[launch.stream].launches;
    if (launch.is_dependent != 0 && !launches.empty()) grid->before = launches.back();
    // A dependent gets the number of the launch before it. So the accesses of the first launch of
    // such a chain are remembered until the chain's last launch has ended, to find races between
    // them.
    grid->number = grid->before ? grid->before->number : next_grid_++;
    launches.push_back(grid);
    return grid;
}

// ---- They begin ---------------------------------------------------------------------------------

void Machine::start_pending() {
    for (Rank& rank : ranks_) {
        // There may be too little room on the GPU for the launches of all streams. Which stream
        // gets room first is then a random choice.
        const auto count = static_cast<uint32_t>(rank.streams.size());
        const uint32_t first = settings.most_blocks == 0 ? 0 : random_.below(count);
        for (uint32_t i = 0; i < count; ++i) start_next(rank, rank.streams[(first + i) % count]);
    }
}

void Machine::start_next(Rank& rank, Stream& stream) {
    for (size_t i = 0; i < stream.launches.size(); ++i) {
        const std::shared_ptr<Grid> grid = stream.launches[i];
        if (grid->has_begun) continue;
        if (!(grid->before ? grid->before->lets_in() : i == 0)) return;
        const uint32_t num_blocks = rank.num_blocks + grid->launch.num_blocks;
        if (settings.most_blocks != 0 && num_blocks > settings.most_blocks) return;
        rank.num_blocks = num_blocks;
        start(grid);
    }
}

void Machine::start(const std::shared_ptr<Grid>& grid) {
    const KcclSimLaunch& launch = grid->launch;
    const Rank& rank = ranks_[static_cast<size_t>(grid->rank)];
    // Each launch in a chain of dependents has its own lane, and so its own slots in the vector
    // clocks: one that does not wait for the launch before is not ordered with any of the others.
    grid->lane = grid->before ? grid->before->lane + 1 : launch.stream << 16;
    grid->at_begin = grid->before ? grid->before->at_begin : rank.streams[launch.stream].known;
    grid->has_begun = true;
    grid->num_closed = launch.num_blocks;
    grid->alive = launch.num_blocks * launch.threads_per_block;
    running_.push_back(grid);
    num_threads_ += grid->alive;
    if (!grid->before) memory.begin_launch(grid->number);
    note_change();
    while (grid->has_room()) start_block(*grid);
}

void Machine::start_block(Grid& grid) {
    const KcclSimLaunch& launch = grid.launch;
    const auto index = static_cast<uint32_t>(grid.blocks.size());
    grid.blocks.push_back(std::make_unique<Block>());
    Block& block = *grid.blocks.back();
    block.grid = &grid;
    block.index = index;
    block.slot = slots.of(grid.rank, static_cast<int32_t>(index), grid.lane);
    block.alive = launch.threads_per_block;
    if (block.slot + 1 >= slot_counters_.size()) slot_counters_.resize(block.slot + 2);
    block.copies.next_counter = slot_counters_[block.slot + 1] + 1;
    for (uint32_t t = 0; t < launch.threads_per_block; ++t) {
        if (t % settings.warp_size == 0) {
            grid.warps.push_back(std::make_unique<Warp>());
            grid.warps.back()->index = first_warp_ + static_cast<uint32_t>(warps_.size());
            grid.warps.back()->level = 1 + random_.below(Ready::kLevels - 2);
            warps_.push_back(grid.warps.back().get());
        }
        start_thread(block, *grid.warps.back(), t);
    }
}

void Machine::start_thread(Block& block, Warp& warp, uint32_t index) {
    if (idle_fibers_.empty()) {
        fibers_.emplace_back();
        fibers_.back().index = static_cast<uint32_t>(fibers_.size() - 1);
        idle_fibers_.push_back(&fibers_.back());
    }
    Fiber& fiber = *idle_fibers_.back();
    idle_fibers_.pop_back();
    fiber.block = &block;
    fiber.warp = &warp;
    fiber.lane = index % settings.warp_size;
    warp.lanes.push_back(&fiber);
    block.fibers.push_back(&fiber);
    const KcclSimLaunch& launch = block.grid->launch;
    const auto stack = reinterpret_cast<uint64_t>(stacks_.at(fiber.index));
    fiber.self = {index,
                  launch.threads_per_block,
                  block.index,
                  launch.num_blocks,
                  stack,
                  Stacks::kBytes,
                  reinterpret_cast<uint64_t>(launch.arguments),
                  launch.argument_bytes};
    const Known& known = block.grid->at_begin;
    fiber.knowledge = {};
    fiber.knowledge.agent = {block.slot, index};
    fiber.knowledge.counter = slot_counters_[block.slot] + 1;
    fiber.knowledge.launch = block.grid->number;
    fiber.knowledge.ordered = fiber.fenced = known.ordered;
    fiber.knowledge.caused = known.caused;
    // Between two launches GPUs write back and invalidate their caches, as if all threads made a
    // fence of system scope. So this thread's stores hand on all that it knows from earlier
    // launches.
    fiber.knowledge.released.fill(known.ordered);
    fiber.knowledge.packets = known.packets;
    fiber.knowledge.packets_released = known.ordered;
    join(fiber.knowledge.packets_released, known.packets);
    fiber.has_turn = false;
    fiber.looked_ns = 0;
    fiber.owner = block.grid->owner + 1 + block.index;
    fiber.site = 0;
    fiber.num_calls = {};
    fiber.begun.name = nullptr;
    begin_poll(fiber);
    fiber.level = level_of(fiber);
    make_ready(&fiber);
}

// ---- Dependents ---------------------------------------------------------------------------------

// Makes the running thread wait until the launch before its own has ended, if its own is a
// dependent. After that the thread knows what a thread of an ordinary launch knows from its
// beginning.
void Machine::await_kernels_before() {
    Fiber& mine = *current_;
    const Grid* const before = mine.block->grid->before.get();
    if (before == nullptr) return;
    end_poll();
    point(false);
    trace(kKcclSimAwaitKernels, 0, 0);
    if (!before->has_ended) yield_as(Fiber::kAtKernels);
    Knowledge& me = mine.knowledge;
    join(me.ordered, before->at_end.ordered);
    join(me.caused, before->at_end.caused);
    join(mine.fenced, before->at_end.ordered);
    for (ClockRef& released : me.released) join(released, before->at_end.ordered);
    join(me.packets, before->at_end.packets);
    for (const ClockRef& known : {before->at_end.ordered, before->at_end.packets}) {
        join(me.packets_released, known);
    }
}

void Machine::launch_dependents() {
    end_poll();
    point(false);
    trace(kKcclSimLaunchDependents, 0, 0);
    let_dependents_in(*current_->block);
    if (has_turned_grid_) yield_as(Fiber::kReady);
}

void Machine::let_dependents_in(Block& block) {
    if (std::exchange(block.lets_in, true)) return;
    if (--block.grid->num_closed == 0) has_turned_grid_ = true;
}

// ---- They end -----------------------------------------------------------------------------------

// Frees the fibers of a block that has ended. Adds to *known what the block's threads and copies
// did and knew.
void Machine::end_block(Block& block, Known* known) {
    uint32_t last = 0;
    for (Fiber* fiber : block.fibers) {
        Knowledge& each = fiber->knowledge;
        last = std::max(last, each.counter);
        each.settle_hearsay();
        join(known->ordered, each.ordered);
        join(known->caused, each.caused);
        for (const ClockRef& seen : each.to_acquire) join(known->ordered, seen);
        join(known->packets, each.packets);
        join(known->packets, each.packets_to_acquire);
        fiber->state = Fiber::kIdle;
        idle_fibers_.push_back(fiber);
        each = {};
        fiber->fenced = {};
    }
    for (ClockRef* clock : {&known->ordered, &known->caused}) {
        edit(*clock).add_block(block.slot, last);
        edit(*clock).add_block(block.slot + 1, block.copies.next_counter);
    }
    slot_counters_[block.slot] = last;
    slot_counters_[block.slot + 1] = block.copies.next_counter;
}

void Machine::end_grid(Grid& grid) {
    Rank& rank = ranks_[static_cast<size_t>(grid.rank)];
    Stream& stream = rank.streams[grid.launch.stream];
    for (const std::unique_ptr<Block>& block : grid.blocks) end_block(*block, &grid.at_end);
    join(stream.known.ordered, grid.at_end.ordered);
    join(stream.known.packets, grid.at_end.packets);
    join(stream.known.caused, grid.at_end.caused);
    for (const std::unique_ptr<Warp>& warp : grid.warps) {
        warps_[warp->index - first_warp_] = nullptr;
    }
    for (; !warps_.empty() && warps_.front() == nullptr; ++first_warp_) warps_.pop_front();
    grid.has_ended = true;
    grid.before = nullptr;
    rank.num_blocks -= grid.launch.num_blocks;
    num_threads_ -= grid.launch.num_blocks * grid.launch.threads_per_block;
    note_change();
    for (const std::shared_ptr<Grid>& waiting : running_) {
        if (waiting->before.get() != &grid) continue;
        for (const std::unique_ptr<Block>& block : waiting->blocks) {
            for (Fiber* fiber : block->fibers) {
                if (fiber->state == Fiber::kAtKernels) make_ready(fiber);
            }
        }
    }
    const auto is_it = [&grid](const auto& each) { return each.get() == &grid; };
    const auto is_of_chain = [&grid](const auto& each) { return each->number == grid.number; };
    std::erase_if(running_, is_it);
    std::deque<std::shared_ptr<Grid>>& launches = stream.launches;
    std::erase_if(launches, is_it);
    if (std::none_of(launches.begin(), launches.end(), is_of_chain)) {
        memory.end_launch(grid.number);
    }
}

}  // namespace kccl::sim
