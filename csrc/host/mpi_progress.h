// Lets MPI make progress while ranks wait.
#pragma once

namespace kccl::host {

// A function that waits call, so that MPI makes progress. kccl_host_let_mpi_go_on() sets it. Null:
// waits leave MPI alone.
extern void (*mpi_hook)();

}  // namespace kccl::host
