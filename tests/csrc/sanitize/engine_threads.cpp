// The engine's blocks and ranks as threads of one process, under a sanitizer, without Python: a
// small model with delayed messages, and a mixture of experts; prefill, decoding, drafts, batches,
// scores, cancelling. Every number of ranks and blocks must give the same tokens and logits. Exits
// with 1 if one does not.
//
// The weights are one block of random numbers, read as they come: only races and bits matter here.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
#include "csrc/include/kccl/device_comm.h"
#include "engine/host/api.h"
#include "engine/host/compute.h"
#include "engine/host/products.h"

// core.cpp has the real one, and every kernel of the library.
extern "C" const char* kccl_host_instruction_set(void) { return "baseline"; }

namespace kccl::engine {
// Why: compute.cpp asks for the functions of this CPU, and one set under a sanitizer is enough.
extern const Compute kComputeBaseline;
#if defined(__x86_64__)
extern const Compute kComputeV3 = kComputeBaseline;
extern const Compute kComputeV4 = kComputeBaseline;
extern const Compute kComputeVnni = kComputeBaseline;
#endif
}  // namespace kccl::engine

namespace {

constexpr uint32_t kLanes = 4, kLayers = 4, kHidden = 40, kHeadDim = 6, kHeads = 2, kFfn = 24;
constexpr uint32_t kVocab = 50, kContext = 96;
constexpr uint32_t kExperts = 5, kChosen = 2;
constexpr uint32_t kTogether = 3;  // requests of a batch
constexpr uint64_t kPage = 4096;

// What draft() proposes: the answer to a prompt of kPrompt ids.
constexpr uint32_t kPrompt = 36;
std::vector<int32_t> drafted;

uint32_t draft(void*, const int32_t*, uint32_t num_ids, uint32_t most, int32_t* drafts) {
    const uint32_t at = num_ids - kPrompt;
    const uint32_t num = std::min(most, static_cast<uint32_t>(drafted.size()) - at);
    std::copy_n(drafted.data() + at, num, drafts);
    return num;
}

struct Rank {
    KcclState state = {};
    KcclChannelState channels[1] = {};
    KcclHostContext context = {};
    KcclDeviceComm comm = {};
    std::vector<KcclEngineOp> ops;
    // For each op of experts [expert][lane]: the rank's lanes.
    std::vector<std::vector<uint16_t>> experts;
    KcclEngineModel model = {};
    KcclEngineTeam team = {};
    uint8_t* window = nullptr;
    uint8_t* comm_window = nullptr;
};

std::vector<uint16_t> weights;
std::vector<float> norms(kHidden, 1.0f), angles(kContext* kHeadDim / 2, 0.5f);

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

uint32_t panels_for(uint32_t rows) { return (rows + 15) / 16; }

// Where a lane's part of an op's weights begins: every lane and op has its own numbers.
uint64_t weights_of(uint32_t op, uint32_t lane, uint32_t panels, uint32_t columns) {
    return address_of(weights.data() + op * 977 * 16 +
                      lane * panels * kccl::engine::kRows * 2 * kccl::engine::pairs_for(columns));
}

// Copies a rank's lanes of all experts. Returns the address.
uint64_t experts_of(Rank& rank, int number, uint32_t op, uint32_t panels, uint32_t columns) {
    const uint32_t first = rank.model.first_lane[number], end = rank.model.first_lane[number + 1];
    const auto* lane = reinterpret_cast<const uint16_t*>(weights_of(op, 0, panels, columns));
    const auto* next = reinterpret_cast<const uint16_t*>(weights_of(op, 1, panels, columns));
    const auto each = static_cast<size_t>(next - lane);
    std::vector<uint16_t>& own = rank.experts.emplace_back();
    for (uint32_t expert = 0; expert < kExperts; ++expert) {
        const uint16_t* of_expert = lane + expert * kLanes * each;
        own.insert(own.end(), of_expert + first * each, of_expert + end * each);
    }
    return address_of(own.data());
}

void add_ops(Rank& rank, int number, bool is_mixture) {
    const uint32_t first = rank.model.first_lane[number];
    const auto add = [&](KcclEngineOp op, uint32_t panels, uint32_t columns) {
        const auto index = static_cast<uint32_t>(rank.ops.size());
        if (panels != 0) op.weights = weights_of(index, first, panels, columns);
        op.norm = address_of(norms.data());
        // Right for the ops that are traced.
        const bool is_logits = op.kind == kKcclEngineHead;
        const bool is_behind = is_logits || op.kind == kKcclEngineFinal;
        op.num_vectors = is_behind || is_mixture ? 1 : kLanes;
        op.width = is_logits ? kVocab : kHidden;
        op.rule.own_scale = 1;
        if (op.kind != kKcclEngineOut && op.kind != kKcclEngineDown &&
            op.kind != kKcclEngineExpertDown) {
            op.module = op.rule.receives = -1;
        }
        rank.ops.push_back(op);
    };
    add({.kind = kKcclEngineEmbed}, 0, 0);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto exchange = [&](uint32_t kind, int module) {
            // Delay 1: module n's messages land at n + 2. The first two sum at once.
            const bool is_early = is_mixture || module < 2;
            return KcclEngineOp{
                .kind = kind,
                .layer = layer,
                .module = static_cast<uint32_t>(module),
                .rule = {.own_scale = 1,
                         .receives = is_early ? -1 : module - 2,
                         .is_blocking = is_early,
                         .sends = !is_mixture && module + 2 < static_cast<int>(2 * kLayers)}};
        };
        add({.kind = kKcclEngineQkv, .layer = layer}, panels_for(4 * kHeadDim), kHidden);
        add({.kind = kKcclEngineAttend, .layer = layer, .window = layer == 0 ? 7u : 0u}, 0, 0);
        add(exchange(kKcclEngineOut, static_cast<int>(2 * layer)), panels_for(kHidden),
            kHeads * kHeadDim);
        const auto mlp = static_cast<int>(2 * layer + 1);
        if (!is_mixture) {
            add({.kind = kKcclEngineGateUp, .layer = layer}, 2 * panels_for(kFfn), kHidden);
            add(exchange(kKcclEngineDown, mlp), panels_for(kHidden), kFfn);
            continue;
        }
        add({.kind = kKcclEngineRouter, .layer = layer}, 0, 0);
        auto op = static_cast<uint32_t>(rank.ops.size());
        rank.ops.back().weights = weights_of(op, 0, panels_for(kExperts), kHidden);
        add({.kind = kKcclEngineExpertGateUp, .layer = layer}, 0, 0);
        rank.ops.back().weights = experts_of(rank, number, ++op, 2 * panels_for(kFfn), kHidden);
        add(exchange(kKcclEngineExpertDown, mlp), 0, 0);
        rank.ops.back().weights = experts_of(rank, number, ++op, panels_for(kHidden), kFfn);
    }
    add({.kind = kKcclEngineFinal}, 0, 0);
    add({.kind = kKcclEngineHead}, 0, 0);
    rank.ops.back().weights = weights_of(9, rank.model.first_panel[number], 1, kHidden);
}

