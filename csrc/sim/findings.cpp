// What was found, and the last events before it.
#include "machine.h"

namespace kccl::sim {
namespace {

constexpr size_t kKeptFindings = 16;

}  // namespace

KcclSimPlace Machine::place(Agent agent, uint32_t call, uint64_t site) const {
    const Slots::Place& where = slots[agent.slot];
    const CallInfo& info = calls[call];
    return {where.rank, where.block, static_cast<int32_t>(agent.thread), info.channel, info.kernel,
            info.epoch, site};
}

void Machine::report(KcclSimFindingKind kind, Agent agent, uint32_t call, uint64_t site,
                     uint64_t address, const Other& other) {
    if (findings.size() >= kKeptFindings) return;
    KcclSimFinding finding = {};
    finding.kind = kind;
    finding.place = place(agent, call, site);
    finding.other = other.exists ? place(other.event.agent, other.call, other.site)
                                 : KcclSimPlace{-1, -1, -1, -1, 0, 0, 0};
    finding.address = address;
    finding.seed = seed;
    finding.step = steps;
    findings.push_back(finding);
}

void Machine::report_here(KcclSimFindingKind kind) {
    const Fiber& mine = *current_;
    report(kind, mine.knowledge.agent, mine.knowledge.call, mine.site, mine.address, {});
}

// Names the first thread that waits; those that poll say most.
void Machine::report_stuck(KcclSimFindingKind kind) {
    const Fiber* first = nullptr;
    uint32_t num_waiting = 0;
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            for (const Fiber* fiber : block->fibers) {
                if (fiber->state == Fiber::kEnded) continue;
                ++num_waiting;
                const bool says_more = first != nullptr && first->state != Fiber::kPolling &&
                                       fiber->state == Fiber::kPolling;
                if (first == nullptr || says_more) first = fiber;
            }
        }
    }
    report(kind, first->knowledge.agent, first->knowledge.call, first->site, first->address, {});
    findings.back().num_waiting = num_waiting;
}

void Machine::trace(KcclSimEventKind kind, uint64_t address, uint64_t value, uint32_t age) {
    if (events.empty()) return;
    const Fiber& mine = *current_;
    KcclSimEvent& event = events[num_events++ % events.size()];
    event.kind = kind;
    event.age = age;
    event.place = place(mine.knowledge.agent, mine.knowledge.call, mine.site);
    event.address = address;
    event.value = value;
    event.step = steps;
}

}  // namespace kccl::sim
