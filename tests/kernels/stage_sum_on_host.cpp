// Runs stage_sum where a block is one thread: it copies ahead and consumes in turn.
#include <cstdio>
#include <vector>

#include "stage_sum.cuh"

int main() {
    // A ring of 4 stages of 128 words: below one stage, whole rings, many rounds, a short last one.
    for (const uint64_t count : {0, 4, 124, 128, 132, 512, 516, 5000, 40000}) {
        for (const int in_flight : {1, 2, 3, 4, 9}) {
            struct alignas(16) Line {
                uint32_t word[4];
            };
            std::vector<Line> lines(count / 4);
            uint64_t wanted = 0;
            for (uint64_t i = 0; i < count; ++i) {
                const auto word = static_cast<uint32_t>((i + 1) * 2654435761u);
                lines[i / 4].word[i % 4] = word;
                wanted += word * (i + 1);
            }
            uint64_t sum = 0;
            KcclState state = {};
            KcclCall call = {};
            call.comm.state = reinterpret_cast<uint64_t>(&state);
            call.comm.polls_per_check = 1;
            call.input = reinterpret_cast<uint64_t>(lines.data());
            call.output = reinterpret_cast<uint64_t>(&sum);
            call.count = count;
            call.peer = in_flight;
            if (kccl::stage_sum(call) != kKcclOk || sum != wanted) {
                std::printf("count %llu, in flight %d: %llu, must be %llu\n",
                            static_cast<unsigned long long>(count), in_flight,
                            static_cast<unsigned long long>(sum),
                            static_cast<unsigned long long>(wanted));
                return 1;
            }
        }
    }
    std::puts("all sums are right");
    return 0;
}
