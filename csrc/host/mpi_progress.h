// MPI's progress in waits.
#pragma once

namespace kccl::host {

// kccl_host_let_mpi_go_on() sets it. Null: waits leave MPI alone.
extern void (*mpi_hook)();

}  // namespace kccl::host
