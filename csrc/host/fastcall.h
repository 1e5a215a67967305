// Declarations that the files of kccl._fastcall share.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "host.h"

namespace kccl::host {

// Marks a communicator as in use while one call from Python runs. Meanwhile no other thread may
// begin a call of the communicator, nor may a signal handler that runs within the call: both calls
// would use the same memory. The mark is set and cleared with the GIL held, so it needs no atomic.
class Use {
  public:
    explicit Use(const KcclHostOp* op);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
        if (is_granted_) context_->is_used = 0;
    }

    // Tells whether the constructor has marked the communicator. If not, another call uses it, and
    // an exception is set.
    bool is_granted() const { return is_granted_; }

    KcclHostContext* context() const { return context_; }

  private:
    KcclHostContext* context_;
    bool is_granted_;
};

// Makes a call, and returns its status, with the GIL held. The head of fastcall.cpp says when the
// call releases the GIL meanwhile. If a signal handler has raised, the call has failed and the
// handler's exception is set.
uint32_t run(const Use& use, KcclHostOp* op);

// Ends a call from Python whose status is known. Returns a new reference to `result` if the status
// is ok. Otherwise returns null with an exception set: the exception that is set already, or the
// one that `on_failure` raises.
PyObject* finish(uint32_t status, PyObject* result, PyObject* on_failure);

// Replaces the reference in *slot by `value`, a new reference that now belongs to the slot. Drops
// the old reference last, because that may run Python code, which must find the new value.
void set_reference(PyObject** slot, PyObject* value);

// The tp_dealloc of all types of kccl._fastcall.
void deallocate(PyObject* self);

// Tells whether the name of a keyword argument is `wanted`. Compares the pointers first, because
// Python interns names in a program's text and `wanted` is interned too.
inline bool is_name(PyObject* name, PyObject* wanted) {
    return name == wanted || PyUnicode_Compare(name, wanted) == 0;
}

extern PyType_Spec dispatcher_spec, group_spec, one_sided_spec;

}  // namespace kccl::host
