// abi.inc for the monokernel: short names for its structs, and checks of their sizes, which cffi
// could not read.
#pragma once

#include <kccl/kccl.cuh>

extern "C" {
#include "../abi.inc"
}

namespace kccl::decode {

using Module = ::KcclDecodeModule;
using Layer = ::KcclDecodeLayer;
using Sampling = ::KcclEngineSampling;
using Task = ::KcclDecodeTask;
using Token = ::KcclDecodeToken;
using Mailbox = ::KcclDecodeMailbox;
using Stamp = ::KcclDecodeStamp;
using StageStamp = ::KcclDecodeStageStamp;

static_assert(sizeof(Layer) == 48, "Layer: two modules and four words, no padding");
static_assert(sizeof(Sampling) == 48, "Sampling: five 8-byte fields and two words, no padding");
static_assert(sizeof(Task) == 8ull * 31 + 4 * 10 + sizeof(Sampling) + 8, "Task: no padding");
static_assert(sizeof(Task::boards) == 8ull * kKcclMaxWorldSize, "one address for each rank");
static_assert(sizeof(Task::logits) == 8ull * kKcclMaxWorldSize, "one address for each rank");
static_assert(sizeof(Token) == 16, "Token: one packet");
static_assert(kKcclDecodeTileBytes == 2 * kKcclDecodeTileRows * kKcclDecodeTileColumns,
              "abi.inc spells it as a literal because cffi reads it");

}  // namespace kccl::decode
