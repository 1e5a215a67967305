// The kernels of `kccl topo --probe` on a GPU. They measure the loads, stores and polls that every
// protocol consists of, so they make no calls of the library. The first thread of a block takes the
// times, and in probe_polls() also the first thread of its second warp.
#include <kccl/mem.cuh>

namespace kccl::probe {

using mem::Line;
using mem::Order;
using mem::Scope;

constexpr uint32_t kLineWords = kKcclLineBytes / sizeof(uint32_t);
// The lines that a player uses in turn. A word's latency depends on where its line is in L2, so a
// ping-pong averages over these lines.
constexpr uint32_t kLines = 32;
constexpr uint32_t kOutboxWords = kLines * kLineWords;
// The loads that a thread issues before it waits for the first one.
constexpr uint32_t kAtOnce = 8;

// Waits until a word that counts up has reached `wanted`. Returns false after limit_ns. Reads the
// clock only once in 1024 polls.
template <Scope SCOPE>
KCCL_DEVICE bool reaches(const uint32_t* word, uint32_t wanted, uint64_t limit_ns) {
    uint64_t begin = 0;
    for (uint32_t polls = 1;; ++polls) {
        const uint32_t seen = mem::load<Order::kRelaxed, SCOPE>(word);
        if (static_cast<int32_t>(seen - wanted) >= 0) return true;
        mem::poll_pause();
        if (polls % 1024 != 0) continue;
        const uint64_t now = mem::clock_ns();
        if (begin == 0) begin = now;
        if (now - begin > limit_ns) return false;
    }
}

// Plays one side of a ping-pong of `trips` round trips. Each player writes its own outbox and polls
// the other's. Values count up from `first`, so a late player that sees a later value also goes on.
// Returns the ticks of all round trips but the first `warmup`, which must be below trips; returns 0
// if the other player did not answer within limit_ns.
KCCL_DEVICE uint64_t play(uint32_t* mine, const uint32_t* theirs, uint32_t first, uint32_t trips,
                          uint32_t warmup, bool leads, uint64_t limit_ns) {
    uint64_t begin = 0;
    for (uint32_t k = 0; k < trips; ++k) {
        if (k == warmup) begin = mem::clock_ticks();
        const uint32_t line = k % kLines * kLineWords;
        if (leads) mem::store<Order::kRelaxed, Scope::kDevice>(mine + line, first + k);
        if (!reaches<Scope::kDevice>(theirs + line, first + k, limit_ns)) return 0;
        if (!leads) mem::store<Order::kRelaxed, Scope::kDevice>(mine + line, first + k);
    }
    return mem::clock_ticks() - begin;
}

// Returns the opponent of `me` in a round of a round-robin tournament. `players` must be even.
KCCL_DEVICE uint32_t opponent(uint32_t me, uint32_t round, uint32_t players) {
    const uint32_t last = players - 1;
    if (me == last) return round % 2 == 0 ? round / 2 : (round + last) / 2;
    const uint32_t other = (round + last - me) % last;
    return other == me ? last : other;
}

// Stores where this block runs: the numbers of its compute unit and of the unit's die.
KCCL_DEVICE void note_place(uint32_t* places) {
    mem::store_plain(places + 2 * platform::block_in_grid(), mem::unit_id());
    mem::store_plain(places + 2 * platform::block_in_grid() + 1, mem::die_id());
}

// Makes NUM dependent loads of one word, which must be zero. Returns their ticks, or 0 if the word
// is not zero.
template <uint32_t NUM>
KCCL_DEVICE uint64_t chase(const uint32_t* word) {
    const uint64_t begin = mem::clock_ticks();
    const uint32_t* next = word;
    KCCL_UNROLL
    for (uint32_t i = 0; i < NUM; ++i) next += mem::load<Order::kRelaxed, Scope::kDevice>(next);
    // The branch waits for the last load.
    return next == word ? mem::clock_ticks() - begin : 0;
}

// Loads kAtOnce lines from `from` on, `step` lines apart. Returns a sum of their words, so that the
// compiler cannot remove the loads.
KCCL_DEVICE uint64_t take(const Line* data, uint64_t from, uint64_t step) {
    Line lines[kAtOnce];
    KCCL_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) lines[i] = mem::load_streamed(data + from + i * step);
    uint64_t sum = 0;
    KCCL_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) sum += lines[i].word[0] ^ lines[i].word[1];
    return sum;
}

}  // namespace kccl::probe

// Spins for wait_ns, and stores how many ticks and nanoseconds passed in numbers[0] and numbers[1].
KCCL_KERNEL void probe_clock(uint64_t wait_ns, uint64_t* numbers) {
    using namespace kccl;
    if (platform::thread_in_block() != 0) return;
    const uint64_t begin_ns = mem::clock_ns(), begin = mem::clock_ticks();
    uint64_t now = begin_ns;
    while (now - begin_ns < wait_ns) {
        now = mem::clock_ns();
        mem::poll_pause();
    }
    mem::store_plain(numbers, mem::clock_ticks() - begin);
    mem::store_plain(numbers + 1, now - begin_ns);
}

