// Gives C++ the content of abi.inc: the integer types that it needs, short names for its structs,
// and checks of their sizes, which cffi cannot do.
#pragma once

#include "platform.cuh"

extern "C" {
#include "abi.inc"
}

namespace kccl {

using DeviceComm = ::KcclDeviceComm;
using Call = ::KcclCall;
using State = ::KcclState;
using ChannelState = ::KcclChannelState;
using Record = ::KcclRecord;
using Status = ::KcclStatus;

// A window in the form in which a kernel takes it as an argument: memory of the same size on every
// rank, which all ranks can access. Python's comm.window() and for_kernels() of a host::Window or
// cpu::Window return it. Its functions only compute addresses.
struct Window : KcclWindow {
    // Returns the address of byte `offset` of a peer's part, in this rank's address space. The
    // caller must keep within num_bytes. Only the simulator checks that `peer` is a rank of the
    // window.
    template <class T = uint8_t>
    KCCL_DEVICE T* at(int peer, uint64_t offset = 0) const {
#if defined(KCCL_TARGET_SIM)
        if (peer < 0 || peer >= world_size) {
            const KcclSimRefusal refusal = {"Window::at", "peer", uint64_t(int64_t{peer}),
                                            "at least 0 and below {}, the ranks of the window",
                                            uint64_t(world_size)};
            kccl_sim_engine->refuse_argument(&refusal);
        }
#endif
        return reinterpret_cast<T*>(address[peer] + offset);
    }
    // Returns the address of byte `offset` of this rank's own part.
    template <class T = uint8_t>
    KCCL_DEVICE T* local(uint64_t offset = 0) const {
        return at<T>(rank, offset);
    }
};

static_assert(sizeof(KcclSizes) == 16 + 24, "KcclSizes: no padding");
static_assert(sizeof(KcclLayout) == 128, "KcclLayout: sixteen 8-byte fields, no padding");
static_assert(sizeof(KcclRecord) == 40, "KcclRecord: eight words and the time, no padding");
static_assert(sizeof(KcclMailbox) == 16 + 40, "KcclMailbox: no padding");
static_assert(sizeof(KcclRecord) <= kKcclLineBytes, "a record fits in the line of its source");
static_assert(sizeof(KcclDeviceComm) == 32 + 16 + 2 * 8 * kKcclMaxWorldSize + 128,
              "KcclDeviceComm: no padding");
static_assert(sizeof(KcclWindow) == 16 + 8 * kKcclMaxWorldSize, "KcclWindow: no padding");
static_assert(sizeof(Window) == sizeof(KcclWindow), "Window adds functions only");
static_assert(sizeof(KcclChannelState) == 16, "KcclChannelState: four words, no padding");
static_assert(sizeof(KcclCall) == sizeof(KcclDeviceComm) + 56 + 136 + 136 + 8 + 32,
              "KcclCall: no padding");

}  // namespace kccl