struct World {
    World(int world_size, uint32_t num_blocks, bool is_mixture)
        : ranks(static_cast<size_t>(world_size)) {
        const KcclSizes sizes = {1, 1, 32, 0, 64, 1024, 256};
        const KcclLayout layout = kccl::layout(static_cast<uint64_t>(world_size), sizes, kPage);
        std::vector<uint64_t> windows, own;
        for (int r = 0; r < world_size; ++r) {
            Rank& rank = ranks[r];
            KcclEngineModel& model = rank.model;
            for (int i = 0; i <= world_size; ++i) {
                model.first_lane[i] = kLanes * i / world_size;
                model.first_panel[i] = panels_for(kVocab) * i / world_size;
                model.first_row[i] = kVocab * i / world_size;
            }
            rank.experts.reserve(2 * kLayers);
            add_ops(rank, r, is_mixture);
            model.num_ops = static_cast<uint32_t>(rank.ops.size());
            model.num_layers = kLayers;
            model.num_lanes = model.num_residuals = kLanes;
            model.num_in_flight = 2;
            model.hidden = kHidden;
            model.heads = kHeads;
            model.kv_heads = 1;
            model.ffn = kFfn;
            model.head_dim = kHeadDim;
            model.embedding_row_bytes = 2 * kHidden;
            model.vocab_size = kVocab;
            model.num_head_groups = 1;
            model.context = kContext;
            model.num_slots = kTogether;
            model.rounds_messages = !is_mixture;
            if (is_mixture) {
                model.num_residuals = 1;
                model.num_in_flight = 0;
                model.num_experts = kExperts;
                model.num_chosen = kChosen;
                model.normalises_choice = 1;
            }
            model.norm_eps = 1e-5f;
            model.attention_scale = 0.4f;
            model.ops = address_of(rank.ops.data());
            model.cosines = model.sines = address_of(angles.data());
            const uint64_t bytes = kccl_engine_window_bytes(&model, world_size);
            rank.window = static_cast<uint8_t*>(calloc(1, bytes));
            memcpy(rank.window, weights.data() + model.first_row[r] * kHidden,
                   (model.first_row[r + 1] - model.first_row[r]) * kHidden * 2);
            rank.comm_window = static_cast<uint8_t*>(aligned_alloc(kPage, layout.scratch_bytes));
            memset(rank.comm_window, 0, layout.scratch_bytes);
            windows.push_back(address_of(rank.comm_window));
            own.push_back(address_of(rank.window));
        }
        for (int r = 0; r < world_size; ++r) {
            Rank& rank = ranks[r];
            for (int32_t& pidfd : rank.context.pidfd) pidfd = -1;
            rank.context.shares_cores = 1;
            rank.state.limit_ns = rank.state.first_limit_ns = 60'000'000'000;
            rank.state.idle_context = address_of(&rank.context);
            const kccl::Addresses addresses = {windows.data(), windows.data(),
                                               address_of(&rank.state), address_of(rank.channels)};
            rank.team.comm = kccl::make_comm(r, world_size, sizes, addresses, kPage, 3);
            for (int i = 0; i < world_size; ++i) rank.team.window[i] = own[i];
            rank.team.num_blocks = num_blocks;
            for (int32_t& cpu : rank.team.cpus) cpu = -1;
            engines.push_back(kccl_engine_open(&rank.model, &rank.team));
        }
    }
    ~World() {
        for (KcclEngine* engine : engines) kccl_engine_close(engine);
        for (Rank& rank : ranks) {
            free(rank.window);
            free(rank.comm_window);
        }
    }

