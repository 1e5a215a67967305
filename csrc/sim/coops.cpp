// Checks that all threads of a coop (a warp, block or grid) make the calls that they must make
// together, and with the same arguments.
//
// A call is no barrier, so threads of a coop may be at different calls, and a thread may still make
// a call that others have made. It certainly does not make the call if it ends, makes another call
// instead, or waits at a barrier for threads that are in the call. The machine then lets all other
// threads run as far as they can, so that the report names all threads that do not make the call.
#include <string.h>

#include <algorithm>

#include "../include/kccl/together.cuh"
#include "answers.h"
#include "machine.h"

namespace kccl::sim {
namespace {

// Kernels pass values of kccl::CoopKind and kccl::ExchangeStep as numbers, so the enums of the same
// meaning here must have the same numbers.
template <class One, class Other>
constexpr bool are_equal(One one, Other other) {
    return static_cast<uint32_t>(one) == static_cast<uint32_t>(other);
}
static_assert(are_equal(Coop::kThread, CoopKind::kThread));
static_assert(are_equal(Coop::kWarp, CoopKind::kWarp));
static_assert(are_equal(Coop::kBlock, CoopKind::kBlock));
static_assert(are_equal(Coop::kGrid, CoopKind::kGrid));
static_assert(are_equal(ExchangeStep::kNone, kccl::ExchangeStep::kNone));
static_assert(are_equal(ExchangeStep::kOpen, kccl::ExchangeStep::kOpen));
static_assert(are_equal(ExchangeStep::kPublish, kccl::ExchangeStep::kPublish));
static_assert(are_equal(ExchangeStep::kCollect, kccl::ExchangeStep::kCollect));
static_assert(are_equal(ExchangeStep::kClose, kccl::ExchangeStep::kClose));

bool has_failed(uint64_t state) {
    return reinterpret_cast<const KcclState*>(state)->status != kKcclOk;
}

void copy_name(char* to, const char* from) { strncpy(to, from, kKcclSimNameBytes - 1); }

uint32_t calls_of(const Fiber& fiber, Coop coop) {
    return fiber.num_calls[static_cast<size_t>(coop)];
}

CallLog& log_of(const Fiber& fiber, Coop coop) {
    if (coop == Coop::kWarp) return fiber.warp->calls;
    return coop == Coop::kBlock ? fiber.block->calls : fiber.block->grid->calls;
}

// Tells whether the thread waits at a barrier for others of its block or warp, or has ended.
bool cannot_go_on(const Fiber& fiber) {
    return fiber.state == Fiber::kEnded || fiber.state == Fiber::kAtBlock ||
           fiber.state == Fiber::kAtWarp;
}

}  // namespace

template <class F>
void Machine::for_threads_of(Coop coop, const Fiber& fiber, F f) const {
    if (coop == Coop::kWarp) {
        std::for_each(fiber.warp->lanes.begin(), fiber.warp->lanes.end(), f);
    } else if (coop == Coop::kBlock) {
        std::for_each(fiber.block->fibers.begin(), fiber.block->fibers.end(), f);
    } else {
        for (const std::unique_ptr<Block>& block : fiber.block->grid->blocks) {
            std::for_each(block->fibers.begin(), block->fibers.end(), f);
        }
    }
}

// ---- A thread makes a call ----------------------------------------------------------------------

void Machine::begin_call(const KcclSimCoopCall& call) {
    Grid& grid = *current_->block->grid;
    grid.has_failed = grid.has_failed || has_failed(call.state);
    BegunCall& begun = current_->begun;
    begun.name = call.name;
    begun.state = call.state;
    begun.site = current_->site;
    // Counts the beginning of the call as an event of the thread. So events in the call have
    // numbers above begun.counter, and events before it do not.
    begun.counter = current_->knowledge.counter++;
    begun.num_arguments = std::min(call.num_arguments, BegunCall::kMostArguments);
    std::copy_n(call.arguments, begun.num_arguments, begun.arguments.begin());
    const auto coop = static_cast<Coop>(call.coop);
    begun.coop = coop;
    if (coop == Coop::kThread) ++current_->num_calls[static_cast<size_t>(coop)];
    if (grid.has_failed || settings.checks == 0 || coop == Coop::kThread) return;
    if (coop == Coop::kWarp) return enter_call(coop, current_->warp->calls, call, 0);
    const bool is_first = calls_of(*current_, Coop::kBlock) == current_->block->calls.end;
    enter_call(Coop::kBlock, current_->block->calls, call, call.num_arguments);
    Warp& warp = *current_->warp;
    warp.num_calls_of_block = std::max(warp.num_calls_of_block, calls_of(*current_, Coop::kBlock));
    if (!findings.empty()) return;
    if (coop == Coop::kGrid) enter_call(coop, grid.calls, call, call.num_common);
    if (is_first && findings.empty()) step_exchange(current_->block->exchanges, call);
    const bool tells = current_->self.thread_in_block == 0;
    const bool collects = static_cast<ExchangeStep>(call.step) == ExchangeStep::kCollect;
    if (tells && collects && findings.empty()) check_collected(call);
}

// Records that the running thread makes its next call with this kind of coop. If another thread of
// the coop has made its call of this number before, compares the two. num_compared: how many
// arguments, from the first on, must be the same in all threads of the coop; ignored for a warp, in
// which all must be.
void Machine::enter_call(Coop coop, CallLog& log, const KcclSimCoopCall& call,
                         uint32_t num_compared) {
    Fiber& mine = *current_;
    const uint32_t number = mine.num_calls[static_cast<size_t>(coop)]++;
    if (coop == Coop::kWarp) num_compared = call.num_arguments;
    if (number == log.end) {
        ++log.end;
        log.calls.push_back({call.name, call.state, {}, deed_of(mine, steps), 0});
        log.calls.back().arguments.assign(call.arguments, call.arguments + num_compared);
        // Threads of the coop that have ended, or that wait for this thread at a barrier, cannot
        // make this call any more.
        const Block& block = *mine.block;
        const bool may_lack =
            coop == Coop::kGrid
                ? block.grid->alive != block.grid->launch.num_blocks * block.fibers.size()
                : block.arrived != 0 || block.alive != block.fibers.size() ||
                      mine.warp->arrived != 0;
        if (may_lack) {
            for_threads_of(coop, mine, [&](const Fiber* other) {
                const bool waits_for_me =
                    (other->state == Fiber::kAtBlock && coop != Coop::kGrid) ||
                    (other->state == Fiber::kAtWarp && other->warp == mine.warp);
                if (calls_of(*other, coop) > number) return;
                if (other->state == Fiber::kEnded || waits_for_me) lack(coop, *other, number);
            });
        }
    }
    MadeCall& made = log.at(number);
    if (!is_same(made.name, call.name) || made.state != call.state) {
        report_call(kKcclSimThreadsDiffer, mine, made, call.name);
        findings.back().coop = static_cast<uint32_t>(coop);
        return;
    }
    // A block that gives publish too large a count has num_common 0, because publish refuses the
    // count there.
    num_compared = std::min(num_compared, static_cast<uint32_t>(made.arguments.size()));
    for (uint32_t i = 0; i < num_compared; ++i) {
        if (made.arguments[i].value == call.arguments[i].value) continue;
        report_call(kKcclSimArgumentsDiffer, mine, made, call.name);
        KcclSimFinding& finding = findings.back();
        finding.coop = static_cast<uint32_t>(coop);
        finding.value = call.arguments[i].value;
        finding.other_value = made.arguments[i].value;
        copy_name(finding.argument, call.arguments[i].name);
        return;
    }
    ++made.num_threads;
    const Grid& grid = *mine.block->grid;
    const uint64_t size = coop == Coop::kWarp ? mine.warp->lanes.size()
                          : coop == Coop::kBlock
                              ? mine.block->fibers.size()
                              : uint64_t{grid.launch.num_blocks} * mine.block->fibers.size();
    // Every thread makes the calls in the same order, so the first call in the log is the one that
    // is complete.
    if (made.num_threads == size) {
        if (coop != Coop::kGrid) check_inputs(coop, call);
        log.calls.pop_front();
        ++log.first;
    }
    report_settled();
}

// Checks that the coop was synchronised between the last plain write to the memory that its threads
// may read in this call and the call. The user must do that, but many calls begin with a sync, by
// which a missing one would not show as a data race. Called when the last thread of the coop makes
// the call. Then all writes before the call have been made, and no thread has passed a sync within
// the call. Checks one thread of each warp, and the coop's last thread. If a warp's first thread
// knows of all writes, so do the warp's other threads, except perhaps for writes of the first
// thread itself.
void Machine::check_inputs(Coop coop, const KcclSimCoopCall& call) {
    const Block& block = *current_->block;
    const std::vector<Fiber*>& fibers = coop == Coop::kWarp ? current_->warp->lanes : block.fibers;
    for (uint32_t i = 0; i < call.num_arguments && findings.empty(); ++i) {
        const KcclSimArgument& each = call.arguments[i];
        if (each.num_bytes == 0) continue;
        std::vector<uint32_t> begun(block.fibers.size());
        for (const Fiber* fiber : fibers) begun[fiber->self.thread_in_block] = fiber->begun.counter;
        for (const Fiber* fiber : fibers) {
            if (fiber->lane != 0 && fiber != fibers.back()) continue;
            if (memory.knows_writes(fiber->knowledge, each.value, each.num_bytes, begun,
                                    fiber->begun.site)) {
                continue;
            }
            copy_name(findings.back().call, call.name);
            findings.back().place.call_site = fiber->begun.site;
            break;
        }
    }
}

// ---- A thread does not make a call --------------------------------------------------------------

void Machine::check_calls(bool is_of_block) {
    const Fiber& mine = *current_;
    Block& block = *mine.block;
    if (block.grid->has_failed) return;
    const bool has_ended = mine.state == Fiber::kEnded;
    const auto check = [&](Coop coop, uint32_t end) {
        const uint32_t number = calls_of(mine, coop);
        if (number < end) lack(coop, mine, number);
    };
    check(Coop::kWarp, mine.warp->calls.end);
    check(Coop::kBlock, is_of_block ? block.calls.end : mine.warp->num_calls_of_block);
    if (has_ended) check(Coop::kGrid, block.grid->calls.end);
}

void Machine::wait_incomplete(Fiber::State state) {
    current_->state = state;
    report_settled();
    switch_away();
}

void Machine::check_lone_calls(Fiber::State state) {
    const Fiber& mine = *current_;
    if (mine.block->grid->has_failed) return;
    // There is nothing to report unless some threads of the warp wait for the warp and others for
    // the block.
    if ((state == Fiber::kAtBlock ? mine.warp->arrived : mine.block->arrived) == 0) return;
    const auto waits = [&](const Fiber& fiber, Fiber::State at) {
        return (&fiber == &mine ? state : fiber.state) == at;
    };
    const std::vector<Fiber*>& lanes = mine.warp->lanes;
    const auto caller = std::find_if(lanes.begin(), lanes.end(), [&](const Fiber* each) {
        return waits(*each, Fiber::kAtWarp) && each->begun.name != nullptr &&
               each->begun.coop == Coop::kThread;
    });
    if (caller == lanes.end()) return;
    const uint32_t number = calls_of(**caller, Coop::kThread) - 1;
    const auto lacks = [&](const Fiber* each) {
        return waits(*each, Fiber::kAtBlock) && calls_of(*each, Coop::kThread) <= number;
    };
    const auto other = std::find_if(lanes.begin(), lanes.end(), lacks);
    if (other == lanes.end()) return;
    const BegunCall& begun = (*caller)->begun;
    Deed by = deed_of(**caller, steps);
    by.site = begun.site;
    report_call(kKcclSimIncompleteCall, **other, {begun.name, begun.state, {}, by, 0}, begun.name);
    KcclSimFinding& finding = findings.back();
    finding.coop = static_cast<uint32_t>(Coop::kThread);
    name_missing(Coop::kWarp, Coop::kThread, **other, number, finding);
    switch_away();
}

// Notes in lacks_ that the thread does not make the coop's call of this number, unless the call's
// communicator has failed or a thread that does not make this call has been noted already.
void Machine::lack(Coop coop, const Fiber& fiber, uint32_t number) {
    Grid& grid = *fiber.block->grid;
    const MadeCall& made = log_of(fiber, coop).at(number);
    grid.has_failed = grid.has_failed || has_failed(made.state);
    const bool is_known = std::any_of(lacks_.begin(), lacks_.end(), [&](const Lack& known) {
        return known.number == number && known.coop == coop &&
               &log_of(*known.fiber, coop) == &log_of(fiber, coop);
    });
    if (grid.has_failed || is_known) return;
    lacks_.push_back({&fiber, coop, number});
    fiber.block->is_incomplete = fiber.block->is_incomplete || coop != Coop::kGrid;
}

// Tells whether each thread of the coop has made the call or cannot go on. Then it is certain which
// threads do not make it.
bool Machine::is_settled(const Lack& lack) const {
    bool result = true;
    for_threads_of(lack.coop, *lack.fiber, [&](const Fiber* each) {
        result = result && (calls_of(*each, lack.coop) > lack.number || cannot_go_on(*each));
    });
    return result;
}

void Machine::report_settled() {
    for (const Lack& lack : lacks_) {
        if (is_settled(lack)) return report_lack(lack);
    }
}

void Machine::report_lack(const Lack& lack) {
    const Fiber& fiber = *lack.fiber;
    const MadeCall& made = log_of(fiber, lack.coop).at(lack.number);
    report_call(kKcclSimIncompleteCall, fiber, made, made.name);
    KcclSimFinding& finding = findings.back();
    finding.coop = static_cast<uint32_t>(lack.coop);
    finding.has_ended = fiber.state == Fiber::kEnded ? 1 : 0;
    name_missing(lack.coop, lack.coop, fiber, lack.number, finding);
}

// Lists in the finding the threads of the fiber's warp, block or grid (`among`) that have not made
// the call of this number with the kind of coop `coop`.
void Machine::name_missing(Coop among, Coop coop, const Fiber& fiber, uint32_t number,
                           KcclSimFinding& finding) {
    for_threads_of(among, fiber, [&](const Fiber* each) {
        if (calls_of(*each, coop) > number) return;
        if (coop == Coop::kThread && each->state == Fiber::kEnded) return;
        const auto block = static_cast<int32_t>(each->block->index);
        const auto thread = static_cast<int32_t>(each->self.thread_in_block);
        KcclSimRange* const last =
            finding.num_ranges == 0 ? nullptr : &finding.ranges[finding.num_ranges - 1];
        if (last != nullptr && last->block == block && last->last == thread - 1) {
            last->last = thread;
        } else if (finding.num_ranges < kKcclSimNumRanges) {
            finding.ranges[finding.num_ranges++] = {block, thread, thread};
        }
    });
}

// Adds to the finding of a deadlock a call that some threads of a block or warp have made and
// others have not, if there is one: probably the cause.
void Machine::name_first_lack(KcclSimFinding& finding) {
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            for (const Fiber* fiber : block->fibers) {
                for (const Coop coop : {Coop::kBlock, Coop::kWarp}) {
                    const CallLog& log = log_of(*fiber, coop);
                    if (log.calls.empty() || calls_of(*fiber, coop) == log.end) continue;
                    const MadeCall& made = log.at(calls_of(*fiber, coop));
                    finding.coop = static_cast<uint32_t>(coop);
                    finding.other = place(made.by.event.agent, made.by.call, made.by.site);
                    copy_name(finding.call, made.name);
                    name_missing(coop, coop, *fiber, calls_of(*fiber, coop), finding);
                    return;
                }
            }
        }
    }
}

