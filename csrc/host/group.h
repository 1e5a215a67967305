// Lets one_sided.cpp add messages to a Group, which sends and receives them together (group.cpp).
#pragma once

#include "arguments.h"

namespace kccl::host {

// is_open() tells whether a Group is open; is_open_here(), whether this thread has opened it.
bool is_open(PyObject* group);
bool is_open_here(PyObject* group);

// Adds a message to a group. kept: the object that keeps the message's memory alive. x: holds the
// array's buffer; may be null. The group deletes it, on failure too. Returns false if there is no
// memory; an exception is set then.
bool add_message(PyObject* group, const KcclMessage& message, PyObject* kept, Argument* x);

}  // namespace kccl::host
