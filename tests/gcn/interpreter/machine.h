// Runs the waves of all blocks of all ranks, always the one that is furthest behind.
#pragma once

#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>

#include "caches.h"
#include "settings.inc"
#include "wave.h"

namespace gcn {

// An access of one wave, on its way. In `parts` because its lanes, and the halves of 16 bytes, may
// take place at different times.
struct Access {
    enum class Kind : uint8_t { kLoad, kStore, kAtomic, kWriteBack };
    enum class Space : uint8_t { kMemory, kShared, kPrivate };
    Kind kind = Kind::kLoad;
    Wave* wave = nullptr;
    const Instruction* in = nullptr;
    Scope scope = Scope::kBlock;
    uint64_t mask = 0;         // lanes that touch memory
    uint64_t result_mask = 0;  // lanes that get a value
    std::array<uint64_t, kLanes> address = {};
    std::array<Space, kLanes> space = {};
    int words = 1, bytes = 4;  // of a word
    std::array<int, 4> word_offset = {0, 4, 8, 12};
    std::array<Lanes, 4> data = {};
    std::array<Lanes, 2> compared = {};
    uint64_t (*change)(uint64_t, uint64_t, uint64_t) = nullptr;
    int result = -1;  // where its words go in the file of vectors
    int scalar_result = -1, num_scalars = 0;
    // What becomes of a load of less than 4 bytes: sign-extended; put into a half of the register.
    bool is_signed = false, to_high_half = false, to_low_half = false;
    uint64_t id = 0;
    int parts_left = 0;
    Time done = 0;
};

struct Launch {
    int rank = 0;
    std::shared_ptr<const Program> program;
    const Kernel* kernel = nullptr;
    uint32_t grid = 0, block = 0, shared_bytes = 0;
    std::vector<uint8_t> arguments;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Wave>> waves;
    int num_running = 0;
    uint64_t num_accesses = 0;
    Time begin = 0, end = 0;
};

class Machine {
  public:
    explicit Machine(const GcnSettings& settings);

    Memory& memory() { return memory_; }
    void enqueue(std::unique_ptr<Launch> launch);
    // Runs all launches, those of a rank one after another. False: finding() says what is wrong.
    bool run();
    const std::string& finding() const { return finding_; }
    const std::vector<std::unique_ptr<Launch>>& launches() const { return launches_; }
    const std::map<std::string_view, uint64_t>& executed() const { return executed_; }

    // For handlers.
    void issue(std::unique_ptr<Access> access, bool counts_vector, bool counts_other);
    void wait_for(Wave& wave, int vector, int other);
    void arrive_at_barrier(Wave& wave);
    void end(Wave& wave);
    void sleep(Wave& wave, int count);
    // What an instruction returns that is right to one unit of the last place. With a seed it is,
    // for some inputs, the second nearest float.
    uint32_t nearly(double exact, uint32_t input) const;
    uint64_t realtime(Time now) const { return static_cast<uint64_t>(now) / 10000; }
    uint64_t cycles(Time now) const { return static_cast<uint64_t>(now / settings_.cycle); }

  private:
    struct Event {
        Time time;
        uint64_t number;
        enum class Kind : uint8_t { kStep, kPart, kDone } kind;
        Wave* wave;
        Access* access;
        uint64_t lanes;
        uint8_t words;
        bool operator<(const Event& other) const {
            return time != other.time ? time > other.time : number > other.number;
        }
    };

    void begin_next(int rank, Time now);
    void step(Wave& wave);
    void cost(Wave& wave, const Instruction& in);
    void open_barrier_if_met(Block& block);
    void perform(const Event& event);
    void finish(Access* access, Time now);
    bool are_met(Wave& wave, int vector, int other) const;
    void mark_waited(Wave& wave, int vector, int other);
    Time journey(Access& access);
    Time in_order(Access& access, uint64_t lanes, Time time);
    void push(Event event);
    Time jittered(Time time);
    void end_launch_if_done(Launch& launch, Time now);
    std::string stuck() const;

    const GcnSettings settings_;
    Memory memory_;
    std::mt19937_64 random_;
    std::priority_queue<Event> events_;
    std::vector<std::unique_ptr<Launch>> launches_;
    std::vector<std::vector<Launch*>> waiting_;  // of each rank, in order
    std::map<Access*, std::unique_ptr<Access>> under_way_;
    std::vector<std::array<Time, 128>> channel_free_;
    std::vector<Time> link_free_;
    std::map<std::string_view, uint64_t> executed_;
    std::set<const Program*> with_constants_;  // whose constants are in memory
    std::string finding_;
    uint64_t next_event_ = 0, next_access_ = 0;
    Wave* current_ = nullptr;
    const Instruction* access_ = nullptr;  // of which a part takes place
};

}  // namespace gcn