// Reports why a run must end now. It was interrupted; or a thread does not make a call of its coop,
// probably because another is in an endless loop; or it runs without end.
void Machine::report_endless() {
    if (is_interrupted_.load(std::memory_order_relaxed)) {
        report_here(kKcclSimInterrupted);
    } else if (!lacks_.empty()) {
        report_lack(lacks_.front());
    } else {
        report_here(kKcclSimEndless);
    }
}

void Machine::report_call(KcclSimFindingKind kind, const Fiber& fiber, const MadeCall& other,
                          const char* name) {
    report(kind, deed_of(fiber, steps), fiber.address, other.by);
    copy_name(findings.back().call, name);
    copy_name(findings.back().other_call, other.name);
}

void refuse_argument(const KcclSimRefusal* refusal) {
    Machine& machine = *running;
    machine.me().site = reinterpret_cast<uint64_t>(__builtin_return_address(0));
    machine.me().address = 0;
    machine.report_here(kKcclSimBadArgument);
    KcclSimFinding& finding = machine.findings.back();
    copy_name(finding.call, refusal->call);
    copy_name(finding.argument, refusal->argument);
    finding.value = refusal->value;
    finding.other_value = refusal->limit;
    finding.text = refusal->must;
    machine.leave_if_found();
}

void begin_together(const KcclSimCoopCall* call) {
    Machine& machine = *running;
    machine.me().site = reinterpret_cast<uint64_t>(__builtin_return_address(0));
    machine.me().address = 0;
    machine.end_poll();
    machine.begin_call(*call);
    machine.leave_if_found();
}

}  // namespace kccl::sim
