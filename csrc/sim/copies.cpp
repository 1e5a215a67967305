// Simulates asynchronous copies (cp.async.bulk) and the barriers on which they complete. Copies
// complete late, in pieces, and in any order.
#include "copies.h"

#include <string.h>

#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

// The most pieces in which a copy completes.
constexpr uint32_t kPieces = 4;
constexpr uint32_t kUnit = 16;  // the length of a copy is a multiple of this, in bytes

constexpr const char* kNotInitialised = "a CopyBarrier that nobody has initialised";
constexpr const char* kTooManyArrivals =
    "a CopyBarrier that gets more arrivals in a phase than it was initialised for: of a ring, does "
    "more than one warp push, or do more warps consume than init_ring() was told?";
constexpr const char* kOddCopy = "a copy whose length is no multiple of 16";

}  // namespace

void Machine::report_barrier(const char* what) {
    report_here(kKcclSimInvalidAccess);
    findings.back().text = what;
}

void Machine::barrier_init(uint64_t barrier, uint32_t arrivals) {
    Fiber& mine = *current_;
    std::map<uint64_t, CopyPhase>& barriers = mine.block->copies.barriers;
    const auto known = barriers.find(barrier);
    CopyPhase phase;
    phase.index =
        known == barriers.end() ? static_cast<uint32_t>(barriers.size()) : known->second.index;
    phase.arrivals = phase.missing = arrivals;
    barriers[barrier] = std::move(phase);
    // The initialisation counts as a plain write of the barrier's word, and each use as a plain
    // read. So a use that is not ordered after the initialisation is found as a data race.
    memory.plain(mine.knowledge, barrier, 8, true, mine.site);
}

void Machine::barrier_arrive(uint64_t barrier, uint32_t num_bytes) {
    Fiber& mine = *current_;
    Copies& copies = mine.block->copies;
    memory.plain(mine.knowledge, barrier, 8, false, mine.site);
    const auto known = copies.barriers.find(barrier);
    if (known == copies.barriers.end()) return report_barrier(kNotInitialised);
    if (known->second.missing == 0) return report_barrier(kTooManyArrivals);
    CopyPhase& phase = known->second;
    --phase.missing;
    phase.missing_bytes += num_bytes;
    mine.knowledge.settle_hearsay();
    join(phase.ordered, mine.knowledge.snapshot());
    join(phase.fenced, mine.fenced);
    join(phase.caused, mine.knowledge.caused);
    edit(phase.caused).add(mine.knowledge.now());
    ++mine.knowledge.counter;
    end_phase(*mine.block, barrier);
}

// Ends the barrier's phase if no arrival and no bytes are missing any more, and begins the next
// one.
void Machine::end_phase(Block& block, uint64_t barrier) {
    CopyPhase& phase = block.copies.barriers[barrier];
    if (phase.missing != 0 || phase.missing_bytes != 0) return;
    ++phase.phase;
    phase.missing = phase.arrivals;
    phase.ended_ordered = JoinedOften(phase.ordered);
    phase.ended_fenced = JoinedOften(phase.fenced);
    phase.ended_caused = JoinedOften(phase.caused);
    wake(memory.granule(block.fibers[0]->knowledge, barrier));
}

bool Machine::barrier_has_completed(uint64_t barrier, uint32_t parity) {
    Fiber& mine = *current_;
    memory.plain(mine.knowledge, barrier, 8, false, mine.site);
    const auto known = mine.block->copies.barriers.find(barrier);
    if (known == mine.block->copies.barriers.end()) {
        report_barrier(kNotInitialised);
        return false;
    }
    CopyPhase& phase = known->second;
    Granule& granule = memory.granule(mine.knowledge, barrier);
    look(granule);
    if ((phase.phase & 1) == (parity & 1)) return false;
    if (phase.phase == 0) return true;  // the phase before the first one counts as ended; nothing
                                        // came in it
    phase.ended_ordered.join_to(mine.knowledge.ordered);
    phase.ended_caused.join_to(mine.knowledge.caused);
    phase.ended_fenced.join_to(mine.fenced);
    return true;
}

