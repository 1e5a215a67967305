// The one header for users' kernels: the collectives by warp, block or grid; put, get, signal and
// wait; publish and collect; grid_sync; dispatch and combine for experts; the ring of asynchronous
// copies; warps that meet.
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
