// Describes a rank, and compares what the ranks say.
#include "peers.h"

#include <cuda.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

#include "../include/kccl/abi.h"
#include "communicators.h"
#include "plan.h"

namespace kccl::nccl {

namespace {

uint64_t inode(const char* path) {
    struct stat found = {};
    return stat(path, &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}

template <std::size_t N>
void set(char (&to)[N], const std::string& text) {
    std::snprintf(to, N, "%s", text.c_str());
}

// Says what the machine lacks that those of bench/records have, from which the tables are; "":
// nothing. Only GPUs that this process sees can be asked for their links.
std::string unlike_measured(int ordinal) {
    if (const auto told = variable("NCCL_P2P_DISABLE"); !told.empty() && told != "0") {
        return "NCCL_P2P_DISABLE=" + told;
    }
    if (const auto told = variable("NCCL_P2P_LEVEL"); told == "LOC" || told == "0") {
        return "NCCL_P2P_LEVEL=" + told;
    }
    constexpr int kHopper = 9;
    int major = 0, minor = 0, devices = 0;
    cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal);
    cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, ordinal);
    if (major != kHopper || minor != 0) {
        return "nothing was measured on compute capability " + std::to_string(major) + "." +
               std::to_string(minor);
    }
    cuDeviceGetCount(&devices);
    for (int peer = 0; peer < devices; ++peer) {
        int is_linked = 0;
        // NVLink has atomic operations between GPUs, and PCIe has not.
        if (peer == ordinal ||
            (cuDeviceGetP2PAttribute(&is_linked, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                                     ordinal, peer) == CUDA_SUCCESS &&
             is_linked != 0)) {
            continue;
        }
        return "nothing was measured without NVLink, and GPU " + std::to_string(peer) + " has none";
    }
    return "";
}

}  // namespace

std::string variable(const char* name) {
    const char* told = std::getenv(name);
    return told != nullptr ? told : "";
}

Record describe(int ordinal, const std::string& reason) {
    Record mine = {};
    mine.pid = static_cast<uint64_t>(getpid());
    mine.pids = inode("/proc/self/ns/pid");
    mine.network = inode("/proc/self/ns/net");
    std::string machine;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), machine);
    set(mine.machine, machine);
    CUuuid uuid = {};
    cuDeviceGetUuid(&uuid, ordinal);
    std::memcpy(mine.device, uuid.bytes, sizeof(mine.device));
    mine.abi = kKcclAbiVersion;
    mine.tables = tables_hash();
    if (mode() == Mode::kOff) {
        set(mine.why_not, "KCCL_NCCL=off");
    } else if (!reason.empty()) {
        set(mine.why_not, reason);
    } else if (const std::string unlike = unlike_measured(ordinal); !unlike.empty()) {
        set(mine.why_not, unlike);
    } else if (machine.empty()) {
        set(mine.why_not, "the machine has no boot_id");
    }
    return mine;
}

std::string why_not(const std::vector<Record>& all) {
    const Record& first = all[0];
    std::set<std::pair<uint64_t, uint64_t>> processes;
    std::set<std::string> devices;
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
        const Record& record = all[peer];
        const std::string who = "rank " + std::to_string(peer);
        if (record.why_not[0] != '\0') return who + ": " + record.why_not;
        if (record.abi != first.abi || record.tables != first.tables) {
            return who + " has another libkccl_nccl.so than rank 0";
        }
        if (std::strcmp(record.machine, first.machine) != 0 || record.network != first.network) {
            return who + " is on another machine than rank 0, or in another container";
        }
        processes.emplace(record.pids, record.pid);
        devices.emplace(record.device, sizeof(record.device));
    }
    if (processes.size() < all.size()) return "a process has several of its ranks";
    if (devices.size() < all.size()) return "ranks share a GPU";
    return "";
}

}  // namespace kccl::nccl