    // The tokens of a request, cancelled after `most`; every rank must see the same ones. The ranks
    // share request.out, and one of them writes to it what all have.
    std::vector<int32_t> run(KcclEngineRequest request, size_t most) {
        for (KcclEngine* engine : engines) {
            request.writes_shared = engine == engines[0];
            if (kccl_engine_start(engine, &request) != 0) fail("a request was refused");
        }
        std::vector<int32_t> of_first;
        for (KcclEngine* engine : engines) {
            std::vector<int32_t> tokens;
            KcclEngineToken token = {};
            do {
                if (tokens.size() == most) kccl_engine_cancel(engines.back());
                const int found = kccl_engine_next(engine, &token, 1'000'000);
                if (found < 0) break;
                if (found > 0) tokens.push_back(token.end == kKcclEngineCancelled ? -1 : token.id);
            } while (true);
            double seconds;
            if (kccl_engine_status(engine, &seconds) != kKcclOk) fail("a wait failed");
            if (engine == engines[0]) of_first = tokens;
            if (tokens != of_first) fail("the ranks see other tokens");
        }
        if (of_first.size() > most) of_first.resize(most);
        return of_first;
    }

    // Runs equal requests as a batch; the first one is cancelled after 7 tokens. `expected` are the
    // tokens of one that runs alone.
    void run_together(const KcclEngineRequest& request, const std::vector<int32_t>& expected) {
        KcclEngineRequest batch = {};
        batch.task = kKcclEngineBatch;
        for (KcclEngine* engine : engines) (void)kccl_engine_start(engine, &batch);
        const auto answer = [&](uint32_t slot) {
            KcclEngineRequest own = request;
            own.slot = own.source = slot;
            const auto member = static_cast<uint32_t>(kccl_engine_join(engines[0], &own));
            std::vector<int32_t> tokens;
            KcclEngineToken token = {};
            int found;
            while ((found = kccl_engine_next_of(engines[0], member, &token, 1'000'000)) >= 0) {
                if (found > 0 && token.id >= 0) tokens.push_back(token.id);
                if (slot == 0 && tokens.size() == 7) kccl_engine_cancel_of(engines[0], member);
            }
            while (kccl_engine_leave(engines[0], member, 1'000'000) == 0) {
            }
            const size_t least = slot == 0 ? 7 : expected.size();
            if (tokens.size() < least ||
                !std::equal(tokens.begin(), tokens.end(), expected.begin()))
                fail("a batch gives other tokens");
        };
        std::vector<std::thread> threads;
        for (uint32_t i = 0; i < kTogether; ++i) threads.emplace_back(answer, i);
        for (std::thread& each : threads) each.join();
        kccl_engine_cancel(engines.back());
        KcclEngineToken token = {};
        for (KcclEngine* engine : engines) {
            while (kccl_engine_next(engine, &token, 1'000'000) >= 0) {
            }
        }
    }

