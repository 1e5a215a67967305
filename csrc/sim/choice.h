// How the simulator makes the choices of a run: which thread makes the next step, and which value a
// load returns. They follow from random numbers of a seed, or from a list of decisions (Tape).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace kccl::sim {

class Random {
  public:
    explicit Random(uint64_t seed = 0) : state_(seed) {}

    // Returns the next random number, by the generator splitmix64: seeds like 0, 1, 2, ... give
    // unrelated sequences.
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    // Returns a number below bound, which is not 0.
    uint32_t below(uint32_t bound) { return static_cast<uint32_t>(((next() >> 32) * bound) >> 32); }
    bool one_in(uint32_t n) { return below(n) == 0; }

  private:
    uint64_t state_;
};

// A list of decisions that determines a run, for an exhaustive search. Each is a number below a
// bound. 0 means that nothing unusual happens: the running thread goes on, and a load returns the
// newest value.
class Tape {
  public:
    void rewind() {
        choices.clear();
        bounds.clear();
    }
    uint32_t next(uint32_t bound) {
        const size_t at = choices.size();
        const uint32_t choice = at < prefix.size() ? prefix[at] % bound : 0;
        choices.push_back(static_cast<uint8_t>(choice));
        bounds.push_back(static_cast<uint8_t>(bound));
        return choice;
    }

    std::vector<uint8_t> prefix;   // the first decisions of the next run; all later ones are 0
    std::vector<uint8_t> choices;  // the decisions of this run so far
    std::vector<uint8_t> bounds;   // the bound of each of them
};

}  // namespace kccl::sim
