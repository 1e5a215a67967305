// The host executor: the threads of a rank, and how a request runs on them.
#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "pass.h"
#include "sampler.h"

struct KcclEngine {
    KcclEngine(const KcclEngineModel& the_model, const KcclEngineTeam& the_team)
        : model(the_model),
          team(the_team),
          at(kccl::engine::window_of(model, team.comm.world_size)),
          memory(model, model.first_lane[team.comm.rank + 1] - model.first_lane[team.comm.rank]) {}

    void work(uint32_t block);
    void generate(kccl::engine::Pass& pass);
    void score(kccl::engine::Pass& pass);
    void trace(kccl::engine::Pass& pass);
    void stream(kccl::engine::Pass& pass);
    bool prefill(kccl::engine::Pass& pass, uint32_t last_op);
    bool next_token(kccl::engine::Pass& pass, uint32_t column, uint32_t position, uint32_t count,
                    std::vector<int32_t>& history, kccl::engine::Chosen* chosen);
    void deliver(const kccl::engine::Chosen& chosen);

    const kccl::engine::Chosen* chosen_there() const {
        return reinterpret_cast<const kccl::engine::Chosen*>(team.window[0] + at.chosen);
    }
    uint32_t* cancel_word() const {
        return reinterpret_cast<uint32_t*>(team.window[0] + at.cancelled);
    }

    const KcclEngineModel model;
    const KcclEngineTeam team;
    const kccl::engine::Window at;
    const kccl::engine::RankMemory memory;
    std::vector<std::thread> threads;
    kccl::engine::Sampler sampler;
    std::vector<float> logits;

    // Guards what follows.
    mutable std::mutex mutex;
    std::condition_variable changed;
    KcclEngineRequest request = {};
    uint32_t number = 0;   // of the request; the same on all ranks
    uint32_t running = 0;  // blocks that work on it
    bool is_closing = false;
    std::deque<KcclEngineToken> tokens;
    uint64_t started_ns = 0, ended_ns = 0;
    uint32_t sink = 0;  // keeps what stream() read
};

namespace {

using kccl::engine::Chosen;
using kccl::engine::kColumns;
using kccl::engine::Pass;

const int32_t* ids_of(const KcclEngineRequest& request) {
    return reinterpret_cast<const int32_t*>(request.ids);
}

void pin(std::thread& thread, int32_t cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    // Only speed is lost without it, as in a container that took the core away meanwhile.
    (void)pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}

bool is_stop_id(const KcclEngineRequest& request, int32_t id) {
    const auto* ids = reinterpret_cast<const int32_t*>(request.stop_ids);
    return std::find(ids, ids + request.num_stop_ids, id) != ids + request.num_stop_ids;
}

}  // namespace

// ---- Threads ------------------------------------------------------------------------------------

void KcclEngine::work(uint32_t block) {
    Pass pass(model, team, at, memory, block);
    uint32_t done = 0;
    for (;;) {
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return is_closing || number != done; });
            if (is_closing) return;
            done = number;
        }
        if (kccl::status_of(team.comm) == kKcclOk) {
            switch (request.task) {
                case kKcclEngineGenerate: generate(pass); break;
                case kKcclEngineScore: score(pass); break;
                case kKcclEngineTrace: trace(pass); break;
                default: stream(pass);
            }
        }
        const std::lock_guard lock(mutex);
        if (--running == 0) {
            ended_ns = kccl_host_clock_ns();
            changed.notify_all();
        }
    }
}

// ---- Tasks: every block runs them, and makes the same steps -------------------------------------

// Runs the ids that the cache does not have through the ops up to last_op.
bool KcclEngine::prefill(Pass& pass, uint32_t last_op) {
    const uint32_t num = request.num_ids;
    for (uint32_t first = request.start; first < num; first += kColumns) {
        if (!pass.run(ids_of(request) + first, std::min(num - first, kColumns), first, last_op)) {
            return false;
        }
        // Before the messages of the next pass come.
        if (!pass.meet()) return false;
    }
    return true;
}

