// Writes in words why a call in a kernel failed.
#pragma once

#include <cctype>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "abi.h"

namespace kccl::host {

// Returns an enumerator's name as the compiler spells it: "kKcclBarrierDirect".
template <class Enum, Enum value>
std::string spelled() {
    const std::string all = __PRETTY_FUNCTION__;
    const std::size_t begin = all.rfind("kKccl");
    return all.substr(begin, all.find_first_of(";]>", begin) - begin);
}

// Returns the name that Python uses for an enumerator: "barrier_direct", "float32", "sum". For a
// kernel it is the name of its file. `prefix`: the prefix of the enumerators.
template <class Enum, std::size_t... values>
std::string name_of(uint32_t value, std::index_sequence<values...>, const char* prefix = "kKccl") {
    const std::string names[] = {spelled<Enum, static_cast<Enum>(values)>()...};
    if (value >= sizeof...(values)) return "a ring of copies";
    std::string name;
    for (const char letter : names[value].substr(std::strlen(prefix))) {
        if (std::isupper(letter) != 0 && !name.empty()) name += '_';
        name += static_cast<char>(std::tolower(letter));
    }
    return name;
}

inline std::string kernel_name(uint32_t kernel) {
    if (kernel == kKcclDispatch) return "dispatch";
    if (kernel == kKcclCombine) return "combine";
    if (kernel == kKcclSendTo) return "send";
    if (kernel == kKcclRecvFrom) return "recv";
    return name_of<KcclKernel>(kernel, std::make_index_sequence<kKcclNumKernels>());
}

// Tells whether calls of this kernel have a root, on which the ranks must agree.
inline bool has_root(const std::string& kernel) {
    if (kernel.rfind("reduce_scatter_", 0) == 0) return false;
    for (const char* const collective : {"broadcast_", "reduce_", "gather_", "scatter_"}) {
        if (kernel.rfind(collective, 0) == 0) return true;
    }
    return false;
}

// Returns the element type of a call in words; "" for none.
inline std::string type_words(uint32_t dtype) {
    // The value of _MOVED_FROM in kccl/base/abi.py. tests/csrc/test_record_words.py compares the
    // words.
    constexpr uint32_t kMovedFrom = 32;
    if (dtype >= kMovedFrom) {
        return "a type that KCCL only moves (check sum " + std::to_string(dtype - kMovedFrom) + ")";
    }
    if (dtype >= kKcclNumDtypes) return "";
    return name_of<KcclDtype>(dtype, std::make_index_sequence<kKcclNumDtypes>());
}

// Returns a call in words. `call` is KcclRecord.call.
inline std::string call_words(uint32_t call, uint32_t bytes) {
    const uint32_t kernel = call >> 24, dtype = call >> 16 & 255, op = call >> 8 & 255;
    if (kernel >= kKcclNumKernels) return "another call";
    const std::string name = kernel_name(kernel);
    const bool is_scan = name.rfind("scan_", 0) == 0;
    std::string words = name;
    if (has_root(name)) words += ", root " + std::to_string(call & 255);
    if (is_scan && (call & 255) != 0) words += ", exclusive";
    const bool is_message = kernel == kKcclSend || kernel == kKcclRecv;
    const uint32_t tag = is_message ? call & kKcclAnyTag : 0;
    if (tag == kKcclAnyTag) words += ", any tag";
    if (tag != 0 && tag != kKcclAnyTag) words += ", tag " + std::to_string(tag);
    words += ", " + std::to_string(bytes) + " bytes";
    const bool has_type = !is_message && name.find("barrier") != 0;
    const std::string type = has_type ? type_words(dtype) : "";
    if (!type.empty()) words += ", " + type;
    if (is_scan || name.find("reduce") != std::string::npos) {
        words += ", " + name_of<KcclOp>(op, std::make_index_sequence<kKcclNumOps>());
    }
    return words;
}

// Returns in words the argument that a call in a kernel refuses: its value and its limit.
inline std::string argument_words(const KcclRecord& record) {
    const uint32_t argument = record.call;
    const auto text = [](auto number) { return std::to_string(number); };
    const std::string name =
        argument > kKcclArgumentTopK
            ? "an argument"
            : name_of<KcclArgument>(argument, std::make_index_sequence<kKcclArgumentTopK + 1>(),
                                    "kKcclArgument");
    if (argument == kKcclArgumentOut || argument == kKcclArgumentIn) {
        char address[32];
        std::snprintf(address, sizeof(address), "0x%llx",
                      static_cast<unsigned long long>(record.waited_ns));
        return name + " is " + address + ", must be an address in a window";
    }
    const auto value = static_cast<int64_t>(record.waited_ns);
    const uint64_t limit = uint64_t{record.wanted} << 32 | record.seen;
    if (argument == kKcclArgumentWorldSize) {
        return "WORLD_SIZE is " + text(value) + ", must be " + text(limit) +
               ", the number of ranks, or 0";
    }
    const bool is_peer_of_wait = record.kernel == kKcclWait && argument == kKcclArgumentPeer;
    const int least = is_peer_of_wait ? -1 : 0;
    const bool is_least = argument == kKcclArgumentStride && value >= 0 && record.waited_ns < limit;
    std::string words = "must be below " + text(limit);
    if (argument > kKcclArgumentSignalId && argument != kKcclArgumentExpert) {
        words = std::string("must be at ") + (is_least ? "least " : "most ") + text(limit);
    } else if (value < least) {
        words = "must be at least " + text(least) + " and below " + text(limit);
    }
    switch (argument) {
        case kKcclArgumentChannel: words += ", the channels of its Options"; break;
        case kKcclArgumentBlock: words += ", the blocks of a call"; break;
        case kKcclArgumentRoot:
        case kKcclArgumentPeer: words += ", the number of ranks"; break;
        case kKcclArgumentNumBytes: words += ", what the window has from there on"; break;
        case kKcclArgumentOffset: words += ", the window's bytes"; break;
        case kKcclArgumentSlices: words += ", the slices of the exchange"; break;
        case kKcclArgumentExpert: words += ", the number of experts"; break;
        case kKcclArgumentTopK: words += ", the most experts of a row"; break;
        default: break;
    }
    const bool is_sum = argument == kKcclArgumentSlices;
    return (is_sum ? "slices.first + slices.num" : name) + " is " + text(value) + ", " + words;
}

// Say how a program can go on after a failure.
constexpr const char* kAllGoOn = "; all ranks may go on with a new Communicator";
constexpr const char* kSurvivorsGoOn = "; the survivors may go on with a Team of their own";

// Says in words where a wait was, for whom, and what it had seen.
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
        case kKcclSend:
        case kKcclRecv: return {record.channel < 0 ? "any tag" : "tag " + channel, peer, ""};
        case kKcclNumKernels:
            return {rank, "a warp of the same block",
                    "copy " + seen + " seen, " + wanted + " wanted"};
        default: return {"channel " + channel, peer, epochs};
    }
}

