// The host executor: the threads of a rank, and its C interface.
#include "engine.h"

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "csrc/include/kccl/targets/host_floats.h"

using kccl::engine::Pass;

// ---- Threads ------------------------------------------------------------------------------------

// Allocates the memory of all blocks, and starts their threads. Returns 0, or errno's number of the
// failure.
int KcclEngine::open() {
    if (!memory.is_complete() || !logits || !answer.is_complete() || !batch.is_complete() ||
        !tokens)
        return ENOMEM;
    // All memory is allocated first, because a running thread must not lack any.
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
        kccl::engine::pin(thread.handle, team.cpus[num_threads]);
    }
    return 0;
}

void KcclEngine::work(Pass& pass) {
    uint32_t done = 0;
    for (;;) {
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return is_closing || number != done; });
            // A thread ends only when no request is left for it. A request that runs needs all
            // blocks, even to be cancelled.
            if (number == done) return;
            done = number;
        }
        if (kccl::status_of(team.comm) == kKcclOk) {
            switch (request.task) {
                case kKcclEngineGenerate: generate(pass); break;
                case kKcclEngineScore: score(pass); break;
                case kKcclEngineTrace: trace(pass); break;
                case kKcclEngineBatch: run_batch(pass); break;
                default: stream(pass);
            }
        }
        const std::lock_guard lock(mutex);
        if (--running == 0) {
            ended_ns = kccl_host_clock_ns();
            batch.end();
            changed.notify_all();
        }
    }
}

// ---- The C interface ----------------------------------------------------------------------------

extern "C" {

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
    const kccl::engine::RankMemory& memory = engine->memory;
    const auto heads = static_cast<uint32_t>(memory.num_layers * memory.num_kv);
    memory.copy({request->slot, request->source, request->start}, engine->model.head_dim,
                {0, heads});
    engine->memory.slot = request->slot;
    engine->answer.mask.reset();
    if (request->task == kKcclEngineBatch) engine->batch.begin();
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

void kccl_engine_post_mask(KcclEngine* engine, uint32_t position, const uint32_t* words) {
    engine->answer.mask.post(position, words);
}

void kccl_engine_cancel(KcclEngine* engine) {
    const std::lock_guard lock(engine->mutex);
    kccl::mem::store<kccl::mem::Order::kRelaxed, kccl::mem::Scope::kSystem>(engine->cancel_word(),
                                                                            engine->number);
    engine->batch.wake();
}

int kccl_engine_join(KcclEngine* engine, const KcclEngineRequest* request) {
    return engine->batch.join(*request);
}

int kccl_engine_next_of(KcclEngine* engine, uint32_t member, KcclEngineToken* token,
                        uint64_t limit_ns) {
    return engine->batch.next(member, token, limit_ns);
}

void kccl_engine_post_mask_of(KcclEngine* engine, uint32_t member, uint32_t position,
                              const uint32_t* words) {
    engine->batch.post_mask(member, position, words);
}

void kccl_engine_cancel_of(KcclEngine* engine, uint32_t member) { engine->batch.cancel(member); }

int kccl_engine_leave(KcclEngine* engine, uint32_t member, uint64_t limit_ns) {
    return engine->batch.leave(member, limit_ns);
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

}  // extern "C"
