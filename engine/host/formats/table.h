// The formats that the host executor multiplies as they are stored. KCCL_ENGINE_FORMATS has one
// line for each. A format's number is its place there. A format is a struct with these members:
//
//     kName                          as formats/table.py has it
//     kIsInteger                     whether weights are integers with scales: blocks32.h,
//                                    k_blocks.h, mxfp4.h, nvfp4.h
//     kPairs, kPieceBytes            the pairs of columns, and the bytes, of a piece of a panel
//     stored_bytes(num_columns)      returns the bytes of a row in the file
//     pack(panel, rows, num_rows, num_columns)
//                                    writes stored rows as a panel, whose bytes are zeros
//     widen(stored, num, out)        converts the numbers of a stored row to FP32
//
// Formats with a scale for a group of columns have kGroupColumns: groups.h. The others that are not
// integers also have
//
//     kRowBytes                      the bytes between two rows in a piece
//     load<Vector>(rows, pair, even, odd)
//                                    loads a pair's two columns of a few rows as FP32 numbers.
//                                    rows: the first of these rows in the pair's piece. pair: the
//                                    pair's number in the piece
#pragma once

#include "bfloat16.h"
#include "e4m3.h"
#include "float16.h"
#include "int4.h"
#include "int8.h"
#include "k_quarters.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q5_1.h"
#include "q5_k.h"
#include "q6_k.h"
#include "q8_0.h"

#define KCCL_ENGINE_FORMATS(CASE) \
    CASE(Bfloat16)                \
    CASE(Float16)                 \
    CASE(Q8_0)                    \
    CASE(Q4_0)                    \
    CASE(Q4_1)                    \
    CASE(Q5_0)                    \
    CASE(Q5_1)                    \
    CASE(Q4K)                     \
    CASE(Q5K)                     \
    CASE(Q6K)                     \
    CASE(Q4K64)                   \
    CASE(Q5K64)                   \
    CASE(Q6K64)                   \
    CASE(E4m3By128)               \
    CASE(E4m3By32)                \
    CASE(Int8By128)               \
    CASE(Int8By32)                \
    CASE(Int8ZerosBy128)          \
    CASE(Int8ZerosBy32)           \
    CASE(Int4By128)               \
    CASE(Int4By64)                \
    CASE(Int4By32)                \
    CASE(Int4ZerosBy128)          \
    CASE(Int4ZerosBy64)           \
    CASE(Int4ZerosBy32)           \
    CASE(Mxfp4)                   \
    CASE(Nvfp4By128)              \
    CASE(Nvfp4By32)
