// Declarations that the files of kccl._fastcall share.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "host.h"

namespace kccl::host {

// Marks a communicator as in use while one call runs. Meanwhile no other thread, and no signal
// handler of this one, may begin a call of the communicator: both calls would use the same slots.
// The mark is set and cleared with the GIL held, so it needs no atomic.
class Use {
  public:
    explicit Use(const KcclHostOp* op);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
        if (is_granted_) context_->is_used = 0;
    }

    // Tells whether the constructor has set the mark. False: another call uses the communicator,
    // and an exception is set.
    bool is_granted() const { return is_granted_; }

    KcclHostContext* context() const { return context_; }

  private:
    KcclHostContext* context_;
    bool is_granted_;
};

// Makes a call, and returns its status with the GIL held. fastcall.cpp says when it releases the
// GIL. If a signal handler has interrupted the call, its exception is set.
uint32_t run(const Use& use, KcclHostOp* op);

// Returns a new reference to `result` if the status is ok; otherwise null, with an exception set:
// the one that is set already, or the one that `on_failure` raises.
PyObject* finish(uint32_t status, PyObject* result, PyObject* on_failure);

// Replaces the reference in the slot by `value`, which it takes over. Drops the old one last,
// because that may run Python code.
void set_reference(PyObject** slot, PyObject* value);

// The tp_dealloc of all types.
void deallocate(PyObject* self);

// Tells whether a keyword is `wanted`, which is interned. So mostly the pointers are equal.
inline bool is_name(PyObject* name, PyObject* wanted) {
    return name == wanted || PyUnicode_Compare(name, wanted) == 0;
}

extern PyType_Spec dispatcher_spec, group_spec, one_sided_spec;

}  // namespace kccl::host
