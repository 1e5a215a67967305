// Makes the steps of a call in which each rank posts its part in its own memory, and copies the
// parts of others that it needs: include/kccl/postings.cuh.
#include "postings.h"

#include "../include/kccl/payload.cuh"
#include "../include/kccl/postings.cuh"

namespace kccl::host {
namespace {

// Waits until another rank has posted its part, that is, until is_there() returns true. Fails the
// communicator and returns false when that rank is lost, when any rank gives up, or at the timeout,
// as a wait for a message does (MessagePatience).
struct Wait {
    const KcclCall& call;
    KcclRoutes& routes;
    uint64_t number;

    template <class IsThere>
    bool operator()(int source, IsThere is_there) const {
        if (is_there()) return true;
        const DeviceComm& comm = call.comm;
        const Awaited awaited = {call.kernel | kKcclPosted, call.channel,
                                 static_cast<uint32_t>(number)};
        MessagePatience patience(routes, awaited, uint64_t{1} << source, true, true);
        for (;;) {
            for (uint32_t i = 0; i < comm.polls_per_check; ++i) {
                if (is_there()) return true;
                mem::poll_pause();
            }
            if (!patience.may_go_on(comm, 0)) return false;
        }
    }
};

// One kKcclPostStep, as one rank makes it.
class PostedCall {
  public:
    PostedCall(const KcclHostTeams& teams, KcclHostStep& step)
        : teams_(teams),
          step_(step),
          call_(step.op.call),
          number_(reinterpret_cast<uint64_t*>(shared().numbers)[call_.channel]),
          postings_(reinterpret_cast<const uint64_t*>(shared().parts),
                    static_cast<uint64_t>(call_.channel) * Postings<>::kBytes, call_.comm.rank,
                    call_.comm.world_size, number_),
          wait_{call_, *reinterpret_cast<KcclRoutes*>(teams.routes), number_ + 1} {}

    bool make() {
        if (!postings_.begin(wait_)) return false;
        number_ = postings_.number();
        if (step_.num_posted != 0) {
            mem::copy(postings_.room(), input_of<uint8_t>(call_), step_.num_posted, 0, 1);
        }
        postings_.post(num_bytes(), call_bits());
        const auto* takes = reinterpret_cast<const KcclTake*>(step_.takes);
        for (uint32_t i = 0; i < step_.num_takes; ++i) {
            if (!take(takes[i])) return false;
        }
        const bool compares = step_.op.is_new != 0 || step_.compares_always != 0;
        step_.op.is_new = 0;
        if (!compares && !postings_.begins_batch()) return true;
        return is_made_by_all();
    }

  private:
    const KcclPostings& shared() const {
        return *reinterpret_cast<const KcclPostings*>(teams_.postings);
    }
    uint64_t num_bytes() const { return call_.count * step_.op.bytes_per_count; }
    // Returns what the ranks compare of this call (kernel, type, operator, root), packed as in
    // KcclRecord.call.
    uint32_t call_bits() const { return call_in_bits(call_) | kKcclPosted << 24; }

    bool take(const KcclTake& take) {
        if (!postings_.await(take.source, wait_) || !is_same(take.source)) return false;
        mem::copy(output_of<uint8_t>(call_) + take.to_offset,
                  postings_.part_of(take.source) + take.from_offset, take.num_bytes, 0, 1);
        return true;
    }

    // Compares this call with the calls of all ranks that have posted, also of those whose parts
    // this rank does not need. All ranks do so in the first call of a batch, and in each call of a
    // step that compares always: if two ranks' calls differ there, the rank that posts later sees
    // it, before it sends or receives messages of the call. A rank also does so in the first call
    // of a new step, to find most mistakes sooner. A difference that no rank has seen is found in
    // a later call, because each posting has a hash of all calls before it.
    bool is_made_by_all() const {
        mem::fence<mem::Order::kSeqCst, mem::Scope::kSystem>();
        for (int source = 0; source < call_.comm.world_size; ++source) {
            if (postings_.has_posted(source) && !is_same(source)) return false;
        }
        return true;
    }

    // Tells whether rank `source` has made the same call as this rank, and the same calls before
    // it. If not, fails the communicator.
    bool is_same(int source) const {
        const PostingHead& head = *postings_.head(source);
        const uint64_t theirs = mem::load_plain(&head.num_bytes);
        const uint64_t call = mem::load_plain(&head.call);
        const uint64_t history = mem::load_plain(&head.history);
        if (theirs == num_bytes() && call == call_bits() &&
            history == mem::load_plain(&postings_.head(call_.comm.rank)->history)) {
            return true;
        }
        constexpr uint64_t kMost = 0xffffffff;
        const auto most = [](uint64_t bytes) {
            return static_cast<uint32_t>(bytes < kMost ? bytes : kMost);
        };
        fail_all(teams_,
                 Record{kKcclCallsDiffer, call_.comm.rank, source, call_.kernel | kKcclPosted,
                        call_.channel, most(num_bytes()), most(theirs), call_bits(), call});
        return false;
    }

    const KcclHostTeams& teams_;
    KcclHostStep& step_;
    const KcclCall& call_;
    uint64_t& number_;
    Postings<> postings_;
    const Wait wait_;
};

}  // namespace

bool run_posted(const KcclHostTeams& teams, KcclHostStep& step) {
    return PostedCall(teams, step).make();
}

}  // namespace kccl::host

extern "C" {

uint64_t kccl_host_postings_bytes(uint32_t num_channels) {
    return num_channels * kccl::Postings<>::kBytes;
}

uint64_t kccl_host_posting_bytes(void) { return kccl::kPostingBytes; }

}  // extern "C"