    [[noreturn]] static void fail(const char* what) {
        printf("%s\n", what);
        fflush(stdout);
        // Without destructors: threads run.
        _Exit(1);
    }

    std::vector<Rank> ranks;
    std::vector<KcclEngine*> engines;
};

// Tells whether all numbers of ranks and blocks give the same.
bool is_right(bool is_mixture) {
    const uint32_t in_layer = is_mixture ? 6 : 5;
    const std::vector<int32_t> ids = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12,
                                      13, 14, 15, 16, 17, 18, 1,  2,  3,  4,  5,  6,
                                      7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18};
    if (ids.size() != kPrompt) World::fail("the prompt has another length");
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    bool is_wrong = false;
    const int shapes[][2] = {{1, 1}, {1, 3}, {2, 2}, {3, 1}, {4, 1}};
    for (const auto& [world_size, num_blocks] : shapes) {
        World world(world_size, static_cast<uint32_t>(num_blocks), is_mixture);
        KcclEngineRequest request = {};
        request.task = kKcclEngineGenerate;
        request.num_ids = static_cast<uint32_t>(ids.size());
        request.ids = address_of(ids.data());
        request.max_tokens = 25;
        request.sampling.temperature = 1;
        request.sampling.top_p = 1;
        request.sampling.repetition_penalty = 1;
        const std::vector<int32_t> found = world.run(request, 25);
        const std::vector<int32_t> cut = world.run(request, 7);
        // Every third token is guessed wrong.
        drafted = found;
        for (size_t i = 0; i < drafted.size(); i += 3) drafted[i] = 0;
        request.most_drafts = 5;
        request.drafter = reinterpret_cast<uint64_t>(&draft);
        const std::vector<int32_t> same = world.run(request, 25);
        if (same != found) World::fail("drafts give other tokens");
        request.drafter = 0;
        world.run_together(request, found);
        request.most_drafts = 0;
        std::vector<float> scores(ids.size() * kVocab);
        request.task = kKcclEngineScore;
        request.out = address_of(scores.data());
        world.run(request, 1);
        // Cancelled at once: some logits are written, and all ranks end at the same ones.
        std::vector<float> begun(scores.size());
        request.out = address_of(begun.data());
        world.run(request, 0);
        std::vector<float> traced(ids.size() * kLanes * kHidden);
        request.task = kKcclEngineTrace;
        request.out = address_of(traced.data());
        for (const uint32_t op : {3u, kLayers * in_layer + 1, kLayers * in_layer + 2}) {
            request.stop_op = op;
            if (op > kLayers * in_layer + 1) traced.resize(ids.size() * kVocab);
            request.out = address_of(traced.data());
            world.run(request, 1);
        }
        if (tokens.empty()) {
            tokens = found;
            logits = scores;
        }
        if (found.size() != 25 || cut.size() != 7 || found != tokens || scores != logits ||
            !std::equal(cut.begin(), cut.end(), found.begin())) {
            printf("%d ranks of %d blocks give other results\n", world_size, num_blocks);
            // It goes on: the sanitizer may find the reason.
            is_wrong = true;
        }
    }
    return !is_wrong;
}

}  // namespace

int main() {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0, 0.15f);
    weights.resize(1 << 19);
    for (uint16_t& each : weights) {
        const float value = normal(rng);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        each = static_cast<uint16_t>(bits >> 16);
    }
    bool is_wrong = false;
    for (const bool is_mixture : {false, true}) is_wrong |= !is_right(is_mixture);
    if (is_wrong) return 1;
    printf("all results are the same\n");
}
