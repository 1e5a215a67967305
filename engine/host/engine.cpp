// The host executor: the threads of a rank, and how a request runs on them.
#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <new>

#include "csrc/include/kccl/targets/host_floats.h"
#include "pass.h"
#include "sampler.h"

struct KcclEngine {
    // A block, and what it computes with.
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
          history(kccl::engine::zeros<int32_t>(model.context)),
          tokens(kccl::engine::zeros<KcclEngineToken>(model.context)) {}

    int open();
    void work(kccl::engine::Pass& pass);
    void generate(kccl::engine::Pass& pass);
    void score(kccl::engine::Pass& pass);
    void trace(kccl::engine::Pass& pass);
    void stream(kccl::engine::Pass& pass);
    bool goes_on(kccl::engine::Pass& pass);
    bool prefill(kccl::engine::Pass& pass, uint32_t last_op);
    bool next_token(kccl::engine::Pass& pass, uint32_t column, uint32_t position, uint32_t count,
                    kccl::engine::Chosen* chosen);
    bool is_cancelled() const;
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
    Thread threads[kKcclEngineMaxBlocks] = {};
    uint32_t num_threads = 0;
    // The leading block's: what it chooses from, and all ids so far.
    kccl::engine::Sampler sampler;
    const kccl::engine::Floats logits;
    const kccl::engine::Array<int32_t> history;

    // Guards what follows.
    mutable std::mutex mutex;
    std::condition_variable changed;
    KcclEngineRequest request = {};
    uint32_t number = 0;   // of the request; the same on all ranks
    uint32_t running = 0;  // blocks that work on it
    bool is_closing = false;
    // The request's tokens, at most `context`. Those from index num_taken to num_tokens - 1 have
    // not been taken yet.
    const kccl::engine::Array<KcclEngineToken> tokens;
    uint32_t num_tokens = 0, num_taken = 0;
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

void pin(pthread_t thread, int32_t cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    // Only speed is lost without it, as in a container that took the core away meanwhile.
    (void)pthread_setaffinity_np(thread, sizeof(set), &set);
}

bool is_stop_id(const KcclEngineRequest& request, int32_t id) {
    const auto* ids = reinterpret_cast<const int32_t*>(request.stop_ids);
    return std::find(ids, ids + request.num_stop_ids, id) != ids + request.num_stop_ids;
}

}  // namespace

// ---- Threads ------------------------------------------------------------------------------------

// Starts the threads. Returns 0, or errno's number of why it cannot.
int KcclEngine::open() {
    if (!memory.is_complete() || !logits || !history || !tokens) return ENOMEM;
    // All memory first: a thread that runs must not lack any.
    for (uint32_t block = 0; block < team.num_blocks; ++block) {
        Thread& thread = threads[block];
        thread.engine = this;
        thread.block = block;
        thread.pass.reset(new (std::nothrow) Pass(model, team, at, memory, block));
        if (!thread.pass || !thread.pass->is_complete()) return ENOMEM;
    }
    const auto main = [](void* argument) -> void* {
        const kccl::host::DefaultFloats floats;
        const auto* thread = static_cast<const Thread*>(argument);
        thread->engine->work(*thread->pass);
        return nullptr;
    };
    for (; num_threads < team.num_blocks; ++num_threads) {
        Thread& thread = threads[num_threads];
        const int error = pthread_create(&thread.handle, nullptr, main, &thread);
        if (error != 0) return error;
        pin(thread.handle, team.cpus[num_threads]);
    }
    return 0;
}

void KcclEngine::work(Pass& pass) {
    uint32_t done = 0;
    for (;;) {
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return is_closing || number != done; });
            // A request that runs needs all blocks, even to be cancelled.
            if (number == done) return;
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

bool KcclEngine::is_cancelled() const {
    return kccl::mem::load<kccl::mem::Order::kRelaxed, kccl::mem::Scope::kSystem>(cancel_word()) ==
           number;
}

