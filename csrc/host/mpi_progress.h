// The hook by which a rank lets MPI make progress while it waits in a call of KCCL.
#pragma once

namespace kccl::host {

// A function that waiting ranks call (kccl_host_idle()), so that MPI makes progress.
// kccl_host_let_mpi_go_on() sets the hook. While it is null, waiting ranks do not call MPI.
extern void (*mpi_hook)();

}  // namespace kccl::host
