// Marks what a unit that is compiled at run time shows to Python.
#pragma once

#define KCCL_EXPORTED extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
