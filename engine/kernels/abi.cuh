// Gives the structs of abi.inc short names for the monokernel, and checks their sizes, which cffi
// cannot do.
#pragma once

#include "device.cuh"

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
static_assert(sizeof(Task) == 8ull * 40 + 4 * 20 + sizeof(Sampling) + 8, "Task: no padding");
static_assert(sizeof(Token) == 16, "Token: one packet");

}  // namespace kccl::decode
