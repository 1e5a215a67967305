// Why a call in a kernel failed, in words. kccl/base/failure.py has the same words for programs in
// Python; tests/csrc/test_record_words.py compares the two. KcclRecord in abi.inc says what the
// numbers count.
#pragma once

#include <cctype>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "abi.h"

namespace kccl::host {

// An enumerator's name, from the compiler: "kKcclBarrierDirect".
template <KcclKernel kernel>
std::string spelled() {
    const std::string all = __PRETTY_FUNCTION__;
    const std::size_t begin = all.rfind("kKccl");
    return all.substr(begin, all.find_first_of(";]>", begin) - begin);
}

// The name of a kernel's file: "barrier_direct".
template <std::size_t... kernels>
std::string kernel_name(uint32_t kernel, std::index_sequence<kernels...>) {
    const std::string names[] = {spelled<static_cast<KcclKernel>(kernels)>()...};
    if (kernel >= sizeof...(kernels)) return "a ring of copies";
    std::string name;
    for (const char letter : names[kernel].substr(std::strlen("kKccl"))) {
        if (std::isupper(letter) != 0 && !name.empty()) name += '_';
        name += static_cast<char>(std::tolower(letter));
    }
    return name;
}

// How a program goes on after a failure.
constexpr const char* kAllGoOn = "; all ranks may go on with a new Communicator";
constexpr const char* kSurvivorsGoOn = "; the survivors may go on with a Team of their own";

// Where a wait was, for whom, and what it had seen.
struct WaitWords {
    std::string where, awaited, seen;
};

inline WaitWords wait_words(const KcclRecord& record) {
    const auto text = [](auto number) { return std::to_string(number); };
    const std::string rank = "rank " + text(record.rank), channel = text(record.channel);
    const std::string peer = record.peer < 0 ? "any peer" : "peer " + text(record.peer);
    const std::string seen = text(record.seen), wanted = text(record.wanted);
    const std::string epochs = "epoch seen " + seen + ", wanted " + wanted;
    switch (record.kernel) {
        case kKcclGridSync: return {rank, "block " + channel, epochs};
        case kKcclGridExchange:
            return {rank, "block " + channel + " of rank " + text(record.peer), epochs};
        case kKcclWait:
            return {"signal_id " + channel, peer, seen + " signals seen, " + wanted + " wanted"};
        case kKcclNumKernels:
            return {rank, "a warp of the same block",
                    "copy " + seen + " seen, " + wanted + " wanted"};
        default: return {"channel " + channel, peer, epochs};
    }
}

// A record in words, for the rank that reads it.
inline std::string sentence(const KcclRecord& record, int reader) {
    const auto text = [](auto number) { return std::to_string(number); };
    const std::string rank = "rank " + text(record.rank);
    if (record.status == kKcclAborted) {
        return rank + " gave up outside of a call: an exception ended its communicator" +
               kSurvivorsGoOn;
    }
    const std::string name =
        kernel_name(record.kernel, std::make_index_sequence<kKcclNumKernels>());
    const std::string limit = ", must have at most " + text(record.wanted);
    if (record.status == kKcclGridTooLarge) {
        return name + ": the kernel on " + rank + " has " + text(record.seen) + " blocks" + limit +
               kAllGoOn;
    }
    if (record.status == kKcclOpenedTwice) {
        return name + ": the kernel on " + rank +
               " has opened a second one while one of this communicator was open" + kAllGoOn;
    }
    if (record.status == kKcclMessageTooLong) {
        const char* option = record.kernel == kKcclGridExchange ? "exchange_bytes" : "max_bytes";
        return name + ": a call in the kernel on " + rank + " has " + text(record.seen) + " bytes" +
               limit + ", the " + option + " of its Options" + kAllGoOn;
    }
    WaitWords wait = wait_words(record);
    const std::string peer = record.peer < 0 ? "any peer" : "peer " + text(record.peer);
    std::string cause;
    const char* cure = kAllGoOn;
    if (record.status == kKcclTimeout) {
        cause = wait.awaited + " did not arrive";
    } else if (record.status == kKcclInterrupted) {
        cause = rank + " was interrupted";
        wait.awaited = "its peers";
    } else {
        cause = record.status == kKcclPeerLost ? "the process of " + peer + " has ended"
                                               : peer + " has closed the communicator";
        cure = kSurvivorsGoOn;
    }
    char waited_s[32];
    std::snprintf(waited_s, sizeof(waited_s), "%.3g", static_cast<double>(record.waited_ns) * 1e-9);
    const std::string source =
        record.rank == reader ? "" : " (rank " + text(reader) + " heard it from " + rank + ")";
    return name + " on " + wait.where + ": " + cause + "; " + rank + " waited for " + wait.awaited +
           ": " + wait.seen + ", after " + waited_s + " s" + source + cure;
}

}  // namespace kccl::host
