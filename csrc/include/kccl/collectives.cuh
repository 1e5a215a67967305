// The collectives from inside a kernel.
//
//     Status all_reduce<T, Op>(coop, comm, out, in, count)       warp(), block() or grid() acts
//     Status reduce_scatter<T, Op>(coop, comm, out, in, count)
//     Status all_gather<T>(coop, comm, out, in, count)
//     Status all_to_all<T>(coop, comm, out, in, count)
//     Status broadcast<T>(coop, comm, out, in, count, root)
//     Status barrier(coop, comm)
//
//     Channel channel(block(), comm);                            for many calls: opened once
//     for (...) status = all_reduce<T, Op>(channel, out, in, count);
//
// A call without a channel uses the coop's own: a block's index in the grid, a warp's index among
// all warps; each block of a grid uses its own. On every rank the same channels make the same
// calls, in the same order. A call without an open channel opens one, which costs two trips to the
// L2 cache. So a kernel of many calls keeps it open.
//
// Each coop's message is at most DeviceComm's max_bytes long (where there are chunks: what one rank
// sends to another). A longer one is an error, and so are a channel or a root that
// does not exist: nothing is sent, and the record names the argument. An error stays: whatever is
// opened after it returns it at once, and so does every later call on what returned it. What was
// open before may still complete calls whose data has come. It learns of the error in its next wait
// that is not satisfied at once.
#pragma once

#include "collectives/all_gather.cuh"
#include "collectives/all_reduce.cuh"
#include "collectives/all_to_all.cuh"
#include "collectives/barrier.cuh"
#include "collectives/broadcast.cuh"
#include "collectives/reduce_scatter.cuh"
