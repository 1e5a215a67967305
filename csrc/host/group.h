// Functions by which one_sided.cpp adds messages to a Group, which sends and receives them together
// (group.cpp).
#pragma once

#include "arguments.h"

namespace kccl::host {

// is_open() tells whether a Group is open; is_open_here(), whether this thread has opened it.
bool is_open(PyObject* group);
bool is_open_here(PyObject* group);

// Adds a message to a group. kept: the object that keeps the message's memory alive. x: holds the
// array's buffer, or is null if the array has none. The group takes over x and deletes it, even if
// this function fails. Returns false, with an exception set, if there is no memory.
bool add_message(PyObject* group, const KcclMessage& message, PyObject* kept, Argument* x);

}  // namespace kccl::host
