// What the ranks of a communicator tell each other before KCCL serves it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kccl::nccl {

// A rank of a communicator, as its peers get to know it.
struct Record {
    uint64_t pid, pids;    // the process, and the namespace of such numbers
    uint64_t network;      // the namespace in which processes pass each other memory
    char machine[40];      // a number that the machine draws when it starts
    char device[16];       // the UUID of the GPU
    uint32_t abi, tables;  // what must be the same library
    char why_not[256];     // why this rank cannot; "": it can
};

// Describes this process with the GPU of an ordinal. reason: why it cannot, as far as the caller
// knows; "": it can.
Record describe(int ordinal, const std::string& reason);

// Returns why the communicator of these ranks is not served; "" if it is. All ranks get the same.
std::string why_not(const std::vector<Record>& all);

// Returns a variable of the environment; "" if there is none.
std::string variable(const char* name);

}  // namespace kccl::nccl
