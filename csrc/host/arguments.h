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

    // Finds the memory of an array. is_written: the call writes to it. Returns false, without an
    // exception, if C cannot use the array. Then Python must find out what is wrong with it, if
    // anything is.
    bool look(PyObject* array, bool is_written);

    uint64_t address() const { return address_; }
    Py_ssize_t num_bytes() const { return num_bytes_; }
    // The array's type if it gave its memory by DLPack; null if by the buffer protocol. Borrowed.
    PyObject* type() const { return type_; }
    // The array's attribute `dtype`. Borrowed.
    PyObject* dtype() const { return dtype_; }
    // The device that has its memory.
    DlpackDevice device() const { return device_; }

    // Gets the stream that the array's library uses on its GPU now. Returns false without an
    // exception if C cannot know it.
    bool current_stream(uint64_t* stream) const;

  private:
    bool look_by_dlpack(PyObject* array);

    uint64_t address_ = 0;
    Py_ssize_t num_bytes_ = 0;
    PyObject* type_ = nullptr;
    PyObject* dtype_ = nullptr;
    const DlpackExchange* exchange_ = nullptr;  // not null if type_ is not
    DlpackDevice device_ = {kDlpackCpu, 0};
    bool has_buffer_ = false;
    Py_buffer buffer_;  // valid if has_buffer_
};

}  // namespace kccl::host
