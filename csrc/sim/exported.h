// KCCL_EXPORTED marks functions that a library which is compiled at run time exports to Python.
#pragma once

#define KCCL_EXPORTED extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
