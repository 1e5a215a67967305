// Decides, call by call.
//
// In a group, a collective is KCCL's only if it is the communicator's only one. Messages do not
// count, because ranks send different ones. Such a call is held until the outermost group ends.
// NCCL's calls come first then. The held ones follow in the order of the communicators' numbers,
// which is the same on all ranks: calls that are made one by one would wait for each other
// otherwise.
#include "calls.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "real.h"

namespace kccl::nccl {

namespace {

// A call that KCCL makes.
struct Ours {
    std::shared_ptr<Served> served;
    Choice choice;
    Call call;
};

// The collectives of a communicator in a group.
struct OfComm {
    int number = 0;
    std::optional<Ours> held;  // the first, if it is the only one and KCCL's
};

// A communicator that a group makes.
struct Made {
    ncclComm_t comm;
    ncclComm_t* place;  // where NCCL writes it, if it is not known yet
    bool is_blocking;
};

struct Group {
    int depth = 0;
    std::map<ncclComm_t, OfComm> calls;
    std::vector<Made> made;
};

thread_local Group group;

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

ncclResult_t run(const Ours& ours) {
    const ncclResult_t result = ours.served->call(ours.choice, ours.call.arguments);
    if (result != ncclSuccess && mode() == Mode::kLog) {
        std::fprintf(stderr, "kccl: rank %d: %s failed: %s\n", ours.served->rank(), ours.call.name,
                     own_error().c_str());
    }
    return result;
}

ncclResult_t make_in_group(Call call, const Entry& entry) {
    OfComm& others = group.calls[call.comm];
    constexpr const char* kSeveral = "the group has several collectives of the communicator";
    if (others.number++ == 0) {
        const Choice choice = choose_for(call, entry);
        log(call, entry, choice, choice.why_not);
        if (choice.kernel == nullptr) return call.pass();
        others.held = Ours{entry.served, choice, std::move(call)};
        return ncclSuccess;
    }
    if (others.held.has_value()) {
        const Call first = std::exchange(others.held, std::nullopt)->call;
        log(first, entry, {}, kSeveral);
        if (const auto result = first.pass(); result != ncclSuccess) return result;
    }
    log(call, entry, {}, kSeveral);
    return call.pass();
}

// Starts the communicators that a group has made.
ncclResult_t start_made(ncclResult_t result) {
    std::vector<ncclComm_t> ready;
    for (const Made& made : std::exchange(group.made, {})) {
        const ncclComm_t comm = made.comm != nullptr ? made.comm : *made.place;
        if (comm == nullptr) continue;
        if (made.is_blocking && result == ncclSuccess) {
            ready.push_back(comm);
        } else if (result == ncclInProgress || !made.is_blocking) {
            pass(comm, "it is nonblocking", false);
        }
    }
    return ready.empty() ? result : start(ready);
}

}  // namespace

ncclResult_t make(Call call) {
    if (InReal::is_here()) return call.pass();
    const auto known = entry_of(call.comm);
    const Entry& entry = *known;
    if (group.depth > 0 && entry.served != nullptr) return make_in_group(std::move(call), entry);
    const Choice choice = choose_for(call, entry);
    log(call, entry, choice, choice.why_not);
    return choice.kernel != nullptr ? run({entry.served, choice, std::move(call)}) : call.pass();
}

ncclResult_t begin_group() {
    const ncclResult_t result = KCCL_REAL(ncclGroupStart);
    if (result == ncclSuccess && !InReal::is_here()) ++group.depth;
    return result;
}

ncclResult_t end_group() {
    ncclResult_t result = KCCL_REAL(ncclGroupEnd);
    if (InReal::is_here() || group.depth == 0 || --group.depth > 0) return result;
    auto calls = std::exchange(group.calls, {});
    result = start_made(result);
    if (result != ncclSuccess && result != ncclInProgress) return result;
    std::vector<Ours> ours;
    for (auto& each : calls) {
        if (each.second.held.has_value()) ours.push_back(std::move(*each.second.held));
    }
    std::sort(ours.begin(), ours.end(), [](const Ours& one, const Ours& other) {
        return one.served->id() < other.served->id();
    });
    for (const Ours& each : ours) {
        if (const auto failed = run(each); failed != ncclSuccess) return failed;
    }
    return result;
}

void drop_group() {
    if (InReal::is_here() || group.depth == 0) return;
    if (--group.depth == 0) group.calls.clear();
}

ncclResult_t made(ncclResult_t result, ncclComm_t* comm, bool is_blocking) {
    const bool is_made = result == ncclSuccess || result == ncclInProgress;
    if (!is_made || comm == nullptr || InReal::is_here()) return result;
    if (group.depth > 0) {
        group.made.push_back({*comm, comm, is_blocking && result == ncclSuccess});
        return result;
    }
    // A rank that ncclCommSplit leaves out gets none.
    if (*comm == nullptr) return result;
    if (!is_blocking || result == ncclInProgress) {
        pass(*comm, "it is nonblocking", false);
        return result;
    }
    result = start({*comm});
    if (result == ncclSuccess) return result;
    KCCL_REAL(ncclCommAbort, *comm);
    *comm = nullptr;
    return result;
}

}  // namespace kccl::nccl