// Plays a ping-pong between each two blocks, many pairs at the same time. All blocks of the grid
// must be resident.
//   outboxes: one for each block, of kLines lines; all values in them must be below `first`
//   ticks:    [block][opponent], of trips - warmup round trips; not written for pairs that failed
KCCL_KERNEL void probe_units(uint32_t* outboxes, uint32_t first, uint32_t trips, uint32_t warmup,
                             uint64_t limit_ns, uint64_t* ticks, uint32_t* places) {
    using namespace kccl;
    if (platform::thread_in_block() != 0) return;
    const uint32_t me = platform::block_in_grid(), count = platform::blocks_per_grid();
    probe::note_place(places);
    const uint32_t players = count + count % 2;
    for (uint32_t round = 0; round < players - 1; ++round) {
        const uint32_t other = probe::opponent(me, round, players);
        if (other >= count) continue;
        const uint64_t taken =
            probe::play(outboxes + me * probe::kOutboxWords, outboxes + other * probe::kOutboxWords,
                        first + round * trips, trips, warmup, me < other, limit_ns);
        if (taken == 0) return;
        mem::store_plain(ticks + uint64_t{me} * count + other, taken);
    }
}

// Measures the least ticks of kChased dependent loads of each line by each block. Each block begins
// at another line.
//   data:  zeroed; line i is at i * line_words
//   ticks: [block][line]; not written for lines that failed
constexpr uint32_t kChased = 4;
KCCL_KERNEL void probe_lines(const uint32_t* data, uint32_t num_lines, uint32_t line_words,
                             uint32_t repeats, uint32_t* ticks, uint32_t* places) {
    using namespace kccl;
    if (platform::thread_in_block() != 0) return;
    const uint32_t me = platform::block_in_grid();
    probe::note_place(places);
    for (uint32_t i = 0; i < num_lines; ++i) {
        const uint32_t line = (i + me * 5) % num_lines;
        const uint32_t* const word = data + uint64_t{line} * line_words;
        // The first chase brings the line into L2. Its time is replaced below.
        uint64_t best = probe::chase<kChased>(word);
        if (best == 0) return;
        for (uint32_t k = 0; k < repeats; ++k) {
            const uint64_t taken = probe::chase<kChased>(word);
            if (k == 0 || taken < best) best = taken;
        }
        mem::store_plain(ticks + uint64_t{me} * num_lines + line, static_cast<uint32_t>(best));
    }
}

// Times polls by block 0, and then a ping-pong of blocks 0 and 1, by the first warp of each block.
// Meanwhile all other warps of the grid read `data`. With blocks of one warp nothing else runs.
//   lines:   two outboxes, then as many zeroed lines as an outbox has, which are polled, then the
//            line that ends the readers
//   numbers: ticks of `loads` loads, ticks of trips - warmup round trips, and the loads and ticks
//            of one reading thread
//   most:    the most turns of a reader, so that its loop ends in any case
KCCL_KERNEL void probe_polls(uint32_t* lines, uint32_t first, uint32_t loads, uint32_t trips,
                             uint32_t warmup, uint64_t settle_ns, uint64_t limit_ns,
                             const kccl::mem::Line* data, uint64_t num_lines, uint32_t most,
                             uint64_t* numbers, uint64_t* sink) {
    using namespace kccl;
    using probe::kOutboxWords;
    const uint32_t block = platform::block_in_grid(), thread = platform::thread_in_block();
    uint32_t* const end = lines + 3 * kOutboxWords;
    if (thread >= platform::kWarpSize) {
        const uint64_t threads = platform::threads_per_block() - platform::kWarpSize;
        const uint64_t size = threads * platform::blocks_per_grid();
        const uint64_t whole = num_lines / (probe::kAtOnce * size);
        const uint64_t begin = mem::clock_ticks();
        uint64_t sum = 0;
        uint32_t turn = 0;
        while (whole > 0 && turn < most) {
            const uint64_t from = turn % whole * probe::kAtOnce * size + block * threads;
            sum += probe::take(data, from + thread - platform::kWarpSize, size);
            ++turn;
            if (mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(end) == first) break;
            mem::poll_pause();
        }
        if (sum == ~uint64_t{0}) mem::store_plain(sink, sum);
        if (block == 0 && thread == platform::kWarpSize) {
            mem::store_plain(numbers + 2, uint64_t{turn} * probe::kAtOnce);
            mem::store_plain(numbers + 3, mem::clock_ticks() - begin);
        }
        return;
    }
    if (thread != 0 || block > 1) return;
    const uint64_t begin_ns = mem::clock_ns();
    while (mem::clock_ns() - begin_ns < settle_ns) mem::poll_pause();
    uint64_t polled = 0;
    bool is_well = true;
    for (uint32_t k = 0; block == 0 && k < loads; ++k) {
        const uint32_t line = k % probe::kLines * probe::kLineWords;
        const uint64_t taken = probe::chase<1>(lines + 2 * kOutboxWords + line);
        is_well = is_well && taken != 0;
        polled += taken;
    }
    const uint64_t played =
        probe::play(lines + block * kOutboxWords, lines + (1 - block) * kOutboxWords, first, trips,
                    warmup, block == 0, limit_ns);
    if (block != 0) return;
    mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(end, first);
    mem::store_plain(numbers, is_well ? polled : 0);
    mem::store_plain(numbers + 1, played);
}

