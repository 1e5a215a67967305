// Shared by the files of kccl._fastcall.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "host.h"

namespace kccl::host {

// Makes a call, and handles the interpreter's lock. After an interrupt the exception is set.
uint32_t run(KcclHostOp* op);

// Returns a new reference to `result`, or lets `on_failure` raise.
PyObject* finish(uint32_t status, PyObject* result, PyObject* on_failure);

// Drops the old value only after the slot has the new one, because dropping may run Python code.
void set_reference(PyObject** slot, PyObject* value);

// The tp_dealloc of both types.
void deallocate(PyObject* self);

extern PyType_Spec dispatcher_spec;

}  // namespace kccl::host
