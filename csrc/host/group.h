// The messages that a group of sends and receives has, as one_sided.cpp adds to them.
#pragma once

#include "arguments.h"

namespace kccl::host {

// Tells whether a Group is open, and whether this thread has opened it.
bool is_open(PyObject* group);
bool is_open_here(PyObject* group);

// Adds a message to a group that is open here. kept: its array. x: how the array gives its memory;
// the group takes it. Returns false if there is no memory; an exception is set then.
bool add_message(PyObject* group, const KcclMessage& message, PyObject* kept, Argument* x);

}  // namespace kccl::host