void KcclEngine::generate(Pass& pass) {
    const uint32_t last_op = model.num_ops - 3;
    if (!prefill(pass, last_op)) return;
    uint32_t column = (request.num_ids - request.start - 1) % kColumns;
    uint32_t position = request.num_ids;
    std::vector<int32_t> history(ids_of(request), ids_of(request) + request.num_ids);
    Chosen chosen = {};
    for (uint32_t count = 1;; ++count, ++position) {
        if (!next_token(pass, column, position, count, history, &chosen)) return;
        if (pass.block().index() == 0) deliver(chosen);
        if (chosen.end != kKcclEngineGoesOn) return;
        if (!pass.run(&chosen.id, 1, position, last_op)) return;
        column = 0;
    }
}

// The token for `position`, the count-th of the request, from the logits of a column.
bool KcclEngine::next_token(Pass& pass, uint32_t column, uint32_t position, uint32_t count,
                            std::vector<int32_t>& history, Chosen* chosen) {
    if (!pass.make_logits(column, 1)) return false;
    if (!pass.block().leads()) {
        const uint32_t step = pass.publish();
        if (!pass.block().await(step, 0, 0, 1)) return false;
        *chosen = *chosen_there();
        return true;
    }
    pass.read_logits(0, logits.data());
    *chosen = {-1, kKcclEngineGoesOn, std::numeric_limits<double>::quiet_NaN()};
    const uint32_t cancelled =
        kccl::mem::load<kccl::mem::Order::kRelaxed, kccl::mem::Scope::kSystem>(cancel_word());
    if (cancelled == number) {
        chosen->end = kKcclEngineCancelled;
    } else {
        chosen->id = sampler.choose(logits.data(), model.vocab_size, request, position, history,
                                    &chosen->logprob);
        chosen->end = chosen->id < 0                    ? kKcclEngineBadLogits
                      : is_stop_id(request, chosen->id) ? kKcclEngineStopId
                      : count == request.max_tokens     ? kKcclEngineMaxTokens
                      : position + 1 == model.context   ? kKcclEngineContextFull
                                                        : kKcclEngineGoesOn;
        history.push_back(chosen->id);
    }
    *reinterpret_cast<Chosen*>(team.window[0] + at.chosen) = *chosen;
    pass.publish();
    return true;
}

void KcclEngine::deliver(const Chosen& chosen) {
    const std::lock_guard lock(mutex);
    tokens.push_back({chosen.id, chosen.end, chosen.logprob, kccl_host_clock_ns()});
    changed.notify_all();
}

void KcclEngine::score(Pass& pass) {
    auto* out = reinterpret_cast<float*>(request.out);
    for (uint32_t first = 0; first < request.num_ids; first += kColumns) {
        const uint32_t num = std::min(request.num_ids - first, kColumns);
        if (!pass.run(ids_of(request) + first, num, first, model.num_ops - 3)) {
            return;
        }
        for (uint32_t c = 0; c < num; c += kKcclEngineLogitColumns) {
            const uint32_t some = std::min(num - c, uint32_t{kKcclEngineLogitColumns});
            if (!pass.make_logits(c, some)) return;
            for (uint32_t i = pass.block().index(); i < some; i += team.num_blocks) {
                pass.read_logits(i, out + uint64_t{first + c + i} * model.vocab_size);
            }
            // Before the next logits overwrite these.
            if (!pass.meet()) return;
        }
    }
}

void KcclEngine::trace(Pass& pass) {
    const auto* ops = reinterpret_cast<const KcclEngineOp*>(model.ops);
    const KcclEngineOp& op = ops[request.stop_op];
    const uint32_t last_op = std::min(request.stop_op, model.num_ops - 3);
    const bool is_logits = op.kind == kKcclEngineHead, is_final = op.kind == kKcclEngineFinal;
    const bool is_of_lanes =
        op.kind == kKcclEngineQkv || op.kind == kKcclEngineAttend || op.kind == kKcclEngineGateUp;
    const bool is_one =
        !is_of_lanes && (model.num_residuals == 1 || (is_final && model.num_head_groups == 1));
    const uint32_t values = is_logits ? model.vocab_size
                            : op.kind == kKcclEngineQkv
                                ? (model.heads + 2 * model.kv_heads) * model.head_dim
                            : op.kind == kKcclEngineAttend ? model.heads * model.head_dim
                            : op.kind == kKcclEngineGateUp ? model.ffn
                                                           : model.hidden;
    const uint32_t mine = is_one ? 1 : pass.num_lanes();
    const uint32_t first_lane = is_one ? 0 : model.first_lane[team.comm.rank];
    auto* out = reinterpret_cast<float*>(request.out);
    for (uint32_t first = 0; first < request.num_ids; first += kColumns) {
        const uint32_t num = std::min(request.num_ids - first, kColumns);
        if (!pass.run(ids_of(request) + first, num, first, last_op)) return;
        for (uint32_t c = 0; c < num; ++c) {
            if ((is_logits || is_final) && !pass.make_logits(c, 1)) return;
            if (pass.block().index() == 0 && is_logits) {
                pass.read_logits(0, out + uint64_t{first + c} * values);
            }
            for (uint32_t i = 0; pass.block().index() == 0 && !is_logits && i < mine; ++i) {
                const uint64_t row = uint64_t{first_lane + i} * request.num_ids + first + c;
                pass.read(op, i, is_final ? 0 : c, out + row * values);
            }
            if ((is_logits || is_final) && !pass.meet()) return;
        }
        if (!pass.meet()) return;
    }
}