// All blocks wait for each other and do the same: go on, or end because the request was cancelled
// or a wait failed.
bool KcclEngine::goes_on(Pass& pass) {
    bool ends = pass.block().leads() && is_cancelled();
    if (!pass.meet(&ends)) return false;
    if (ends && pass.block().index() == 0) {
        deliver({-1, kKcclEngineCancelled, std::numeric_limits<double>::quiet_NaN()});
    }
    return !ends;
}

// Runs the ids that the cache does not have. Only the last run goes on to last_op: of the others
// nothing is read behind the keys and values of the last layer.
bool KcclEngine::prefill(Pass& pass, uint32_t last_op) {
    const auto* ops = reinterpret_cast<const KcclEngineOp*>(model.ops);
    uint32_t last_keys = last_op;
    while (last_keys > 0 && ops[last_keys].kind != kKcclEngineQkv) --last_keys;
    const uint32_t num = request.num_ids;
    for (uint32_t first = request.start; first < num; first += kColumns) {
        const uint32_t some = std::min(num - first, kColumns);
        const uint32_t end = first + some == num ? last_op : last_keys;
        if (!pass.run(ids_of(request) + first, some, first, end)) return false;
        // Before the messages of the next pass come.
        if (!goes_on(pass)) return false;
    }
    return true;
}

void KcclEngine::generate(Pass& pass) {
    const uint32_t last_op = model.num_ops - 3;
    if (!prefill(pass, last_op)) return;
    uint32_t column = (request.num_ids - request.start - 1) % kColumns;
    uint32_t position = request.num_ids;
    if (pass.block().leads()) std::copy_n(ids_of(request), request.num_ids, history.get());
    Chosen chosen = {};
    for (uint32_t count = 1;; ++count, ++position) {
        if (!next_token(pass, column, position, count, &chosen)) return;
        if (pass.block().index() == 0) deliver(chosen);
        if (chosen.end != kKcclEngineGoesOn) return;
        if (!pass.run(&chosen.id, 1, position, last_op)) return;
        column = 0;
    }
}

// The token for `position`, the count-th of the request, from the logits of a column.
bool KcclEngine::next_token(Pass& pass, uint32_t column, uint32_t position, uint32_t count,
                            Chosen* chosen) {
    if (!pass.make_logits(column, 1)) return false;
    if (!pass.block().leads()) {
        const uint32_t step = pass.publish();
        if (!pass.block().await(step, 0, 0, 1)) return false;
        *chosen = *chosen_there();
        return true;
    }
    pass.read_logits(0, logits.get());
    *chosen = {-1, kKcclEngineGoesOn, std::numeric_limits<double>::quiet_NaN()};
    if (is_cancelled()) {
        chosen->end = kKcclEngineCancelled;
    } else {
        chosen->id = sampler.choose(logits.get(), model.vocab_size, request, position,
                                    history.get(), position, &chosen->logprob);
        chosen->end = chosen->id < 0                    ? kKcclEngineBadLogits
                      : is_stop_id(request, chosen->id) ? kKcclEngineStopId
                      : count == request.max_tokens     ? kKcclEngineMaxTokens
                      : position + 1 == model.context   ? kKcclEngineContextFull
                                                        : kKcclEngineGoesOn;
        history[position] = chosen->id;
    }
    *reinterpret_cast<Chosen*>(team.window[0] + at.chosen) = *chosen;
    pass.publish();
    return true;
}

