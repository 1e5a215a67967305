// Decides, call by call.
//
// In a group, a collective is KCCL's only if it is the communicator's only one. Messages do not
// count, because ranks send different ones. Such a call is held until the outermost group ends.
// Then NCCL makes its calls first, and KCCL makes the held ones in the program's order.
//
// A group whose calls of a communicator have several streams is for each of them as if all its
// calls were on that stream: NCCL does so for its part, and the held call joins the streams.
#include "calls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "real.h"

namespace kccl::nccl {

namespace {

// A call that KCCL makes.
struct Ours {
    std::shared_ptr<Served> served;
    Choice choice;
    Call call;
};

// The calls of a communicator in a group.
struct OfComm {
    ncclComm_t comm;
    std::shared_ptr<Served> served;
    int number = 0;                 // of collectives
    std::optional<Ours> held;       // the first, if it is the only one and KCCL's
    std::vector<CUstream> streams;  // of collectives and messages
    bool has_messages = false;

    // Tells whether NCCL makes none of them, as in most groups.
    bool is_one() const { return held.has_value() && !has_messages; }
    // The stream that the others wait for, or that waits for them.
    CUstream first() const {
        return held.has_value() ? held->call.arguments.stream : streams.front();
    }
};

// A communicator that is being made.
struct Made {
    ncclComm_t comm;
    ncclComm_t* place;  // where NCCL writes it when a group ends, if it is not known yet
    bool is_blocking;
};

struct Group {
    int depth = 0;
    std::vector<OfComm> calls;
    std::vector<Made> made;
};

thread_local Group group;

// The program's collectives. A call in a graph counts once, however often the graph runs.
std::atomic<unsigned long> calls_of_kccl, calls_of_nccl;

void log(const Call& call, const Entry& entry, const Choice& choice, const char* why_not) {
    if (mode() != Mode::kLog) return;
    // One write for each line, because the ranks' lines go to one place.
    std::fprintf(stderr, "kccl: rank %d of %d: %s, %zu of %s: %s%s\n", entry.rank, entry.world_size,
                 call.name, call.request.count, name_of(call.request.type),
                 why_not != nullptr ? "NCCL, because " : "",
                 why_not != nullptr ? why_not : choice.kernel->name);
}

// Tells whether NCCL refuses the arguments of a call that is not empty.
bool is_wrong(const Call& call, const Entry& entry) {
    const Arguments& arguments = call.arguments;
    if (arguments.root < 0 || arguments.root >= entry.world_size) return true;
    // Only the root of a broadcast has an input.
    const bool has_input =
        call.request.collective != Collective::kBroadcast || arguments.root == entry.rank;
    return arguments.out == nullptr || (has_input && arguments.in == nullptr);
}

// Chooses for a call outside of groups, or for the only one of a group. Without a kernel the
// reason is in why_not.
Choice choose_for(const Call& call, const Entry& entry) {
    Choice choice = {};
    if (entry.served == nullptr) {
        choice.why_not = entry.why_not.c_str();
    } else if (!call.is_known) {
        choice.why_not = "KCCL leaves it to NCCL";
    } else {
        Request request = call.request;
        request.world_size = entry.world_size;
        choice = choose(request);
        // NCCL's own error follows.
        if (choice.kernel != nullptr && is_wrong(call, entry)) {
            choice.kernel = nullptr;
            choice.why_not = "an argument is wrong";
        }
    }
    return choice;
}

ncclResult_t pass_to_nccl(const Call& call) {
    ++calls_of_nccl;
    return call.pass();
}

ncclResult_t run(const Ours& ours) {
    ++calls_of_kccl;
    const ncclResult_t result = ours.served->call(ours.choice, ours.call.arguments);
    if (result != ncclSuccess && mode() == Mode::kLog) {
        std::fprintf(stderr, "kccl: rank %d: %s failed: %s\n", ours.served->rank(), ours.call.name,
                     own_error().c_str());
    }
    return result;
}

// Returns what the group has of a communicator, with one more call on a stream.
OfComm& add_to_group(ncclComm_t comm, const std::shared_ptr<Served>& served, CUstream stream) {
    auto found = std::ranges::find(group.calls, comm, &OfComm::comm);
    if (found == group.calls.end()) {
        group.calls.push_back({comm, served, 0, std::nullopt, {}, false});
        found = std::prev(group.calls.end());
    }
    if (std::ranges::count(found->streams, stream) == 0) found->streams.push_back(stream);
    return *found;
}

ncclResult_t make_in_group(Call call, const Entry& entry) {
    OfComm& others = add_to_group(call.comm, entry.served, call.arguments.stream);
    constexpr const char* kSeveral = "the group has several collectives of the communicator";
    if (others.number++ == 0) {
        const Choice choice = choose_for(call, entry);
        log(call, entry, choice, choice.why_not);
        if (choice.kernel == nullptr) return pass_to_nccl(call);
        others.held = Ours{entry.served, choice, std::move(call)};
        return ncclSuccess;
    }
    if (others.held.has_value()) {
        const Call first = std::exchange(others.held, std::nullopt)->call;
        log(first, entry, {}, kSeveral);
        if (const auto result = pass_to_nccl(first); result != ncclSuccess) return result;
    }
    log(call, entry, {}, kSeveral);
    return pass_to_nccl(call);
}

// Lets NCCL make a call outside of groups, in the order of the communicator's calls.
ncclResult_t pass_in_order(const Entry& entry, CUstream stream,
                           const std::function<ncclResult_t()>& pass_call) {
    if (entry.served == nullptr) return pass_call();
    ncclResult_t result = entry.served->before_passing(stream);
    if (result == ncclSuccess) result = pass_call();
    return result == ncclSuccess ? entry.served->after_passing(stream) : result;
}

// Prepares the streams of a communicator's calls for NCCL's part of a group.
ncclResult_t begin_part(const OfComm& calls) {
    if (calls.is_one()) return ncclSuccess;
    ncclResult_t result = calls.served->before_passing(calls.first());
    if (!calls.held.has_value()) return result;
    for (const CUstream stream : calls.streams) {
        if (result == ncclSuccess) result = calls.served->join(stream, calls.first());
    }
    return result;
}

// Makes a communicator's held call, behind NCCL's part of the group.
ncclResult_t end_part(const OfComm& calls) {
    if (calls.is_one()) return run(*calls.held);
    if (!calls.held.has_value()) return calls.served->after_passing(calls.first());
    ncclResult_t result = ncclSuccess;
    for (const CUstream stream : calls.streams) {
        if (result == ncclSuccess) result = calls.served->join(calls.first(), stream);
    }
    if (result == ncclSuccess) result = run(*calls.held);
    for (const CUstream stream : calls.streams) {
        if (result == ncclSuccess) result = calls.served->join(stream, calls.first());
    }
    return result;
}

// Starts communicators. If that fails, the program gets none of them.
ncclResult_t start_or_abort(const std::vector<Made>& ready) {
    std::vector<ncclComm_t> comms;
    for (const Made& made : ready) comms.push_back(made.comm);
    const ncclResult_t result = start(comms);
    if (result == ncclSuccess) return result;
    const std::string words = own_error();
    for (const Made& made : ready) {
        forget(made.comm);
        KCCL_REAL(ncclCommAbort, made.comm);
        if (*made.place == made.comm) *made.place = nullptr;
    }
    own_error() = words;
    return result;
}

// Starts the communicators that a group has made.
ncclResult_t start_made(ncclResult_t result) {
    std::vector<Made> ready;
    for (const Made& made : std::exchange(group.made, {})) {
        const ncclComm_t comm = made.comm != nullptr ? made.comm : *made.place;
        // A rank that ncclCommSplit leaves out gets none.
        if (comm == nullptr) continue;
        if (made.is_blocking && result == ncclSuccess) {
            ready.push_back({comm, made.place, true});
        } else if (result == ncclInProgress || !made.is_blocking) {
            pass(comm, "it is nonblocking", false);
        }
    }
    return ready.empty() ? result : start_or_abort(ready);
}

ncclResult_t end_outermost_group() {
    const auto calls = std::exchange(group.calls, {});
    ncclResult_t begun = ncclSuccess;
    for (const OfComm& each : calls) {
        if (begun == ncclSuccess) begun = begin_part(each);
    }
    // NCCL's group ends in any case.
    const ncclResult_t passed = KCCL_REAL(ncclGroupEnd);
    const ncclResult_t result = start_made(passed);
    if (begun != ncclSuccess) return begun;
    if (result != ncclSuccess && result != ncclInProgress) return result;
    for (const OfComm& each : calls) {
        if (const auto failed = end_part(each); failed != ncclSuccess) return failed;
    }
    return result;
}

}  // namespace

ncclResult_t make(Call call) try {
    if (InReal::is_here()) return call.pass();
    const auto known = entry_of(call.comm);
    const Entry& entry = *known;
    if (group.depth > 0 && entry.served != nullptr) return make_in_group(std::move(call), entry);
    const Choice choice = choose_for(call, entry);
    log(call, entry, choice, choice.why_not);
    if (choice.kernel == nullptr) {
        return pass_in_order(entry, call.arguments.stream, [&] { return pass_to_nccl(call); });
    }
    return run({entry.served, choice, std::move(call)});
} catch (...) {
    return caught();
}

void log_counts_at_exit() {
    std::atexit([] {
        std::fprintf(stderr, "kccl: process %d: %lu calls by KCCL, %lu by NCCL\n",
                     static_cast<int>(getpid()), calls_of_kccl.load(), calls_of_nccl.load());
    });
}

ncclResult_t make_message(ncclComm_t comm, CUstream stream,
                          const std::function<ncclResult_t()>& pass_call) try {
    if (InReal::is_here()) return pass_call();
    const auto known = entry_of(comm);
    if (known->served == nullptr) return pass_call();
    if (group.depth == 0) return pass_in_order(*known, stream, pass_call);
    add_to_group(comm, known->served, stream).has_messages = true;
    return pass_call();
} catch (...) {
    return caught();
}

ncclResult_t begin_group() {
    const ncclResult_t result = KCCL_REAL(ncclGroupStart);
    if (result == ncclSuccess && !InReal::is_here()) ++group.depth;
    return result;
}

ncclResult_t end_group() try {
    if (InReal::is_here() || group.depth == 0) return KCCL_REAL(ncclGroupEnd);
    return --group.depth > 0 ? KCCL_REAL(ncclGroupEnd) : end_outermost_group();
} catch (...) {
    return caught();
}

ncclResult_t pass_group() try {
    if (InReal::is_here() || group.depth == 0 || --group.depth > 0) return ncclSuccess;
    for (const OfComm& each : std::exchange(group.calls, {})) {
        if (!each.held.has_value()) continue;
        if (const auto result = pass_to_nccl(each.held->call); result != ncclSuccess) return result;
    }
    return ncclSuccess;
} catch (...) {
    return caught();
}

ncclResult_t made(ncclResult_t result, ncclComm_t* comm, bool is_blocking) try {
    const bool is_made = result == ncclSuccess || result == ncclInProgress;
    if (!is_made || comm == nullptr || InReal::is_here()) return result;
    group.made.push_back({*comm, comm, is_blocking && result == ncclSuccess});
    return group.depth > 0 ? result : start_made(result);
} catch (...) {
    return caught();
}

}  // namespace kccl::nccl
