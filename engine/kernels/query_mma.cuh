// How a warp multiplies 16 queries with a tile of the KV cache: a query is a row, and a position of
// the cache (in a product with keys) or an element of the head (with values) is a column. Prefill's
// attention uses it. Decode has few queries, so its rows are positions and elements (mma.cuh). Each
// sum has the same products in the same order here and there, so it has the same bits.
//
// A query's four neighbouring threads share its columns. A thread has kEach queries, and four
// columns of each.
//
//   QueryMma::kIsThere              whether the target has this unit. If not, this is all
//   QueryMma::Tile                  this thread's part of a tile
//   QueryMma::Rows                  this thread's part of 16 elements of 16 vectors
//   QueryMma::Sums                  this thread's sums
//   unit.query(i)                   the number of the thread's i-th query
//   unit.quad()                     the thread's number among the four of a query
//   unit.element(k)                 which row of a tile of values the thread's k-th column is. Of a
//                                   tile of keys it is position 4 * quad() + k (Mma::key_row)
//   unit.tile(from)                 this thread's part of a tile of the cache
//   unit.load(at, i)                this thread's part of elements 16 i to 16 i + 15 of vectors:
//                                   at[j] is where its j-th query begins
//   unit.rows(staged)               vectors of 16 elements. Each thread passes four of each of its
//                                   queries: 4 * quad() and those behind. Called by all threads of
//                                   the warp
//   QueryMma::multiply(sums, rows, tile)
//                                   adds the products. Called by all threads of the warp
//   QueryMma::scale(sums, factors)  multiplies the sums of the j-th query by factors[j]
//   QueryMma::totals(sums, fours)   fours[j] becomes the four sums of the j-th query
#pragma once

#include "mma.cuh"

#if defined(KCCL_TARGET_CUDA)
#include "targets/query_mma_cuda.cuh"
#elif defined(KCCL_TARGET_HIP)
#include "targets/query_mma_hip.cuh"
#else
#include "targets/query_mma_loop.cuh"
#endif
