// Looks a call up in the tables.
#include "plan.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "../include/kccl/abi.h"

namespace kccl::nccl {

namespace {

#include "plan.inc"

struct Type {
    ncclDataType_t type;
    size_t num_bytes;
    const char* name;
    uint32_t dtype;  // KcclDtype
};

constexpr Type kTypes[] = {
    {ncclInt8, 1, "int8", kKcclInt8},
    {ncclUint8, 1, "uint8", kKcclUint8},
    {ncclInt32, 4, "int32", kKcclInt32},
    {ncclUint32, 4, "uint32", kKcclUint32},
    {ncclInt64, 8, "int64", kKcclInt64},
    {ncclUint64, 8, "uint64", kKcclUint64},
    {ncclFloat16, 2, "float16", kKcclFloat16},
    {ncclFloat32, 4, "float32", kKcclFloat32},
    {ncclFloat64, 8, "float64", kKcclFloat64},
    {ncclBfloat16, 2, "bfloat16", kKcclBfloat16},
#if NCCL_VERSION_CODE >= 22400
    {ncclFloat8e4m3, 1, "float8_e4m3fn", kKcclFloat8E4m3fn},
    {ncclFloat8e5m2, 1, "float8_e5m2", kKcclFloat8E5m2},
#endif
};

const Type* find(ncclDataType_t type) {
    const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                     [type](const Type& each) { return each.type == type; });
    return found == std::end(kTypes) ? nullptr : found;
}

constexpr uint64_t rounded_up(uint64_t number, uint64_t unit) { return (number + unit - 1) / unit; }

}  // namespace

size_t bytes_of(ncclDataType_t type) {
    const Type* found = find(type);
    return found == nullptr ? 0 : found->num_bytes;
}

const char* name_of(ncclDataType_t type) {
    const Type* found = find(type);
    return found == nullptr ? "an unknown type" : found->name;
}

uint32_t tables_hash() { return kTablesHash; }

bool has_world_size(int world_size) {
    return std::any_of(std::begin(kLines), std::end(kLines),
                       [=](const Line& line) { return line.world_size == world_size; });
}

Choice choose(const Request& request) {
    Choice choice = {};
    const Type* type = find(request.type);
    if (type == nullptr) {
        choice.why_not = "KCCL does not know the type";
        return choice;
    }
    if (request.count == 0) {
        choice.why_not = "there is nothing to do";
        return choice;
    }
    if (request.op != ncclSum) {
        choice.why_not = "KCCL makes sums only";
        return choice;
    }
    constexpr uint64_t kMost = uint64_t{1} << 40;
    if (request.count > kMost) {
        choice.why_not = "the message is long";
        return choice;
    }
    const bool moves = request.collective == Collective::kAllGather ||
                       request.collective == Collective::kBroadcast;
    const bool has_chunks = request.collective == Collective::kAllGather ||
                            request.collective == Collective::kReduceScatter;
    choice.peer_bytes = request.count * type->num_bytes;
    choice.num_bytes = choice.peer_bytes * (has_chunks ? request.world_size : 1);
    choice.dtype = moves ? uint32_t{kKcclUint8} : type->dtype;
    choice.count = moves ? choice.peer_bytes : request.count;
    choice.has_root = request.collective == Collective::kBroadcast;
    choice.why_not = "KCCL has no kernels for the type and the number of ranks";
    for (const Line& line : kLines) {
        if (line.collective != request.collective || line.world_size != request.world_size ||
            line.dtype != choice.dtype) {
            continue;
        }
        choice.why_not = "NCCL may be faster at this size";
        if (choice.num_bytes > line.up_to_bytes) continue;
        choice.kernel = &kKernels[line.kernel];
        choice.blocks = line.blocks;
        choice.threads = line.threads;
        choice.why_not = nullptr;
        break;
    }
    return choice;
}

uint32_t most_threads() { return kMostThreads; }
uint32_t warp_size() { return kWarpSize; }

Shape shape_of(const Choice& choice, uint32_t most_threads, uint32_t most_blocks) {
    const uint64_t most = std::min(most_threads, kMostThreads) / kWarpSize * kWarpSize;
    const uint64_t packets =
        std::max(rounded_up(choice.peer_bytes, choice.kernel->bytes_per_thread), uint64_t{1});
    const uint64_t planned = choice.blocks != 0 ? choice.blocks : kBlocksPerChannel;
    const uint64_t threads = choice.threads != 0 ? choice.threads : kThreadsPerBlock;
    const uint64_t blocks =
        std::min({rounded_up(packets, std::min(threads, most)), planned, uint64_t{most_blocks}});
    const uint64_t each = rounded_up(packets, blocks * kWarpSize) * kWarpSize;
    const uint64_t units = rounded_up(choice.peer_bytes, kShareUnitBytes);
    return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(std::min(each, most)),
            blocks > 1 ? static_cast<uint32_t>(rounded_up(units, blocks)) : 0};
}

}  // namespace kccl::nccl
