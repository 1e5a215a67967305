// Records findings (KcclSimFinding), and the last events of the run.
#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

constexpr size_t kKeptFindings = 16;

}  // namespace

KcclSimPlace Machine::place(Agent agent, uint32_t call, uint64_t site) const {
    const Slots::Owner& where = slots[agent.slot];
    const CallInfo& info = calls[call];
    const int32_t thread = Slots::is_copier(agent.slot) ? -1 : static_cast<int32_t>(agent.thread);
    return {where.rank,  where.block, thread, info.channel,
            info.kernel, info.epoch,  site,   info.site};
}

KcclSimPlace Machine::place(const Fiber& fiber) const {
    KcclSimPlace result = place(fiber.knowledge.agent, fiber.knowledge.call, fiber.site);
    result.call_site = fiber.begun.name != nullptr ? fiber.begun.site : 0;
    return result;
}

void Machine::report(KcclSimFindingKind kind, const Deed& deed, uint64_t address,
                     const Deed& other) {
    if (findings.size() >= kKeptFindings) return;
    KcclSimFinding finding = {};
    finding.kind = kind;
    finding.deed = deed.kind;
    finding.other_deed = other.kind;
    finding.place = place(deed.event.agent, deed.call, deed.site);
    finding.other = other.exists ? place(other.event.agent, other.call, other.site)
                                 : KcclSimPlace{-1, -1, -1, -1, 0, 0, 0, 0};
    // The site is often in the library's own code, which means little to users. So the place also
    // gets the line where the thread began its last call.
    const auto name_call = [](const Fiber* fiber, const Deed& of, KcclSimPlace& at) {
        if (fiber == nullptr || fiber->begun.name == nullptr) return;
        if (fiber->knowledge.agent == of.event.agent) at.call_site = fiber->begun.site;
    };
    name_call(current_, deed, finding.place);
    finding.address = address;
    name_shared(finding);
    finding.seed = seed;
    finding.step = steps;
    findings.push_back(finding);
    // Plain accesses are added to the ring of last events only if a finding names them: there are
    // so many that they would push all other events out.
    for (const Deed* each : {&other, &deed}) {
        if (!each->exists || (each->kind != kKcclSimRead && each->kind != kKcclSimWrite)) continue;
        trace(*each, address, 0);
    }
}

// If the finding's address lies in a variable in block-shared memory, adds the variable to the
// finding.
void Machine::name_shared(KcclSimFinding& finding) const {
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            for (const SharedVariable& each : block->shared) {
                if (!each.region.holds(finding.address, 1)) continue;
                finding.edge = each.region.kind;
                finding.edge_address = each.region.begin;
                finding.edge_bytes = each.region.num_bytes;
                finding.edge_rank = each.region.rank;
                finding.edge_block = each.region.block;
            }
        }
    }
}

void Machine::report_here(KcclSimFindingKind kind) {
    const Fiber& mine = *current_;
    report(kind, {mine.knowledge.now(), mine.knowledge.call, mine.site, steps}, mine.address, {});
}

// Reports that no thread can move (kind: kKcclSimDeadlock or kKcclSimLateTimeout). Names some of
// the waiting threads, no two of them in the same block and at the same line. Threads that poll
// come first, because they tell most about the cause.
void Machine::report_stuck(KcclSimFindingKind kind) {
    std::vector<const Fiber*> named;
    uint32_t num_waiting = 0;
    const auto name = [&](const Fiber* fiber) {
        const bool is_new = std::none_of(named.begin(), named.end(), [&](const Fiber* other) {
            return other->block == fiber->block && other->site == fiber->site;
        });
        if (is_new && named.size() < kKcclSimNumNamed) named.push_back(fiber);
    };
    for (const bool of_pollers : {true, false}) {
        for (const std::shared_ptr<Grid>& grid : running_) {
            for (const std::unique_ptr<Block>& block : grid->blocks) {
                for (const Fiber* fiber : block->fibers) {
                    if (fiber->state == Fiber::kEnded) continue;
                    if ((fiber->state == Fiber::kPolling) != of_pollers) continue;
                    ++num_waiting;
                    if (kind != kKcclSimLateTimeout || is_overdue(*fiber)) name(fiber);
                }
            }
        }
    }
    const Fiber& first = *named.front();
    report(kind, {first.knowledge.now(), first.knowledge.call, first.site, steps}, first.address,
           {});
    KcclSimFinding& finding = findings.back();
    finding.num_waiting = num_waiting;
    finding.num_named = static_cast<uint32_t>(named.size());
    for (size_t i = 0; i < named.size(); ++i) finding.waiting[i] = place(*named[i]);
    for (const std::shared_ptr<Grid>& grid : running_) {
        const auto begun = static_cast<uint32_t>(grid->blocks.size());
        if (begun == grid->launch.num_blocks) continue;
        finding.num_unstarted = grid->launch.num_blocks - begun;
        finding.num_resident = grid->launch.most_resident;
    }
    name_first_lack(finding);
}

