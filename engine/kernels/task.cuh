// What the host tells a decode kernel, and what it gets back.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl::decode {

// A module's rule of delayed tensor parallelism: Op in program.py says what it means.
struct Module {
    float own_scale;
    int32_t receives;  // a module, or -1
    uint32_t is_blocking;
    uint32_t sends;
};

struct Layer {
    Module attention;
    Module mlp;
    uint32_t window;
    uint32_t reserved[3];
};

// What of SamplingParams in sample.py a kernel that samples needs; the names are its names.
struct Sampling {
    double temperature;
    double top_p;
    double min_p;
    double repetition_penalty;
    uint64_t seed;
    uint32_t top_k;
    uint32_t wants_logprobs;
};

// A request, and where a rank's memory lies; passed by value. Addresses of device memory unless
// said otherwise.
struct Task {
    uint64_t weights;    // packed tiles, each block's contiguous
    uint64_t embedding;  // S::Weight [vocabulary][hidden]
    uint64_t norms;      // float [2 * layers + 1][hidden], in the order of their use
    uint64_t qk_norms;   // float [layers][queries, keys][head_dim]; 0: none
    uint64_t biases;     // float [layers][...]: biases.cuh; 0: none
    uint64_t cosines;    // float [context][head_dim / 2]
    uint64_t sines;
    uint64_t cache;       // f16 [layer][KV head][tile of 16 positions][keys, values][...]
    uint64_t layers;      // Layer [layers]
    uint64_t boards[8];   // every rank's board: board.cuh
    uint64_t ids;         // int32 [num_ids]
    uint64_t stop_ids;    // int32 [num_stop_ids]
    uint64_t logits[8];   // every rank's float [num_ids - start][vocabulary], or 0
    uint64_t own_logits;  // float [vocabulary / ranks]: the newest ones, if the kernel samples
    uint64_t marks;       // uint32 [vocabulary / ranks], or 0: no penalty. The numbers of the last
                          // requests whose text has the ids
    uint64_t mailbox;     // Mailbox, in host memory that the device maps
    uint64_t tokens;      // Token [context], likewise
    uint32_t num_ids;
    uint32_t num_stop_ids;
    uint32_t start;       // the first position that runs; the cache has those before it
    uint32_t max_tokens;  // 0: only the ids run
    uint32_t round;       // passes that all requests before made
    uint32_t exchange;    // exchanges of notes that they made: board.cuh
    uint32_t number;      // of the request, from 1
    uint32_t only_reads;  // not 0: the weights are read max_tokens times, and nothing else is done
    uint32_t traced;      // rounds of the request that are traced, if the kernel traces
    uint32_t reserved;
    Sampling sampling;
    uint64_t trace;  // uint64 [traced][stamp of a round][block]: trace.cuh
};

// Whether a round's logits are wanted: the head's weights are read then only.
KCCL_DEVICE bool wants_head(const Task& task, uint32_t position) {
    if (task.logits[0] != 0 || task.only_reads != 0) return true;
    return task.max_tokens != 0 && position + 1 >= task.num_ids;
}

// What a kernel leaves out, to learn what it costs (S::kAblated, a bit each). Its tokens are wrong.
enum Ablation : uint32_t {
    kExchanges = 1u << 0,  // takes what lies on the board, without waiting for it
    kWeights = 1u << 1,    // copies no weights
    kAttention = 1u << 2,  // looks at no position but the current one
    kPinned = 1u << 3,     // and four bits more: takes each stage of that Product, the head among
                           // them, from the same place, so that it comes from the cache
};

// Why a request has ended.
enum End : uint32_t {
    kGoesOn = 0,
    kStopId = 1,
    kMaxTokens = 2,
    kContextFull = 3,
    kCancelled = 4,
    kBadLogits = 5,
};

// A token as the host sees it; each half is single-copy atomic. Valid when both numbers are the
// request's.
struct alignas(16) Token {
    uint32_t id_and_end;  // the id, and kEndAt bits above End
    uint32_t number;
    float logprob;  // NaN unless it is wanted
    uint32_t number_again;
};
constexpr uint32_t kEndAt = 28;

struct Mailbox {
    uint32_t cancelled;  // the host writes: its request that is to end, on any rank
    uint32_t rounds;     // the kernel writes, when it ends: Task.round of the next request
    uint32_t exchanges;  // likewise, Task.exchange
};

}  // namespace kccl::decode