// Reads num_lines lines `passes` times. Lines at the end that do not fill a turn of all threads are
// left out. In each pass a block reads other lines, so that none is in the block's own L1 cache.
KCCL_KERNEL void probe_read(const kccl::mem::Line* data, uint64_t num_lines, uint32_t passes,
                            uint64_t* sink) {
    using namespace kccl;
    const uint64_t threads = platform::threads_per_block(), blocks = platform::blocks_per_grid();
    const uint64_t turn = probe::kAtOnce * threads * blocks;
    uint64_t sum = 0;
    for (uint32_t pass = 0; pass < passes; ++pass) {
        const uint64_t block = (platform::block_in_grid() + uint64_t{pass} * 17) % blocks;
        const uint64_t mine = block * threads + platform::thread_in_block();
        for (uint64_t at = 0; at + turn <= num_lines; at += turn) {
            sum += probe::take(data, at + mine, threads * blocks);
        }
    }
    if (sum == ~uint64_t{0}) mem::store_plain(sink, sum);
}

// Writes num_lines lines `passes` times. Leaves out the same lines at the end as probe_read().
KCCL_KERNEL void probe_write(kccl::mem::Line* data, uint64_t num_lines, uint32_t passes) {
    using namespace kccl;
    const uint64_t threads = platform::threads_per_block(), blocks = platform::blocks_per_grid();
    const uint64_t turn = probe::kAtOnce * threads * blocks;
    const uint64_t mine = platform::block_in_grid() * threads + platform::thread_in_block();
    for (uint32_t pass = 0; pass < passes; ++pass) {
        for (uint64_t at = 0; at + turn <= num_lines; at += turn) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < probe::kAtOnce; ++i) {
                mem::store_plain(data + at + mine + i * threads * blocks,
                                 mem::Line{{uint64_t{pass}, at}});
            }
        }
    }
}

// Answers a host thread in a ping-pong: copies each new value of `host_word` to `own_word`, until
// the value is `stop`. Both words lie in host memory. Also ends if `host_word` does not change for
// limit_ns.
KCCL_KERNEL void probe_answer(const uint32_t* host_word, uint32_t* own_word, uint32_t stop,
                              uint64_t limit_ns) {
    using namespace kccl;
    if (platform::thread_in_block() != 0) return;
    uint64_t begin = mem::clock_ns();
    for (uint32_t last = 0, polls = 1; last != stop; ++polls) {
        const uint32_t seen = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(host_word);
        if (seen == last) {
            if (polls % 256 == 0 && mem::clock_ns() - begin > limit_ns) return;
            mem::poll_pause();
            continue;
        }
        mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(own_word, seen);
        last = seen;
        begin = mem::clock_ns();
    }
}

// Makes `blocks` neighbouring blocks a thread block cluster, which runs within one GPC. Has no
// effect on GPUs without clusters. The grid must be a multiple of `blocks`.
#if defined(KCCL_TARGET_CUDA) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
#define KCCL_PROBE_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define KCCL_PROBE_CLUSTER_OF(blocks)
#endif

// Stores the compute unit of each block, and then keeps the unit busy. Blocks stay for different
// times, so that units become free one by one, and later clusters run on other sets of units than
// the first clusters. `seed` varies the times.
namespace kccl::probe {
KCCL_DEVICE void stay(uint32_t* units, uint64_t stay_ns, uint32_t seed) {
    if (platform::thread_in_block() != 0) return;
    const uint32_t block = platform::block_in_grid();
    mem::store_plain(units + block, mem::unit_id());
    const uint64_t mine = stay_ns * (1 + (block + seed) * 2654435761u % 7);
    const uint64_t begin = mem::clock_ns();
    while (mem::clock_ns() - begin < mine) mem::poll_pause();
}
}  // namespace kccl::probe

KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(2) void probe_clusters_2(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(3) void probe_clusters_3(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(4) void probe_clusters_4(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(5) void probe_clusters_5(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(6) void probe_clusters_6(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(7) void probe_clusters_7(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
KCCL_KERNEL KCCL_PROBE_CLUSTER_OF(8) void probe_clusters_8(uint32_t* units, uint64_t stay_ns,
                                                           uint32_t seed) {
    kccl::probe::stay(units, stay_ns, seed);
}