// Returns a record in words, for the rank that reads it.
inline std::string sentence(const KcclRecord& record, int reader) {
    const auto text = [](auto number) { return std::to_string(number); };
    const std::string rank = "rank " + text(record.rank);
    if (record.status == kKcclAborted) {
        return rank + " gave up outside of a call: an exception ended its communicator" +
               kSurvivorsGoOn;
    }
    if (record.status == kKcclCallsDiffer) {
        const uint32_t kernel = record.call >> 24;
        const bool has_parts = kernel == kKcclAllToAllParts || kernel == kKcclReduceScatterParts;
        if (has_parts && record.call == record.waited_ns) {
            return kernel_name(kernel) + ": " + rank + " expects " + text(record.seen) +
                   " bytes of rank " + text(record.peer) + ", which sends it " +
                   text(record.wanted) + ": the counts on both ranks must agree" + kAllGoOn;
        }
        return "the ranks disagree about this call: " + rank + ": " +
               call_words(record.call, record.seen) + "; rank " + text(record.peer) + ": " +
               call_words(static_cast<uint32_t>(record.waited_ns), record.wanted) + kAllGoOn;
    }
    const std::string name = kernel_name(record.kernel);
    if (record.status == kKcclBadArgument) {
        const bool is_opening = record.kernel == kKcclNumKernels;
        return (is_opening ? "Channel" : name) + ": " + argument_words(record) +
               ", in a call in the kernel on " + rank + kAllGoOn;
    }
    if (record.status == kKcclUnreadable) {
        const int error = static_cast<int>(record.seen & 0xffff);
        return name + " on channel " + text(record.channel) + ": " + rank +
               " could not read the memory of peer " + text(record.peer) + ": " +
               std::strerror(error) + " (errno " + text(error) + ")" + kAllGoOn;
    }
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
    if (record.status == kKcclCapacityPassed) {
        return name + ": " + rank + " has " + text(record.seen) + " rows for expert " +
               text(record.channel) + limit + ", the capacity of its Experts" + kAllGoOn;
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
                                               : peer + " has closed or dropped the communicator";
        cure = kSurvivorsGoOn;
    }
    if (record.kernel == kKcclSend || record.kernel == kKcclRecv) {
        wait.seen = text(record.seen) + " other messages of " + wait.awaited + " have come";
    }
    char waited_s[32];
    std::snprintf(waited_s, sizeof(waited_s), "%.3g", static_cast<double>(record.waited_ns) * 1e-9);
    const std::string source =
        record.rank == reader ? "" : " (rank " + text(reader) + " heard it from " + rank + ")";
    return name + " on " + wait.where + ": " + cause + "; " + rank + " waited for " + wait.awaited +
           ": " + wait.seen + ", after " + waited_s + " s" + source + cure;
}

}  // namespace kccl::host
