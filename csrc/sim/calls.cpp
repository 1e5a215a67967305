// The functions by which kernels tell the simulator about their calls, or ask it
// (include/kccl/told.cuh).
#include "answers.h"
#include "machine.h"

namespace kccl::sim {
namespace {

bool are_alike(const KcclSimMade& a, const KcclSimMade& b) {
    const bool is_type_known = a.dtype != kKcclNumDtypes && b.dtype != kKcclNumDtypes;
    return a.num_bytes == b.num_bytes && a.kernel == b.kernel && a.op == b.op && a.root == b.root &&
           a.num_blocks == b.num_blocks && (a.dtype == b.dtype || !is_type_known);
}

// Tells whether a stream of calls (KcclSimCall) compares operators of reductions: see
// told::reduction_begins().
bool is_reduction(int32_t stream) { return stream < -kKcclNumReaches; }

}  // namespace

// ---- Calls of several ranks ---------------------------------------------------------------------

void Alike::forget(uint64_t state) {
    std::erase_if(streams_, [&](const auto& each) { return each.second.states.contains(state); });
}

const Made* Alike::compare(const KcclSimCall& call, const Made& mine) {
    Stream& stream = streams_[{call.memory, call.stream}];
    stream.states.insert(call.state);
    const bool is_exchange = call.stream < 0;
    const uint64_t number = is_exchange ? call.epoch : stream.calls[call.rank]++;
    if (!is_exchange) {
        stream.last[call.rank] = mine;
        stream.world_size = call.num_callers;
    }
    Pending& pending = stream.pending[number];
    if (pending.callers == 0) pending.first = mine;
    found_ = pending.first;
    pending.ranks |= 1u << call.rank;
    if (++pending.callers == call.num_callers) stream.pending.erase(number);
    return are_alike(found_.what, mine.what) ? nullptr : &found_;
}

std::pair<const Made*, const Made*> Alike::crossed() const {
    for (auto at = streams_.begin(); at != streams_.end();) {
        const uint64_t memory = at->first.first;
        std::vector<const Made*> calls;
        uint32_t ranks = 0;
        bool are_crossed = true;
        for (; at != streams_.end() && at->first.first == memory; ++at) {
            for (const auto& [number, pending] : at->second.pending) {
                // Sequences of reductions are left out: a rank that does not reduce makes no call
                // in them.
                if (is_reduction(at->first.second)) continue;
                are_crossed = are_crossed && at->first.second >= 0 && (ranks & pending.ranks) == 0;
                ranks |= pending.ranks;
                calls.push_back(&pending.first);
                are_crossed = are_crossed && are_alike(calls.front()->what, pending.first.what);
            }
        }
        if (are_crossed && calls.size() > 1) return {calls[0], calls[1]};
    }
    return {};
}

// ---- Channels -----------------------------------------------------------------------------------

const Made* Openings::open(const KcclSimOpening& opening, uint32_t slot, uint32_t thread,
                           const Made& mine) {
    const auto [at, is_new] = open_.try_emplace({opening.memory, opening.index});
    Open& open = at->second;
    if (is_new) open = {mine, slot, opening.first_thread, opening.num_threads, {}};
    if (!open.is_by(opening, slot) || !open.threads.insert(thread).second) return &open.by;
    return nullptr;
}

void Openings::close(const KcclSimOpening& opening, uint32_t slot, uint32_t thread) {
    const auto at = open_.find({opening.memory, opening.index});
    if (at == open_.end() || !at->second.is_by(opening, slot)) return;
    at->second.threads.erase(thread);
    if (at->second.threads.empty()) open_.erase(at);
}

// ---- Windows ------------------------------------------------------------------------------------

uint64_t Memory::window_room(uint64_t address) const {
    for (const Window& window : windows_) {
        const uint64_t offset = address - window.address;
        if (offset < window.num_bytes) return window.num_bytes - offset;
    }
    return 0;
}

// ---- For the table ------------------------------------------------------------------------------

void Machine::report_made(KcclSimFindingKind kind, const KcclSimMade& made, const Made& other) {
    const Fiber& mine = *current_;
    const size_t before = findings.size();
    report(kind, {mine.knowledge.now(), mine.knowledge.call, mine.site, steps}, 0, other.deed);
    if (findings.size() == before) return;
    findings.back().made = made;
    findings.back().other_made = other.what;
}

bool Machine::report_crossed() {
    const auto [one, other] = alike.crossed();
    if (one == nullptr) return false;
    report(kKcclSimCallsDiffer, one->deed, 0, other->deed);
    findings.back().made = one->what;
    findings.back().other_made = other->what;
    return true;
}

namespace {

Made made_at(uint64_t site, const KcclSimMade& what) {
    Fiber& me = running->me();
    me.site = site;
    return {what,
            {me.knowledge.now(), me.knowledge.call, site, running->steps, kKcclSimEnterCall, true}};
}

uint64_t site_of(void* address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

uint64_t window_room(const void* address) {
    return running->memory.window_room(reinterpret_cast<uint64_t>(address));
}

void call_begins(const KcclSimCall* call) {
    Machine& machine = *running;
    const Made mine = made_at(site_of(__builtin_return_address(0)),
                              {call->num_bytes, call->kernel, call->channel, call->dtype, call->op,
                               call->root, call->num_blocks});
    if (call->stream < 0 && !is_reduction(call->stream)) {
        Block& block = *machine.me().block;
        const bool is_local = call->stream == -1 - kKcclReachRank;
        const uint32_t first = is_local ? 0 : call->rank * call->num_blocks;
        block.own_slice = {first + block.index, call->num_callers, call->epoch};
    }
    const Made* const other = machine.alike.compare(*call, mine);
    if (other != nullptr) machine.report_made(kKcclSimCallsDiffer, mine.what, *other);
    machine.leave_if_found();
}

void channel_opens(const KcclSimOpening* opening) {
    Machine& machine = *running;
    const Made mine =
        made_at(site_of(__builtin_return_address(0)),
                {0, kKcclNumKernels, opening->channel, kKcclNumDtypes, kKcclNumOps, -1, 0});
    const Agent me = machine.me().knowledge.agent;
    const Made* const other = machine.openings.open(*opening, me.slot, me.thread, mine);
    if (other != nullptr) machine.report_made(kKcclSimOpenedTwice, mine.what, *other);
    machine.leave_if_found();
}

void channel_closes(const KcclSimOpening* opening) {
    const Agent me = running->me().knowledge.agent;
    running->openings.close(*opening, me.slot, me.thread);
}

}  // namespace kccl::sim