// Reports that threads of the running thread's block or warp wait at different barriers, or wait
// for threads that have ended.
void Machine::report_divergence(bool is_of_block) {
    const Fiber& mine = *current_;
    const std::vector<Fiber*>& fibers = is_of_block ? mine.block->fibers : mine.warp->lanes;
    const Fiber::State at = is_of_block ? Fiber::kAtBlock : Fiber::kAtWarp;
    const auto find = [&](const std::vector<Fiber*>& among, auto is_it) {
        const auto found = std::find_if(among.begin(), among.end(), is_it);
        return found == among.end() ? nullptr : *found;
    };
    const bool ends = mine.state == Fiber::kEnded;
    const Fiber* waiting =
        find(fibers, [&](const Fiber* f) { return f != &mine && f->state == at; });
    const Fiber* ended =
        find(mine.warp->lanes, [](const Fiber* f) { return f->state == Fiber::kEnded; });
    const Fiber& one = ends ? *waiting : mine;
    const Fiber* const other = ended != nullptr ? ended : waiting;
    Deed deed;
    if (other != nullptr) {
        deed = {other->knowledge.now(),
                other->knowledge.call,
                other->site,
                steps,
                kKcclSimMeetBlock,
                true};
    }
    report(kKcclSimDivergence, {one.knowledge.now(), one.knowledge.call, one.site, steps},
           one.address, deed);
    findings.back().has_ended = ended != nullptr ? 1 : 0;
}

// Tells whether a thread still polls although its wait has a timeout. Called only after the clock
// has moved on past every timeout. A thread that has read the clock since all threads came to wait
// (halted_ns_) should have timed out. A thread that has not read it waits without a timeout.
bool Machine::is_overdue(const Fiber& fiber) const {
    return fiber.state == Fiber::kPolling && fiber.looked_ns > halted_ns_;
}

// Called when the clock has moved on by more than any timeout. Reports a late time-out if a thread
// that waits has read the clock since then, otherwise a deadlock.
void Machine::report_overdue() {
    bool has_limit = false;
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            has_limit = has_limit || std::any_of(block->fibers.begin(), block->fibers.end(),
                                                 [this](const Fiber* f) { return is_overdue(*f); });
        }
    }
    report_stuck(has_limit ? kKcclSimLateTimeout : kKcclSimDeadlock);
}

KcclSimEvent* Machine::next_event() {
    if (events.empty()) return nullptr;
    KcclSimEvent* const event = &events[next_event_];
    ++num_events;
    if (++next_event_ == events.size()) next_event_ = 0;
    return event;
}

void Machine::trace(KcclSimEventKind kind, uint64_t address, uint64_t value, uint32_t age,
                    Order order, Scope scope) {
    KcclSimEvent* const event = next_event();
    if (event == nullptr) return;
    const Fiber& mine = *current_;
    event->kind = kind;
    event->age = age;
    event->order = static_cast<uint32_t>(order);
    event->scope = static_cast<uint32_t>(scope);
    event->place = place(mine.knowledge.agent, mine.knowledge.call, mine.site);
    event->address = address;
    event->value = value;
    event->step = steps;
}

void Machine::trace(const Deed& deed, uint64_t address, uint64_t value) {
    KcclSimEvent* const event = next_event();
    if (event == nullptr) return;
    *event = {deed.kind, 0,     0,        0, place(deed.event.agent, deed.call, deed.site),
              address,   value, deed.step};
}

}  // namespace kccl::sim
