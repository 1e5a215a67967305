// Decides which simulated thread runs ("moves") next, when a running thread is interrupted, and
// which waiting threads are woken.
#include <algorithm>
#include <utility>

#include "machine.h"

namespace kccl::sim {
namespace {

// When nothing changes any more, every waiting thread polls in this many further rounds before the
// machine counts as stuck. One round is not enough, because the slow path of a wait (wait.cuh)
// reads words that its polls do not load.
constexpr uint32_t kIdleRounds = 3;
// A store wakes the threads that poll its word at once in one of this many cases, otherwise later.
constexpr uint32_t kWakeOneIn = 16;
// The most warps among which an exhaustive search chooses. It is made for tiny programs only, so
// more are not needed.
constexpr uint32_t kOfferedWarps = 8;
// How far each step of any thread moves the machine's clock on.
constexpr uint64_t kStepNs = 2;
// A run counts as endless if nothing is stored and not all threads wait for kIdleSteps steps, plus
// kIdleStepsAThread for each thread. Otherwise a wait that does not call poll_pause() would never
// end.
constexpr uint64_t kIdleSteps = uint64_t{1} << 25;
constexpr uint64_t kIdleStepsAThread = uint64_t{1} << 14;
// How far pass_time() moves the clock on the first time, when no thread can move.
constexpr uint64_t kFirstPassNs = 1'000'000;
// A time far beyond any timeout that a user sets. A wait that has not ended by then has no timeout,
// or ignores it.
constexpr uint64_t kAllWaitsEndNs = 1'000'000'000'000'000;

}  // namespace

// ---- What a seed chooses ------------------------------------------------------------------------

void Machine::choose_style() {
    static constexpr uint32_t kSwitch[] = {1, 2, 8, 64};
    static constexpr uint32_t kOld[] = {0, 16, 128, 230};
    static constexpr uint8_t kSkips[] = {1, 3, 8};
    style_ = {};
    style_.schedule = static_cast<KcclSimSchedule>(settings.schedule);
    if (style_.schedule == kKcclSimMixed) {
        style_.schedule = static_cast<KcclSimSchedule>(kKcclSimRandom + random_.below(6));
    }
    style_.switch_one_in = kSwitch[random_.below(4)];
    style_.slow_rank = static_cast<int32_t>(random_.below(settings.world_size));
    style_.slow_block = static_cast<int32_t>(random_.below(4));
    // The bound is a random power of two, so that the thread stops after few steps as often as
    // after many.
    style_.stopped_at = 1 + random_.below(1u << (4 + random_.below(13)));
    style_.change_one_in = 16u << random_.below(6);
    weakness_ = {};
    if (settings.is_weak != 0) {
        weakness_.old_per_256 = kOld[random_.below(4)];
        weakness_.max_skips = kSkips[random_.below(3)];
        weakness_.target = static_cast<Weakness::Target>(random_.below(4));
        weakness_.rank = static_cast<int32_t>(random_.below(settings.world_size));
    }
    if (style_.schedule == kKcclSimExhaustive) weakness_.max_skips = settings.is_weak != 0 ? 1 : 0;
}

uint32_t Machine::level_of(const Fiber& fiber) const {
    const int32_t rank = fiber.block->grid->rank;
    switch (style_.schedule) {
        case kKcclSimPriority: return fiber.warp->level;
        case kKcclSimSlowRank: return rank == style_.slow_rank ? 0 : 1;
        case kKcclSimSlowBlock: {
            const auto blocks = static_cast<int32_t>(fiber.block->grid->launch.num_blocks);
            const bool is_slow =
                rank == style_.slow_rank &&
                static_cast<int32_t>(fiber.block->index) == style_.slow_block % blocks;
            return is_slow ? 0 : 1;
        }
        default: return 1;
    }
}

// ---- From one thread to the next ----------------------------------------------------------------

Fiber* Machine::pick() {
    if (ready_.is_empty()) return nullptr;
    if (style_.schedule == kKcclSimExhaustive) return take_turn();
    if (style_.schedule == kKcclSimRoundRobin) return ready_.pop_oldest();
    return ready_.pop_any(random_);
}

// Stores in warps[] up to kOfferedWarps warps that can move, the one that has waited longest first,
// and without `except`. Returns how many there are.
uint32_t Machine::movable(const Warp* except, Warp** warps) const {
    if (ready_.is_empty()) return 0;
    size_t first = 0;
    const std::vector<Fiber*>& fibers = ready_.at_highest(&first);
    uint32_t count = 0;
    for (size_t i = first; i < fibers.size() && count < kOfferedWarps; ++i) {
        Warp* const warp = fibers[i]->warp;
        if (warp != except && std::find(warps, warps + count, warp) == warps + count) {
            warps[count++] = warp;
        }
    }
    return count;
}

// Returns the thread that runs next in an exhaustive search. The tape has one decision for each
// access: which warp makes it. If the running thread ends or waits, its warp goes on with another
// thread without a decision, because no other warp sees what that thread does before its next
// access. A warp whose poll was in vain comes after all others.
Fiber* Machine::take_turn() {
    Warp* wanted = std::exchange(next_warp_, nullptr);
    if (wanted == nullptr) {
        Warp* warps[kOfferedWarps];
        const Warp* const last = current_ != nullptr ? current_->warp : nullptr;
        const bool polls = current_ != nullptr && current_->state == Fiber::kReady;
        const uint32_t others = movable(polls ? last : nullptr, warps);
        const uint32_t count = others != 0 ? others : movable(nullptr, warps);
        const bool goes_on = std::find(warps, warps + count, last) != warps + count;
        wanted = goes_on ? current_->warp : warps[count > 1 ? tape.next(count) : 0];
    }
    size_t first = 0;
    const std::vector<Fiber*>& fibers = ready_.at_highest(&first);
    const auto chosen =
        std::find_if(fibers.begin() + static_cast<ptrdiff_t>(first), fibers.end(),
                     [wanted](const Fiber* other) { return other->warp == wanted; });
    Fiber* const fiber = *chosen;
    fiber->has_turn = current_ == nullptr || wanted != current_->warp;
    ready_.remove_at_highest(static_cast<size_t>(chosen - fibers.begin()));
    return fiber;
}

void Machine::offer_turn() {
    Fiber& mine = *current_;
    if (std::exchange(mine.has_turn, false)) return;
    Warp* others[kOfferedWarps];
    const uint32_t count = movable(mine.warp, others);
    const uint32_t choice = count == 0 ? 0 : tape.next(count + 1);
    if (choice == 0) return;
    next_warp_ = others[choice - 1];
    yield_as(Fiber::kReady);
    mine.has_turn = false;
}

void Machine::switch_away() {
    Fiber* const mine = current_;
    Fiber* const next = findings.empty() && !has_turned_grid_ ? pick() : nullptr;
    if (next == mine) return;
    current_ = next;
    Context& from = mine != nullptr ? mine->context : host_;
    if (next == nullptr) {
        switch_context(from, host_);
        return;
    }
    ++switches;
    show_self(*next);
    if (!next->has_context) {
        Context here;
        make_context(next->context, here, stacks_.at(next->index), Stacks::kBytes, body, next);
        next->has_context = true;
    }
    switch_context(from, next->context);
}

void Machine::make_ready(Fiber* fiber) {
    fiber->state = Fiber::kReady;
    if (fiber->level != kStoppedLevel || style_.schedule != kKcclSimStoppedThread) {
        fiber->level = level_of(*fiber);
    }
    ready_.push(fiber, fiber->level);
}

void Machine::yield_as(Fiber::State state) {
    Fiber* const mine = current_;
    if (state == Fiber::kReady) {
        make_ready(mine);
    } else {
        mine->state = state;
    }
    switch_away();
}

void Machine::count_step() {
    clock_ns += kStepNs;
    if (++steps > endless_at_) report_endless();
}

void Machine::note_change() {
    ++changes_;
    note_progress();
}

void Machine::note_progress() {
    endless_at_ =
        std::min(settings.max_steps, steps + kIdleSteps + kIdleStepsAThread * num_threads_);
}

void Machine::point(bool is_access) {
    Fiber& mine = *current_;
    count_step();
    if (!copying_.empty() && random_.one_in(8)) complete_copy();
    switch (style_.schedule) {
        case kKcclSimExhaustive:
            if (is_access) offer_turn();
            return;
        case kKcclSimStoppedThread:
            if (steps == style_.stopped_at) mine.level = kStoppedLevel;
            break;
        case kKcclSimPriority:
            if (random_.one_in(style_.change_one_in)) {
                mine.warp->level = 1 + random_.below(Ready::kLevels - 2);
                mine.level = mine.warp->level;
            }
            break;
        default: break;
    }
    const bool is_outranked = !ready_.is_empty() && ready_.highest() > mine.level;
    const bool is_interrupted = style_.schedule != kKcclSimPriority &&
                                (style_.switch_one_in == 1 || random_.one_in(style_.switch_one_in));
    if (is_outranked || is_interrupted) yield_as(Fiber::kReady);
}

void Machine::wake(Granule& granule) {
    note_change();
    ++granule.num_stores;
    to_wake_.insert(to_wake_.end(), granule.waiters.begin(), granule.waiters.end());
    granule.waiters.clear();
    // Warps are not woken after every store, because a warp that waits for many words would poll
    // all of them after each store to one.
    if (style_.schedule == kKcclSimExhaustive || random_.one_in(kWakeOneIn)) wake_stored();
}

bool Machine::wake_stored() {
    const bool has_any = !to_wake_.empty();
    for (const uint32_t index : to_wake_) {
        Warp* const warp = warp_at(index);
        if (warp != nullptr) wake(*warp);
    }
    to_wake_.clear();
    return has_any;
}

// Returns the warp with this Warp::index, or null if it has ended.
Warp* Machine::warp_at(uint32_t index) const {
    return index < first_warp_ ? nullptr : warps_[index - first_warp_];
}

// Wakes all polling threads of a warp: they poll again together, whichever of them waits for the
// word that was stored.
void Machine::wake(Warp& warp) {
    ++warp.woken;
    for (Fiber* lane : warp.lanes) {
        if (lane->state == Fiber::kPolling) make_ready(lane);
    }
}

bool Machine::wake_pollers() {
    if (changes_ != changes_at_wake_) {
        changes_at_wake_ = changes_;
        idle_rounds_ = 0;
        passed_ns_ = 0;
    }
    if (idle_rounds_ >= kIdleRounds) return false;
    ++idle_rounds_;
    note_progress();
    bool has_woken = false;
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            for (Fiber* fiber : block->fibers) {
                if (fiber->state != Fiber::kPolling) continue;
                make_ready(fiber);
                has_woken = true;
            }
        }
    }
    return has_woken;
}

// Called when no thread can move. Moves the machine's clock on, so that waits that read it time
// out. at_least_ns: by how much; if it is 0, by more each time. Returns false if more time has
// passed than any timeout allows.
bool Machine::pass_time(uint64_t at_least_ns) {
    if (passed_ns_ == 0) {
        halted_ns_ = clock_ns;
        note_waits();
        passed_ns_ = kFirstPassNs;
    } else if (at_least_ns == 0) {
        // Only time can end the waits now, so each jump is an eighth longer than the one before.
        // With at_least_ns (real time that has passed on the host) the jumps do not grow: some
        // rank's program is still running on the CPU, and its next launch may end the waits at any
        // time.
        passed_ns_ += passed_ns_ / 8;
    }
    clock_ns += at_least_ns != 0 ? at_least_ns : passed_ns_;
    idle_rounds_ = 0;
    return clock_ns < kAllWaitsEndNs;
}

}  // namespace kccl::sim
