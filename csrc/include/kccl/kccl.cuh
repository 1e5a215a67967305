// The one header for users' kernels: who acts, windows, signals, arrivals, channels, packets,
// reductions and copies ahead, and the collectives built on them.
#pragma once

#include "../../kernels/all_gather_direct_ll16.cuh"
#include "../../kernels/all_gather_pull_simple.cuh"
#include "../../kernels/all_reduce_one_shot_ll16.cuh"
#include "../../kernels/all_reduce_one_shot_pull_simple.cuh"
#include "../../kernels/all_reduce_one_shot_sentinel.cuh"
#include "../../kernels/all_reduce_two_shot_cma_simple.cuh"
#include "../../kernels/all_reduce_two_shot_pull_simple.cuh"
#include "../../kernels/all_reduce_two_shot_push_simple.cuh"
#include "../../kernels/barrier_direct.cuh"
#include "../../kernels/broadcast_direct_ll16.cuh"
#include "../../kernels/broadcast_pull_simple.cuh"
#include "../../kernels/get.cuh"
#include "../../kernels/grid_sync.cuh"
#include "../../kernels/put.cuh"
#include "../../kernels/reduce_scatter_direct_ll16.cuh"
#include "../../kernels/reduce_scatter_pull_simple.cuh"
#include "../../kernels/signal.cuh"
#include "../../kernels/wait.cuh"
#include "collectives.cuh"
#include "stage.cuh"
