// The blocks of all ranks, which are pinned threads, and how they wait for each other.
//
// Every block counts its steps in a word of its own, on a cache line of its own, in its rank's
// window. It stores a step's number with release order when other blocks may read what it has
// written up to that step. A block that needs others' results waits, with acquire order, until
// their words have reached the step. Words only grow. All ranks make the same steps, so a number
// means the same point everywhere. Comments beside the buffers say why none is overwritten too
// early.
#pragma once

#include <pthread.h>
#include <sched.h>

#include "api.h"
#include "csrc/include/kccl/wait.cuh"

namespace kccl::engine {

// Pins a thread to a core. cpu = -1: leaves it unpinned.
inline void pin(pthread_t thread, int32_t cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    // If this fails, as it does in a container that has lost the core meanwhile, only speed is
    // lost.
    (void)pthread_setaffinity_np(thread, sizeof(set), &set);
}

class Block {
  public:
    // words: where the blocks' words begin in every rank's window, in bytes.
    Block(const KcclEngineTeam& team, uint32_t index, uint64_t words)
        : team_(team), index_(index), words_(words) {}

    uint32_t index() const { return index_; }
    bool leads() const { return index_ == 0 && team_.comm.rank == 0; }

    // Announces that other blocks may read what this block has written up to this step.
    void publish(uint32_t step) {
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(word(team_.comm.rank, index_), step);
    }
    // Waits until blocks [first, last) of one rank have published a step. Returns false if the wait
    // failed.
    bool await(uint32_t step, int rank, uint32_t first, uint32_t last) {
        for (uint32_t other = first; other < last; ++other) {
            if (!await_one(step, rank, other)) return false;
        }
        return true;
    }
    bool await_rank(uint32_t step) { return await(step, team_.comm.rank, 0, team_.num_blocks); }
    bool await_all(uint32_t step) {
        for (int rank = 0; rank < team_.comm.world_size; ++rank) {
            if (!await(step, rank, 0, team_.num_blocks)) return false;
        }
        return true;
    }

  private:
    uint32_t* word(int rank, uint32_t block) const {
        return reinterpret_cast<uint32_t*>(team_.window[rank] + words_ +
                                           uint64_t{block} * kKcclLineBytes);
    }
    bool await_one(uint32_t step, int rank, uint32_t block) {
        if (rank == team_.comm.rank && block == index_) return true;
        const uint32_t* const at = word(rank, block);
        uint32_t seen = 0;
        const auto poll = [&] {
            seen = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(at);
            return has_reached(seen, step);
        };
        const auto missing = [&] {
            const uint32_t ranks = has_reached(seen, step) ? 0 : 1u << rank;
            return Missing{ranks, seen, static_cast<int32_t>(block)};
        };
        return wait_until(team_.comm, Awaited{kKcclEngineStep, 0, step}, poll, missing);
    }

    const KcclEngineTeam& team_;
    const uint32_t index_;
    const uint64_t words_;
};

// A contiguous part of some things: those from `first` up to, not including, `end`. share_of()
// returns the part that block `index` of `num_blocks` takes of `total` things. The sizes of parts
// differ by at most one.
struct Share {
    uint32_t first;
    uint32_t end;
};

inline Share share_of(uint32_t total, uint32_t index, uint32_t num_blocks) {
    const auto cut = [&](uint32_t i) {
        return static_cast<uint32_t>(uint64_t{total} * i / num_blocks);
    };
    return {cut(index), cut(index + 1)};
}

}  // namespace kccl::engine