void Machine::copy_async(uint64_t to, uint64_t from, uint32_t num_bytes, uint64_t barrier) {
    Fiber& mine = *current_;
    if (num_bytes == 0 || num_bytes % kUnit != 0) return report_barrier(kOddCopy);
    Copies& copies = mine.block->copies;
    const uint32_t units = num_bytes / kUnit;
    const uint32_t per_piece = (units + kPieces - 1) / kPieces * kUnit;
    for (uint32_t offset = 0; offset < num_bytes; offset += per_piece) {
        copies.pieces.push_back({.to = to + offset,
                                 .from = from + offset,
                                 .num_bytes = std::min(per_piece, num_bytes - offset),
                                 .barrier = barrier,
                                 .number = copies.next_number,
                                 .ordered = mine.knowledge.snapshot(),
                                 .fenced = mine.fenced,
                                 .issuer = mine.knowledge.now(),
                                 .call = mine.knowledge.call,
                                 .launch = mine.knowledge.launch,
                                 .site = mine.site});
    }
    ++copies.next_number;
    ++mine.knowledge.counter;
    trace(kKcclSimCopyStarts, to, num_bytes);
    if (copies.is_listed) return;
    copies.is_listed = true;
    copying_.push_back(mine.block);
}

// Makes one piece of an asynchronous copy, chosen at random, and counts its bytes at the barrier.
// Returns false if no copy is under way.
bool Machine::complete_copy() {
    if (copying_.empty()) return false;
    const uint32_t chosen = random_.below(static_cast<uint32_t>(copying_.size()));
    Block& block = *copying_[chosen];
    Copies& copies = block.copies;
    const uint32_t index = random_.below(static_cast<uint32_t>(copies.pieces.size()));
    const Piece piece = copies.pieces[index];
    copies.pieces.erase(copies.pieces.begin() + index);
    const bool is_late = std::any_of(copies.ended.begin(), copies.ended.end(),
                                     [&piece](uint64_t number) { return number > piece.number; });
    if (is_late) ++late_copies;
    copies.ended.push_back(piece.number);
    if (copies.ended.size() > 8) copies.ended.erase(copies.ended.begin());
    if (copies.pieces.empty()) {
        copies.is_listed = false;
        copying_.erase(copying_.begin() + chosen);
    }
    const auto known = copies.barriers.find(piece.barrier);
    const bool is_known = known != copies.barriers.end();
    Knowledge copier;
    copier.agent = {block.slot + 1, is_known ? known->second.index : 0};
    copier.counter = copies.next_counter++;
    copier.call = piece.call;
    copier.launch = piece.launch;
    copier.ordered = piece.ordered;
    // A copy is made through the asynchronous proxy (PTX), which sees an ordinary write only after
    // fence_copies(). That holds for the barrier's initialisation too.
    memory.async(copier, piece.fenced, piece.barrier, 8, false, piece.site);
    memory.async(copier, piece.fenced, piece.from, piece.num_bytes, false, piece.site);
    memory.async(copier, piece.fenced, piece.to, piece.num_bytes, true, piece.site);
    memcpy(reinterpret_cast<void*>(piece.to), reinterpret_cast<const void*>(piece.from),
           piece.num_bytes);
    const Deed deed = {piece.issuer, piece.call, piece.site, steps, kKcclSimCopyEnds, true};
    trace(deed, piece.to, piece.num_bytes);
    if (!is_known) {
        report(kKcclSimInvalidAccess, deed, piece.barrier, {});
        findings.back().text = kNotInitialised;
        return true;
    }
    CopyPhase& phase = known->second;
    phase.missing_bytes -= piece.num_bytes;
    edit(phase.ordered).add(copier.now());
    edit(phase.caused).add(copier.now());
    note_change();
    end_phase(block, piece.barrier);
    return true;
}

}  // namespace kccl::sim
