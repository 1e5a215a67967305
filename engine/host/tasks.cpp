// What the threads (blocks) do in a request: every block runs the request's task, and takes the
// same steps as all others.
#include <algorithm>

#include "engine.h"

using kccl::engine::kColumns;
using kccl::engine::Pass;

namespace {

const int32_t* ids_of(const KcclEngineRequest& request) {
    return reinterpret_cast<const int32_t*>(request.ids);
}

}  // namespace

bool KcclEngine::is_cancelled() const {
    return kccl::mem::load<kccl::mem::Order::kRelaxed, kccl::mem::Scope::kSystem>(cancel_word()) ==
           number;
}

// Makes all blocks of all ranks wait for each other and take the same decision. Returns true if the
// request goes on. Returns false if it was cancelled, which block 0 reports to the caller, or if a
// wait failed.
bool KcclEngine::goes_on(Pass& pass) {
    bool ends = pass.block().leads() && is_cancelled();
    if (!pass.meet(&ends)) return false;
    if (ends && pass.block().index() == 0) deliver(kccl::engine::cancelled_token());
    return !ends;
}

// Runs the ids that the KV cache does not have, kColumns at a time. Only the last run goes on to
// last_op, because nothing reads what other runs would compute behind the keys and values of the
// last layer. Returns false if the request does not go on.
bool KcclEngine::prefill(Pass& pass, uint32_t last_op) {
    const auto* ops = reinterpret_cast<const KcclEngineOp*>(model.ops);
    uint32_t last_keys = last_op;
    while (last_keys > 0 && ops[last_keys].kind != kKcclEngineQkv) --last_keys;
    const uint32_t num = request.num_ids;
    for (uint32_t first = request.start; first < num; first += kColumns) {
        const uint32_t some = std::min(num - first, kColumns);
        const uint32_t end = first + some == num ? last_op : last_keys;
        if (!pass.run(ids_of(request) + first, some, first, end)) return false;
        // All blocks wait here, so that the next pass does not overwrite messages that another
        // block still reads (num_slots() in layout.h).
        if (!goes_on(pass)) return false;
    }
    return true;
}

void KcclEngine::score(Pass& pass) {
    auto* out = reinterpret_cast<float*>(request.out);
    for (uint32_t first = request.start; first < request.num_ids; first += kColumns) {
        const uint32_t num = std::min(request.num_ids - first, kColumns);
        if (!pass.run(ids_of(request) + first, num, first, model.num_ops - 3)) {
            return;
        }
        const uint32_t row = first - request.start;
        for (uint32_t c = 0; c < num; c += kKcclEngineLogitColumns) {
            const uint32_t some = std::min(num - c, uint32_t{kKcclEngineLogitColumns});
            if (!pass.make_logits(c, some)) return;
            for (uint32_t i = pass.block().index(); request.writes_shared != 0 && i < some;
                 i += team.num_blocks) {
                pass.read_logits(i, out + uint64_t{row + c + i} * model.vocab_size);
            }
            // All blocks wait here before the next logits overwrite these.
            if (!goes_on(pass)) return;
        }
    }
}

void KcclEngine::trace(Pass& pass) {
    const auto* ops = reinterpret_cast<const KcclEngineOp*>(model.ops);
    const KcclEngineOp& op = ops[request.stop_op];
    const uint32_t last_op = std::min(request.stop_op, model.num_ops - 3);
    const bool is_logits = op.kind == kKcclEngineHead, is_final = op.kind == kKcclEngineFinal;
    const bool is_one = op.num_vectors == 1;
    const bool writes = pass.block().index() == 0 && (request.writes_shared != 0 || !is_one);
    const uint32_t mine = is_one ? 1 : pass.num_lanes();
    const uint32_t first_lane = is_one ? 0 : model.first_lane[team.comm.rank];
    auto* out = reinterpret_cast<float*>(request.out);
    for (uint32_t first = 0; first < request.num_ids; first += kColumns) {
        const uint32_t num = std::min(request.num_ids - first, kColumns);
        if (!pass.run(ids_of(request) + first, num, first, last_op)) return;
        for (uint32_t c = 0; c < num; ++c) {
            if ((is_logits || is_final) && !pass.make_logits(c, 1)) return;
            if (writes && is_logits) pass.read_logits(0, out + uint64_t{first + c} * op.width);
            for (uint32_t i = 0; writes && !is_logits && i < mine; ++i) {
                const uint64_t row = uint64_t{first_lane + i} * request.num_ids + first + c;
                pass.read(op, i, is_final ? 0 : c, out + row * op.width);
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
