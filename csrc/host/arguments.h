// Finds the memory of an array that Python passes: by the buffer protocol, or by DLPack's C
// interface if the array has no buffer.
#pragma once

#include "dlpack.h"
#include "fastcall.h"

namespace kccl::host {

class Argument {
  public:
    Argument() = default;
    Argument(const Argument&) = delete;
    Argument& operator=(const Argument&) = delete;
    ~Argument() {
        if (has_buffer_) PyBuffer_Release(&buffer_);
        Py_XDECREF(dtype_);
    }

    // Finds the memory of an array. is_written: the call writes to the array. Returns false, with
    // no exception set, if C cannot use the array. The caller then leaves the call to the code in
    // Python, which takes more kinds of arrays, and raises if the array is wrong.
    bool look(PyObject* array, bool is_written);

    uint64_t address() const { return address_; }
    Py_ssize_t num_bytes() const { return num_bytes_; }
    // Returns the array's Python type if the array gave its memory by DLPack; null if by the buffer
    // protocol. The reference is borrowed.
    PyObject* type() const { return type_; }
    // Returns the array's attribute `dtype`, a borrowed reference.
    PyObject* dtype() const { return dtype_; }
    // Returns the device on which the array's memory lies.
    DlpackDevice device() const { return device_; }

    // Stores in *stream the stream on which the array's library, such as PyTorch, now enqueues work
    // for the array's GPU. Returns false, with no exception set, if the library does not tell C.
    bool current_stream(uint64_t* stream) const;

  private:
    bool look_by_dlpack(PyObject* array);

    uint64_t address_ = 0;
    Py_ssize_t num_bytes_ = 0;
    PyObject* type_ = nullptr;
    PyObject* dtype_ = nullptr;
    const DlpackExchange* exchange_ = nullptr;  // null if type_ is null
    DlpackDevice device_ = {kDlpackCpu, 0};
    bool has_buffer_ = false;
    Py_buffer buffer_;  // valid if has_buffer_
};

}  // namespace kccl::host
