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
// A call that gets no channel uses the coop's own. The number of a block's channel is the block's
// index in the grid, that of a warp's the warp's index among all warps of the grid. In a call by
// the grid each block uses its own channel. All ranks must make the same calls on a channel, in the
// same order. A call that gets no open channel opens one, which costs two trips to the L2 cache. So
// a kernel of many calls opens its channel once.
//
// The message of a coop may have at most the max_bytes of its DeviceComm. In a collective of chunks
// this limit holds for each chunk. A longer message is an error, and so is a channel or a root that
// does not exist: the call sends nothing, and the record of the failure names the argument. The
// communicator then stays failed until reset. A channel that is opened later returns the error from
// every call. A channel that was open before may still complete calls whose data has arrived. It
// finds the error in the next wait that is not satisfied at once, and then returns it from every
// call.
#pragma once

#include "collectives/all_gather.cuh"
#include "collectives/all_reduce.cuh"
#include "collectives/all_to_all.cuh"
#include "collectives/barrier.cuh"
#include "collectives/broadcast.cuh"
#include "collectives/reduce_scatter.cuh"
