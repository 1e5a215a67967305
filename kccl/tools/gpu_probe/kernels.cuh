// The kernels of `kccl topo --probe` on a GPU. No call of the library is in them: they measure what
// every protocol is built on. A thread that takes a time is the first one of its block.
#include <kccl/mem.cuh>

namespace kccl::probe {

using mem::Line;
using mem::Order;
using mem::Scope;

constexpr uint32_t kLineWords = kKcclLineBytes / sizeof(uint32_t);
// Lines that a player uses in turn, because a word's latency depends on where its line is in L2.
constexpr uint32_t kLines = 32;
constexpr uint32_t kOutboxWords = kLines * kLineWords;
// Loads that a thread starts before it waits for any.
constexpr uint32_t kAtOnce = 8;

// Waits until a word that counts up has reached `wanted`; false if the limit is over. The clock is
// read once in 1024 polls.
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

// One player of a ping-pong of `trips` round trips. Each player writes its own outbox and polls the
// other's. Values count up from `first`, so a player that is late sees a later value and goes on.
// Returns the ticks of all round trips but the first `warmup`, which is below trips; 0: no answer.
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

// Whom a player meets in a round of a tournament of `players`, an even number, in which all meet.
KCCL_DEVICE uint32_t opponent(uint32_t me, uint32_t round, uint32_t players) {
    const uint32_t last = players - 1;
    if (me == last) return round % 2 == 0 ? round / 2 : (round + last) / 2;
    const uint32_t other = (round + last - me) % last;
    return other == me ? last : other;
}

// Where this block runs: the unit's number and its die's.
KCCL_DEVICE void note_place(uint32_t* places) {
    mem::store_plain(places + 2 * platform::block_in_grid(), mem::unit_id());
    mem::store_plain(places + 2 * platform::block_in_grid() + 1, mem::die_id());
}

// Loads of one zeroed word, one after another; returns the ticks, 0 if the word is not zero.
template <uint32_t NUM>
KCCL_DEVICE uint64_t chase(const uint32_t* word) {
    const uint64_t begin = mem::clock_ticks();
    const uint32_t* next = word;
    KCCL_UNROLL
    for (uint32_t i = 0; i < NUM; ++i) next += mem::load<Order::kRelaxed, Scope::kDevice>(next);
    // The branch waits for the last load.
    return next == word ? mem::clock_ticks() - begin : 0;
}

// Loads a part of `data` into registers and returns a sum, so that no load is left out. The part
// begins at `from`, in steps of `step` lines.
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

// How many ticks and nanoseconds pass in a block that does nothing for so long. numbers: two.
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

// Every block plays with every other, many pairs at once. All blocks run at once.
//   outboxes: one for each block, kLines lines each; no value in them lies above `first`
//   ticks:    [block][opponent], of trips - warmup round trips; what has failed stays as it was
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

// The least ticks of a load of each line by each block. Every block begins at another line.
//   data:  zeroed; line i is at i * line_words
//   ticks: [block][line], of kChased loads; what has failed stays as it was
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
        // The first time brings the line into L2.
        uint64_t best = probe::chase<kChased>(word);
        if (best == 0) return;
        for (uint32_t k = 0; k < repeats; ++k) {
            const uint64_t taken = probe::chase<kChased>(word);
            if (k == 0 || taken < best) best = taken;
        }
        mem::store_plain(ticks + uint64_t{me} * num_lines + line, static_cast<uint32_t>(best));
    }
}

// Polls and a ping-pong of blocks 0 and 1, while all other warps read `data`, or do nothing.
//   lines:   two outboxes, then zeroed lines as many as one has, then the line that ends it
//   numbers: ticks of `loads` loads, ticks of trips - warmup round trips, and of one thread that
//            reads: its loads and its ticks
//   most:    turns of a reader, so that its loop ends
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

// Reads num_lines lines `passes` times; lines that do not fill a turn of all threads are left out.
// Each pass gives a block other lines, so that none comes from a cache of its own.
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

// Writes num_lines lines `passes` times; the rest as probe_read() leaves it out.
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

// Answers a host thread: stores in `own_word` what it sees in `host_word`, until that is `stop`.
// Both lie in memory of the host. Ends, too, if nothing changes for so long.
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

// So many neighbouring blocks run at once in one group of multiprocessors, where the GPU has such
// groups. The grid is a multiple of their number.
#if defined(KCCL_TARGET_CUDA) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
#define KCCL_PROBE_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define KCCL_PROBE_CLUSTER_OF(blocks)
#endif

// The unit of each block. Blocks stay for unlike times, so units become free one by one, and later
// clusters run on other sets of units than the first. `seed` changes the times.
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
