// Calls of MPI's functions, by addresses that Python has looked up (kccl/ranks/mpi.py).
#pragma once

#include <string.h>

#include "nodes.h"

namespace kccl::host {
namespace {

// Bytes of room for an MPI_Status. It has fewer in MPICH and in Open MPI.
constexpr uint64_t kStatusBytes = 64;

// MPI's functions for one type of handles: int in MPICH, a pointer in Open MPI. `request` points to
// 8 bytes, room for an MPI_Request of either type. isend() and irecv() return MPI's error code.
template <class Handle>
struct Mpi {
    using Isend = int (*)(const void*, int, Handle, int, int, Handle, void*);
    using Irecv = int (*)(void*, int, Handle, int, int, Handle, void*);
    using Iprobe = int (*)(int, int, Handle, int*, void*);

    static int isend(const KcclNodes& nodes, const void* from, int bytes, int to, int tag,
                     uint64_t* request) {
        return reinterpret_cast<Isend>(nodes.isend)(from, bytes, handle(nodes.byte), to, tag,
                                                    handle(nodes.comm), request);
    }
    static int irecv(const KcclNodes& nodes, void* to, int bytes, int from, int tag,
                     uint64_t* request) {
        return reinterpret_cast<Irecv>(nodes.irecv)(to, bytes, handle(nodes.byte), from, tag,
                                                    handle(nodes.comm), request);
    }

    // Lets MPI make progress, by a probe whose result does not matter.
    static void progress(const KcclNodes& nodes) {
        int is_there = 0;
        alignas(8) uint8_t status[kStatusBytes];
        reinterpret_cast<Iprobe>(nodes.iprobe)(nodes.mpi_rank[nodes.rank], nodes.tag,
                                               handle(nodes.comm), &is_there, status);
    }

  private:
    static Handle handle(uint64_t value) {
        Handle made;
        memcpy(&made, &value, sizeof(made));
        return made;
    }
};

}  // namespace
}  // namespace kccl::host
