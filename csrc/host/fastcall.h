// Declarations that the files of kccl._fastcall share.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "host.h"

namespace kccl::host {

// The use of a communicator by one call. Until it ends nobody may begin another, neither another
// thread nor a signal handler of this one: both calls would use the same slots. Begins and ends
// under the interpreter's lock, so it needs no atomic.
class Use {
  public:
    explicit Use(const KcclHostOp* op);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
        if (is_granted_) context_->is_used = 0;
    }

    // Begins the use. Returns false if the communicator is in use; an exception is set then.
    bool is_granted() const { return is_granted_; }

    KcclHostContext* context() const { return context_; }

  private:
    KcclHostContext* context_;
    bool is_granted_;
};

// Makes a call, and handles the interpreter's lock. After an interrupt the exception is set.
uint32_t run(const Use& use, KcclHostOp* op);

// Returns a new reference to `result`, or lets `on_failure` raise.
PyObject* finish(uint32_t status, PyObject* result, PyObject* on_failure);

// Drops the old value only after the slot has the new one, because dropping may run Python code.
void set_reference(PyObject** slot, PyObject* value);

// The tp_dealloc of all types.
void deallocate(PyObject* self);

// Tells whether a keyword is this one, which is interned.
inline bool is_name(PyObject* name, PyObject* wanted) {
    return name == wanted || PyUnicode_Compare(name, wanted) == 0;
}

extern PyType_Spec dispatcher_spec, group_spec, one_sided_spec;

}  // namespace kccl::host
