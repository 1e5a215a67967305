// The one header that users' kernels include. It has the collectives by warp, block or grid; put,
// get, signal and wait; publish and collect; grid_sync; dispatch and combine for experts; the ring
// of asynchronous copies; and a barrier for the first warps of a block.
#pragma once

#include "collectives.cuh"
#include "combine.cuh"
#include "dispatch.cuh"
#include "kernels/get.cuh"
#include "kernels/grid_exchange.cuh"
#include "kernels/grid_sync.cuh"
#include "kernels/put.cuh"
#include "kernels/signal.cuh"
#include "kernels/wait.cuh"
#include "meeting.cuh"
#include "ring.cuh"

#if defined(KCCL_TARGET_SIM)
#undef KCCL_DEVICE
#define KCCL_DEVICE KCCL_DEVICE_CHECKED
#endif