void KcclEngine::stream(Pass& pass) {
    uint32_t seen = 0;
    for (uint32_t turn = 0; turn < request.max_tokens; ++turn) {
        seen ^= pass.stream();
        if (!pass.meet()) return;
    }
    const std::lock_guard lock(mutex);
    sink ^= seen;
}

// ---- The C interface ----------------------------------------------------------------------------

extern "C" {

uint64_t kccl_engine_window_bytes(const KcclEngineModel* model, int world_size) {
    return kccl::engine::window_of(*model, world_size).bytes;
}

KcclEngine* kccl_engine_open(const KcclEngineModel* model, const KcclEngineTeam* team) {
    auto* engine = new (std::nothrow) KcclEngine(*model, *team);
    if (engine == nullptr || !engine->memory.is_complete()) {
        delete engine;
        errno = ENOMEM;
        return nullptr;
    }
    engine->logits.resize(model->vocab_size);
    for (uint32_t block = 0; block < team->num_blocks; ++block) {
        engine->threads.emplace_back([engine, block] { engine->work(block); });
        pin(engine->threads.back(), team->cpus[block]);
    }
    return engine;
}

void kccl_engine_start(KcclEngine* engine, const KcclEngineRequest* request) {
    const std::lock_guard lock(engine->mutex);
    engine->request = *request;
    engine->tokens.clear();
    engine->running = engine->team.num_blocks;
    engine->started_ns = kccl_host_clock_ns();
    ++engine->number;
    engine->changed.notify_all();
}

int kccl_engine_next(KcclEngine* engine, KcclEngineToken* token, uint64_t limit_ns) {
    std::unique_lock lock(engine->mutex);
    const auto is_there = [engine] { return !engine->tokens.empty() || engine->running == 0; };
    engine->changed.wait_for(lock, std::chrono::nanoseconds(limit_ns), is_there);
    if (engine->tokens.empty()) return engine->running == 0 ? -1 : 0;
    *token = engine->tokens.front();
    engine->tokens.pop_front();
    return 1;
}

void kccl_engine_cancel(KcclEngine* engine) {
    const std::lock_guard lock(engine->mutex);
    kccl::mem::store<kccl::mem::Order::kRelaxed, kccl::mem::Scope::kSystem>(engine->cancel_word(),
                                                                            engine->number);
}

uint32_t kccl_engine_status(const KcclEngine* engine, double* seconds) {
    const std::lock_guard lock(engine->mutex);
    *seconds = static_cast<double>(engine->ended_ns - engine->started_ns) * 1e-9;
    return kccl::status_of(engine->team.comm);
}

void kccl_engine_close(KcclEngine* engine) {
    {
        const std::lock_guard lock(engine->mutex);
        engine->is_closing = true;
        engine->changed.notify_all();
    }
    for (std::thread& thread : engine->threads) thread.join();
    delete engine;
}

int32_t kccl_engine_sample(const float* logits, uint32_t vocab_size,
                           const KcclEngineRequest* request, uint32_t position,
                           const int32_t* history, uint32_t num_history, double* logprob) {
    kccl::engine::Sampler sampler;
    const std::vector<int32_t> ids(history, history + num_history);
    return sampler.choose(logits, vocab_size, *request, position, ids, logprob);
}

}  // extern "C"
