// The host executor: the state of a rank that its threads (blocks) share. engine.cpp has the
// threads, tasks.cpp and generate.cpp what they do in a request.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "answer.h"
#include "batch.h"
#include "pass.h"

struct KcclEngine {
    // A block, which is a thread, with all that it needs to compute.
    struct Thread {
        KcclEngine* engine;
        uint32_t block;
        std::unique_ptr<kccl::engine::Pass> pass;
        pthread_t handle;
    };

    KcclEngine(const KcclEngineModel& the_model, const KcclEngineTeam& the_team)
        : model(the_model),
          team(the_team),
          at(kccl::engine::window_of(model, team.comm.world_size)),
          memory(model, model.first_lane[team.comm.rank + 1] - model.first_lane[team.comm.rank]),
          logits(kccl::engine::zeros(model.vocab_size)),
          answer(model),
          batch(model),
          tokens(kccl::engine::zeros<KcclEngineToken>(model.context)) {}

    int open();
    void work(kccl::engine::Pass& pass);
    void generate(kccl::engine::Pass& pass);
    void score(kccl::engine::Pass& pass);
    void trace(kccl::engine::Pass& pass);
    void stream(kccl::engine::Pass& pass);
    void run_batch(kccl::engine::Pass& pass);
    bool goes_on(kccl::engine::Pass& pass);
    bool prefill(kccl::engine::Pass& pass, uint32_t last_op);
    bool is_cancelled() const;
    void deliver(const KcclEngineToken& token);

    // These functions choose and deliver tokens: see generate.cpp.
    bool choose_tokens(kccl::engine::Pass& pass, uint32_t column, uint32_t position,
                       uint32_t pass_number, kccl::engine::Decision* decision);
    bool lead(kccl::engine::Pass& pass, uint32_t position, uint32_t pass_number,
              kccl::engine::Decision* decision);
    bool choose(uint32_t position, kccl::engine::Chosen* chosen);
    void deliver_chosen(const kccl::engine::Chosen& chosen, uint32_t column, uint32_t pass_number,
                        const kccl::engine::Decision& asked);

    kccl::engine::Decision* decision_there() const {
        return reinterpret_cast<kccl::engine::Decision*>(team.window[0] + at.decision);
    }
    uint32_t* cancel_word() const {
        return reinterpret_cast<uint32_t*>(team.window[0] + at.cancelled);
    }

    const KcclEngineModel model;
    const KcclEngineTeam team;
    const kccl::engine::Window at;
    kccl::engine::RankMemory memory;
    Thread threads[kKcclEngineMaxBlocks] = {};
    uint32_t num_threads = 0;
    // Only block 0 of the rank uses these, for a request that runs alone. `logits` is the input of
    // a choice.
    kccl::engine::Sampler sampler;
    const kccl::engine::Floats logits;
    kccl::engine::Answer answer;
    kccl::engine::Batch batch;

    // This mutex guards all members below.
    mutable std::mutex mutex;
    std::condition_variable changed;
    KcclEngineRequest request = {};
    uint32_t number = 0;   // the number of the last request; the same on all ranks
    uint32_t running = 0;  // how many blocks still work on it
    bool is_closing = false;
    // The request's tokens, at most `context`. Those from index num_taken to num_tokens - 1 have
    // not been taken yet.
    const kccl::engine::Array<KcclEngineToken> tokens;
    uint32_t num_tokens = 0, num_taken = 0;
    uint64_t started_ns = 0, ended_ns = 0;
    uint32_t sink = 0;  // what stream() has read, so that the reads are not optimised away
};