void KcclEngine::deliver(const Chosen& chosen) {
    const std::lock_guard lock(mutex);
    tokens[num_tokens++] = {chosen.id, chosen.end, chosen.logprob, kccl_host_clock_ns()};
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
            for (uint32_t i = pass.block().index(); request.writes_shared != 0 && i < some;
                 i += team.num_blocks) {
                pass.read_logits(i, out + uint64_t{first + c + i} * model.vocab_size);
            }
            // Before the next logits overwrite these.
            if (!goes_on(pass)) return;
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
    const bool writes =
        pass.block().index() == 0 && (request.writes_shared != 0 || !(is_logits || is_one));
    const uint32_t mine = is_one ? 1 : pass.num_lanes();
    const uint32_t first_lane = is_one ? 0 : model.first_lane[team.comm.rank];
    auto* out = reinterpret_cast<float*>(request.out);
    for (uint32_t first = 0; first < request.num_ids; first += kColumns) {
        const uint32_t num = std::min(request.num_ids - first, kColumns);
        if (!pass.run(ids_of(request) + first, num, first, last_op)) return;
        for (uint32_t c = 0; c < num; ++c) {
            if ((is_logits || is_final) && !pass.make_logits(c, 1)) return;
            if (writes && is_logits) pass.read_logits(0, out + uint64_t{first + c} * values);
            for (uint32_t i = 0; writes && !is_logits && i < mine; ++i) {
                const uint64_t row = uint64_t{first_lane + i} * request.num_ids + first + c;
                pass.read(op, i, is_final ? 0 : c, out + row * values);
            }
            if ((is_logits || is_final) && !pass.meet()) return;
        }
        if (!goes_on(pass)) return;
    }
}

void KcclEngine::stream(Pass& pass) {
    uint32_t seen = 0;
    for (uint32_t turn = 0; turn < request.max_tokens; ++turn) {
        seen ^= pass.stream();
        if (!goes_on(pass)) break;
    }
    const std::lock_guard lock(mutex);
    sink ^= seen;
}

// ---- The C interface ----------------------------------------------------------------------------

extern "C" {

void kccl_engine_matrix(const KcclEngineModel* model, uint32_t kind, uint32_t* num_panels,
                        uint32_t* num_columns) {
    const kccl::engine::Matrix matrix = kccl::engine::matrix_of(*model, kind);
    *num_panels = matrix.panels_per_lane;
    *num_columns = matrix.num_columns;
}

uint64_t kccl_engine_window_bytes(const KcclEngineModel* model, int world_size) {
    return kccl::engine::window_of(*model, world_size).bytes;
}

KcclEngine* kccl_engine_open(const KcclEngineModel* model, const KcclEngineTeam* team) {
    auto* engine = new (std::nothrow) KcclEngine(*model, *team);
    const int error = engine == nullptr ? ENOMEM : engine->open();
    if (error == 0) return engine;
    if (engine != nullptr) kccl_engine_close(engine);
    errno = error;
    return nullptr;
}

int kccl_engine_start(KcclEngine* engine, const KcclEngineRequest* request) {
    const std::lock_guard lock(engine->mutex);
    if (engine->running != 0) return EBUSY;
    engine->request = *request;
    engine->num_tokens = engine->num_taken = 0;
    engine->running = engine->team.num_blocks;
    engine->started_ns = kccl_host_clock_ns();
    ++engine->number;
    engine->changed.notify_all();
    return 0;
}

int kccl_engine_next(KcclEngine* engine, KcclEngineToken* token, uint64_t limit_ns) {
    std::unique_lock lock(engine->mutex);
    const auto is_token = [engine] { return engine->num_taken < engine->num_tokens; };
    const auto is_there = [&] { return is_token() || engine->running == 0; };
    engine->changed.wait_for(lock, std::chrono::nanoseconds(limit_ns), is_there);
    if (!is_token()) return engine->running == 0 ? -1 : 0;
    *token = engine->tokens[engine->num_taken++];
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
    kccl_engine_cancel(engine);
    {
        const std::lock_guard lock(engine->mutex);
        engine->is_closing = true;
        engine->changed.notify_all();
    }
    for (uint32_t i = 0; i < engine->num_threads; ++i) {
        (void)pthread_join(engine->threads[i].handle, nullptr);
    }
    delete engine;
}

int32_t kccl_engine_sample(const float* logits, uint32_t vocab_size,
                           const KcclEngineRequest* request, uint32_t position,
                           const int32_t* history, uint32_t num_history, double* logprob) {
    kccl::engine::Sampler sampler;
    return sampler.choose(logits, vocab_size, *request, position, history, num_history, logprob);
}

}  // extern "C"
