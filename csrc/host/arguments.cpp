#include "arguments.h"

namespace kccl::host {
namespace {

// A cache: the last type of arrays that offered DLPack's C interface, and that interface. It has
// one entry, because most programs use one type.
PyObject* exchange_type = nullptr;
const DlpackExchange* exchange = nullptr;

// A cache: the last type of arrays for which has_mask() returned false.
PyObject* unmasked_type = nullptr;

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

// Tells whether arrays of this type give their memory by DLPack's C interface. If so, stores the
// type and its interface in the cache above.
bool offers_exchange(PyObject* type) {
    if (type == exchange_type) return true;
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const void* offered =
        capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    const auto* found = static_cast<const DlpackExchange*>(offered);
    while (found != nullptr && found->major > 1) found = found->older;
    if (found == nullptr || found->major != 1 || found->tensor_from_object == nullptr) {
        PyErr_Clear();
        return false;
    }
    set_reference(&exchange_type, Py_NewRef(type));
    exchange = found;
    return true;
}

bool has_attribute(PyObject* object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object, name);
    PyErr_Clear();
    Py_XDECREF(found);
    return found != nullptr;
}

// Tells whether arrays of this type mask elements, as NumPy's masked arrays do. A call would use
// the masked elements too, because the buffer contains them. kccl/base/arrays.py refuses arrays
// that have these two attributes.
bool has_mask(PyObject* type) {
    if (type == unmasked_type) return false;
    static PyObject* const mask = name_of("mask");
    static PyObject* const filled = name_of("filled");
    if (has_attribute(type, mask) && has_attribute(type, filled)) return true;
    set_reference(&unmasked_type, Py_NewRef(type));
    return false;
}

// Calls a method of the array without arguments. Returns true if the method returns False or
// raises, and also if the array has no such method: libraries other than PyTorch may lack it.
bool is_denied(PyObject* array, PyObject* method) {
    PyObject* said = PyObject_CallMethodObjArgs(array, method, nullptr);
    PyErr_Clear();
    Py_XDECREF(said);
    return said == nullptr || said == Py_False;
}

// Tells whether a call may use the array's memory as it is. PyTorch's tensor_from_object() also
// succeeds for tensors for which this is false: tensors that record gradients, and views that
// negate or conjugate the elements in memory when they are read.
bool is_plain(PyObject* array, const DlpackTensor& tensor) {
    static PyObject* const requires_grad = name_of("requires_grad");
    static PyObject* const is_neg = name_of("is_neg");
    static PyObject* const is_conj = name_of("is_conj");
    // Arrays of libraries other than PyTorch may lack this attribute, and record no gradients then.
    PyObject* records = PyObject_GetAttr(array, requires_grad);
    PyErr_Clear();
    Py_XDECREF(records);
    if (records != nullptr && records != Py_False) return false;
    // Only a view of complex numbers can conjugate them, so other arrays are not asked.
    return is_denied(array, is_neg) && (tensor.code != kDlpackComplex || is_denied(array, is_conj));
}

}  // namespace

bool Argument::look_by_dlpack(PyObject* array) {
    DlpackTensor tensor;
    if (exchange->tensor_from_object(array, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    if (!is_contiguous(tensor) || !is_plain(array, tensor)) return false;
    address_ = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
    num_bytes_ = kccl::host::num_bytes(tensor);
    type_ = reinterpret_cast<PyObject*>(Py_TYPE(array));
    exchange_ = exchange;
    device_ = tensor.device;
    return true;
}

bool Argument::current_stream(uint64_t* stream) const {
    if (exchange_ == nullptr || exchange_->current_stream == nullptr) return false;
    void* found = nullptr;
    if (exchange_->current_stream(device_.type, device_.id, &found) != 0) {
        PyErr_Clear();
        return false;
    }
    *stream = reinterpret_cast<uint64_t>(found);
    return true;
}

bool Argument::look(PyObject* array, bool is_written) {
    static PyObject* const dtype_name = name_of("dtype");
    dtype_ = PyObject_GetAttr(array, dtype_name);
    if (dtype_ == nullptr) {
        PyErr_Clear();
        return false;
    }
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array));
    if (type == exchange_type) return look_by_dlpack(array);
    if (has_mask(type)) return false;
    if (PyObject_GetBuffer(array, &buffer_, is_written ? PyBUF_ND | PyBUF_WRITABLE : PyBUF_ND) ==
        0) {
        has_buffer_ = true;
        address_ = reinterpret_cast<uint64_t>(buffer_.buf);
        num_bytes_ = buffer_.len;
        return true;
    }
    PyErr_Clear();
    return offers_exchange(type) && look_by_dlpack(array);
}

}  // namespace kccl::host
