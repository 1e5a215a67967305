#include "drafts.h"

#include <algorithm>
#include <cfenv>

namespace kccl::engine {
namespace {

// repeat() looks for at least kFewestAlike ids in a row that the text has twice, and compares at
// most kMostAlike.
constexpr uint32_t kFewestAlike = 3, kMostAlike = 16;

}  // namespace

uint32_t repeat(const int32_t* ids, uint32_t num_ids, uint32_t most, int32_t* drafts) {
    uint32_t best = kFewestAlike - 1, from = 0;
    // Compares the ids in front of `end` with the ids at the end of the text.
    for (uint32_t end = num_ids - 1; end > best && best < kMostAlike; --end) {
        const uint32_t longest = std::min(end, kMostAlike);
        uint32_t alike = 0;
        while (alike < longest && ids[end - 1 - alike] == ids[num_ids - 1 - alike]) ++alike;
        if (alike > best) {
            best = alike;
            from = end;
        }
    }
    if (best < kFewestAlike) return 0;
    // If `from` is so close to the end of the text that the ids behind it run out, the drafts go on
    // with the first drafts.
    for (uint32_t i = 0; i < most; ++i) {
        drafts[i] = from + i < num_ids ? ids[from + i] : drafts[from + i - num_ids];
    }
    return most;
}

uint32_t Pace::next() {
    if (pause_ == 0) return most_;
    --pause_;
    return 0;
}

void Pace::learn(uint32_t num_drafts, uint32_t num_accepted) {
    drafts_ += num_drafts;
    accepted_ += num_accepted;
    if (drafts_ < trial_) return;
    const uint32_t accepted = kKcclEngineWhole * accepted_;
    most_ = accepted >= seven_ * drafts_ ? 7 : accepted >= three_ * drafts_ ? 3 : first_;
    if (accepted >= least_ * drafts_) {
        trial_ = kTrial;
        next_pause_ = kFirstPause;
    } else {
        trial_ = kNextTrial;
        pause_ = next_pause_;
        next_pause_ = std::min(2 * next_pause_, kLongestPause);
    }
    drafts_ = accepted_ = 0;
}

void Drafts::begin(const KcclEngineRequest& request) {
    most_ = std::min<uint32_t>(request.most_drafts, kKcclEngineMaxDrafts);
    adapts_ = request.draft_pace != 0;
    drafter_ = reinterpret_cast<KcclEngineDrafter>(request.drafter);
    context_ = reinterpret_cast<void*>(request.drafter_context);
    ngrams_ = Ngrams(request.ngrams);
    pace_ = Pace(request.draft_pace);
}

uint32_t Drafts::propose(const int32_t* ids, uint32_t num_ids, uint32_t room, int32_t* drafts) {
    uint32_t most = std::min(most_, room);
    if (most != 0 && adapts_) most = std::min(most, pace_.next());
    if (most == 0) return 0;
    if (drafter_ == nullptr) {
        const uint32_t num_copied = repeat(ids, num_ids, most, drafts);
        return num_copied != 0 ? num_copied : ngrams_.propose(ids, num_ids, most, drafts);
    }
    // A drafter may change the thread's rounding, or flush its subnormal numbers to zero. What this
    // thread computes next must not depend on that.
    std::fenv_t environment;
    std::fegetenv(&environment);
    const uint32_t num_drafts = drafter_(context_, ids, num_ids, most, drafts);
    std::fesetenv(&environment);
    return std::min(num_drafts, most);
}

void Drafts::learn(uint32_t num_drafts, uint32_t num_accepted) {
    if (adapts_) pace_.learn(num_drafts, num_accepted);
}

}  // namespace kccl::engine
