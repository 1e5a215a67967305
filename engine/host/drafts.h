// Drafts: guesses of the next tokens of a text. One pass runs a few of them behind the last token,
// and so reads the weights once. A draft counts as a token only if it equals the token that is
// chosen for its place. So drafts change how long an answer takes, and never its tokens.
#pragma once

#include "ngrams.h"

namespace kccl::engine {

// Writes guesses of the ids that follow on a text to `drafts`. Looks for the longest run, of 3 to
// 16 ids, that the text ends with and also has before. Of several such places it takes the last,
// and copies the ids behind it. Returns the number of ids: `most`, or 0 if there is no such place.
uint32_t repeat(const int32_t* ids, uint32_t num_ids, uint32_t most, int32_t* drafts);

// Decides how many drafts a pass (a run of the model over a few positions) has, if a request leaves
// that to the engine. The number follows from counts of drafts alone, never from times, so a
// request takes the same passes each time.
//
// At least 8 drafts in a row are a trial. The share of them that was accepted decides how many
// drafts each of the next passes has: 7, 3, the first trial's number, or none. Without drafts there
// are 16 passes, and then a trial of 4 drafts follows. Each trial that fails doubles the pause, up
// to 256 passes. The shares are the backend's (model/drafts.py).
class Pace {
  public:
    // pace: KcclEngineDraftPace.
    explicit Pace(uint32_t pace)
        : first_(pace >> kKcclEngineFirstAt & 255),
          seven_(pace >> kKcclEngineSevenAt & 255),
          three_(pace >> kKcclEngineThreeAt & 255),
          least_(pace >> kKcclEngineLeastAt & 255),
          most_(first_) {}
    // Returns how many drafts the next pass has at most. Called once for each pass.
    uint32_t next();
    // Reports to the Pace how many drafts a pass had, and how many of them were accepted.
    void learn(uint32_t num_drafts, uint32_t num_accepted);

  private:
    static constexpr uint32_t kTrial = 8, kNextTrial = 4, kFirstPause = 16, kLongestPause = 256;
    uint32_t first_, seven_, three_, least_;
    uint32_t most_;
    uint32_t trial_ = kTrial;             // how many drafts this trial has at least
    uint32_t drafts_ = 0, accepted_ = 0;  // in this trial so far
    uint32_t pause_ = 0;                  // how many passes without drafts still follow
    uint32_t next_pause_ = kFirstPause;
};

// Makes the drafts of one request. Only the leading block, block 0 of rank 0, uses it.
class Drafts {
  public:
    void begin(const KcclEngineRequest& request);

    // Writes the drafts of the next pass, at most `room`, to `drafts`. Returns their number.
    uint32_t propose(const int32_t* ids, uint32_t num_ids, uint32_t room, int32_t* drafts);

    // Reports how many drafts the last pass had, and how many of them were accepted.
    void learn(uint32_t num_drafts, uint32_t num_accepted);

  private:
    uint32_t most_ = 0;
    bool adapts_ = false;  // whether pace_ decides
    KcclEngineDrafter drafter_ = nullptr;
    void* context_ = nullptr;
    Ngrams ngrams_;
    Pace pace_{0};
};

}  // namespace kccl::engine
