// Repeats calls of a collective that were made before, without a Python frame.
//
//   Dispatcher(slow, (first, second), is_positional)
//     slow: makes any call, in Python
//     first, second: the names of the collective's options; "": there is none
//     is_positional: the first option may be given by position
//   dispatcher(x), dispatcher(x, out=out), dispatcher(None, out=out), each with first=value and
//   second=value; dispatcher(x, value) too if the first option is positional
//
// learn() teaches a call. The dispatcher finds the taught call by the dtype and size of x, the size
// of out and the values of the options, points it at the arrays, and makes it. Calls that have not
// been taught, and wrong arguments, go to `slow`, which makes the call or raises the error.
#include "arguments.h"

namespace kccl::host {
namespace {

// The values of a call's options; null: not given.
struct Values {
    PyObject* first;
    PyObject* second;
    bool operator==(const Values&) const = default;
};

// A call taught by `learn`. It fits arrays of this dtype object, this size, this device and this
// type (as Argument::type()), and these objects as the options' values. Values are compared by
// identity, because a literal in a program is always the same object.
struct Known {
    PyObject* dtype;
    PyObject* type;  // as Argument::type()
    Values values;
    DlpackDevice device;
    Py_ssize_t num_bytes;
    Py_ssize_t out_bytes;   // 0: x is the result, and no out is given
    Py_ssize_t own_offset;  // where in the larger of x and out this rank's chunk begins, in bytes
    int has_result;         // 0: on this rank the call returns None
    int lacks_x;            // this rank gives None for x, and the sizes are those of out
    KcclHostOp* op;         // on a GPU the first member of a KcclGpuOp
    PyObject* owner;        // keeps `op` alive
    PyObject* on_failure;
};

constexpr uint32_t kKnown = 64;  // a power of two
// A call is stored in one of this many entries of `known`, which begin at its hash. So this many
// calls with the same hash do not evict each other.
constexpr uint32_t kPlaces = 4;

struct Dispatcher {
    PyObject_HEAD
    PyObject* slow;
    PyObject* first;
    PyObject* second;
    PyObject* out_name;
    int is_positional;
    Known known[kKnown];
};

Dispatcher* as_dispatcher(PyObject* self) { return reinterpret_cast<Dispatcher*>(self); }

bool is_of(const Known& known, PyObject* dtype, const Values& values, Py_ssize_t num_bytes,
           Py_ssize_t out_bytes) {
    return known.dtype == dtype && known.values == values && known.num_bytes == num_bytes &&
           known.out_bytes == out_bytes;
}

// Returns the entry for a call: the one that has it; otherwise a free one; otherwise the first in
// which it may be stored.
Known* known_at(Dispatcher* self, PyObject* dtype, const Values& values, Py_ssize_t num_bytes,
                Py_ssize_t out_bytes) {
    const uint64_t key =
        (reinterpret_cast<uint64_t>(dtype) ^ reinterpret_cast<uint64_t>(values.first) * 3 ^
         reinterpret_cast<uint64_t>(values.second) * 5) +
        static_cast<uint64_t>(num_bytes + 3 * out_bytes) * 0x9E3779B97F4A7C15u;
    const uint64_t home = key >> 40 ^ key >> 20 ^ key >> 6;
    for (uint32_t i = 0; i < kPlaces; ++i) {
        Known& known = self->known[(home + i) % kKnown];
        // Calls are forgotten all at once, so no call is stored behind a free entry.
        if (known.dtype == nullptr || is_of(known, dtype, values, num_bytes, out_bytes)) {
            return &known;
        }
    }
    return &self->known[home % kKnown];
}

int dispatcher_init(PyObject* self, PyObject* args, PyObject*) {
    PyObject *slow, *first, *second;
    int is_positional;
    if (!PyArg_ParseTuple(args, "O(UU)p", &slow, &first, &second, &is_positional)) return -1;
    as_dispatcher(self)->is_positional = is_positional;
    PyObject* out_name = PyUnicode_InternFromString("out");
    if (out_name == nullptr) return -1;
    set_reference(&as_dispatcher(self)->slow, Py_NewRef(slow));
    set_reference(&as_dispatcher(self)->first, Py_NewRef(first));
    set_reference(&as_dispatcher(self)->second, Py_NewRef(second));
    set_reference(&as_dispatcher(self)->out_name, out_name);
    return 0;
}

// Reads all arguments of a call except x. Null: it is not given. Returns false if an argument has
// another name, or if too many are given.
bool only_known_arguments(Dispatcher* self, PyObject* args, PyObject* kwargs, Values* values,
                          PyObject** out) {
    *values = {nullptr, nullptr};
    *out = nullptr;
    const Py_ssize_t count = PyTuple_Size(args);
    if (count != 1 && !(count == 2 && self->is_positional)) return false;
    if (count == 2) values->first = PyTuple_GetItem(args, 1);
    if (kwargs == nullptr) return true;
    Py_ssize_t position = 0;
    PyObject *name, *given;
    while (PyDict_Next(kwargs, &position, &name, &given) != 0) {
        if (values->first == nullptr && is_name(name, self->first)) {
            values->first = given;
        } else if (is_name(name, self->second)) {
            values->second = given;
        } else if (is_name(name, self->out_name)) {
            *out = given;
        } else {
            return false;
        }
    }
    return true;
}

// Tells whether a call may use both arrays: they do not overlap, or the smaller one lies at
// `own_offset` in the larger one.
bool may_be_used(const Argument& x, const Argument& out, Py_ssize_t own_offset) {
    const uint64_t x_begin = x.address(), out_begin = out.address();
    if (x_begin + x.num_bytes() <= out_begin || out_begin + out.num_bytes() <= x_begin) return true;
    return x.num_bytes() < out.num_bytes() ? x_begin == out_begin + own_offset
                                           : out_begin == x_begin + own_offset;
}

// Reads where the arrays are, and returns the taught call for them and the values. Null: the call
// must go to `slow`. `out` may be null. lacks_x: the caller gave None for x, so `x` is `out` here.
Known* find(Dispatcher* self, PyObject* x, PyObject* out, const Values& values, bool lacks_x,
            Argument& x_memory, Argument& out_memory) {
    if (!x_memory.look(x, out == nullptr)) return nullptr;
    if (out != nullptr && !out_memory.look(out, true)) return nullptr;
    const Py_ssize_t out_bytes = out_memory.num_bytes();
    Known* known = known_at(self, x_memory.dtype(), values, x_memory.num_bytes(), out_bytes);
    const bool is_taught = known->dtype == x_memory.dtype() && known->type == x_memory.type() &&
                           known->device == x_memory.device() && known->values == values &&
                           (known->lacks_x != 0) == lacks_x &&
                           known->num_bytes == x_memory.num_bytes() &&
                           known->out_bytes == out_bytes;
    if (!is_taught) return nullptr;
    const bool is_good = out == nullptr || (out_memory.dtype() == x_memory.dtype() &&
                                            out_memory.type() == x_memory.type() &&
                                            out_memory.device() == x_memory.device() &&
                                            may_be_used(x_memory, out_memory, known->own_offset));
    return is_good ? known : nullptr;
}

bool is_on_gpu(const Known& known) { return known.device.type != kDlpackCpu; }

// Finds the stream on which a GPU's call on x is launched. Leaves *stream unchanged for a call on
// CPUs. Returns false if the call must go to `slow`.
bool find_stream(const Known& known, const Argument& x, uint64_t* stream) {
    if (!is_on_gpu(known)) return true;
    // barrier() uses the stream of the library whose arrays came last. `slow` notes that library,
    // so a call with arrays of another library goes there.
    const KcclGpuQueue* queue = reinterpret_cast<const KcclGpuOp*>(known.op)->queue;
    return queue->array_type == reinterpret_cast<uint64_t>(x.type()) && x.current_stream(stream);
}

// Makes the call on these addresses. stream: null for a call on CPUs.
PyObject* make_call(KcclHostOp* op, uint64_t input, uint64_t output, const uint64_t* stream,
                    PyObject* result, PyObject* on_failure) {
    uint32_t status;
    {
        const Use use(op);
        if (!use.is_granted()) return nullptr;
        op->call.input = input;
        op->call.output = output;
        if (stream != nullptr) reinterpret_cast<KcclGpuOp*>(op)->stream = *stream;
        status = run(use, op);
    }
    return finish(status, result, on_failure);
}

PyObject* dispatcher_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    Dispatcher* dispatcher = as_dispatcher(self);
    if (dispatcher->slow == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Dispatcher has not been initialised");
        return nullptr;
    }
    Values values;
    PyObject* out;
    if (only_known_arguments(dispatcher, args, kwargs, &values, &out)) {
        PyObject* x = PyTuple_GetItem(args, 0);
        const bool lacks_x = x == Py_None && out != nullptr;
        if (lacks_x) x = out;
        // These hold the buffers until the call has ended. Memory that came by DLPack lives as long
        // as the arguments.
        Argument x_memory, out_memory;
        const Known* known = find(dispatcher, x, out, values, lacks_x, x_memory, out_memory);
        uint64_t stream = 0;
        if (known != nullptr && find_stream(*known, x_memory, &stream)) {
            // The references are held because another thread may overwrite this entry during the
            // call.
            KcclHostOp* op = known->op;
            PyObject* on_failure = Py_NewRef(known->on_failure);
            PyObject* owner = Py_NewRef(known->owner);
            PyObject* returned = out == nullptr ? x : out;
            if (known->has_result == 0) returned = Py_None;
            const uint64_t output = (out == nullptr ? x_memory : out_memory).address();
            PyObject* result =
                make_call(op, x_memory.address(), output, is_on_gpu(*known) ? &stream : nullptr,
                          returned, on_failure);
            Py_DECREF(owner);
            Py_DECREF(on_failure);
            return result;
        }
    }
    return PyObject_Call(dispatcher->slow, args, kwargs);
}

void forget(Known& known) {
    Py_CLEAR(known.dtype);
    Py_CLEAR(known.type);
    Py_CLEAR(known.values.first);
    Py_CLEAR(known.values.second);
    Py_CLEAR(known.owner);
    Py_CLEAR(known.on_failure);
}

// learn(dtype, type, device, num_bytes, (first, second), out_bytes, own_offset, has_result,
// lacks_x, address, owner, on_failure): teaches a call; see Known. A type of None means that arrays
// give their memory by the buffer protocol. A value of ... means that the option is not given.
// `device` is DLPack's pair of type and id.
PyObject* dispatcher_learn(PyObject* self, PyObject* args) {
    PyObject *dtype, *type, *owner, *on_failure;
    Values values;
    Py_ssize_t num_bytes, out_bytes, own_offset;
    int has_result, lacks_x;
    DlpackDevice device;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OO(ii)n(OO)nnppKOO", &dtype, &type, &device.type, &device.id,
                          &num_bytes, &values.first, &values.second, &out_bytes, &own_offset,
                          &has_result, &lacks_x, &address, &owner, &on_failure)) {
        return nullptr;
    }
    if (values.first == Py_Ellipsis) values.first = nullptr;
    if (values.second == Py_Ellipsis) values.second = nullptr;
    Known* known = known_at(as_dispatcher(self), dtype, values, num_bytes, out_bytes);
    forget(*known);
    known->dtype = Py_NewRef(dtype);
    known->type = type == Py_None ? nullptr : Py_NewRef(type);
    known->values = {Py_XNewRef(values.first), Py_XNewRef(values.second)};
    known->owner = Py_NewRef(owner);
    known->on_failure = Py_NewRef(on_failure);
    known->device = device;
    known->num_bytes = num_bytes;
    known->out_bytes = out_bytes;
    known->own_offset = own_offset;
    known->has_result = has_result;
    known->lacks_x = lacks_x;
    known->op = reinterpret_cast<KcclHostOp*>(address);
    Py_RETURN_NONE;
}

int dispatcher_traverse(PyObject* self, visitproc visit, void* arg) {
    Dispatcher* dispatcher = as_dispatcher(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(dispatcher->slow);
    for (Known& known : dispatcher->known) {
        Py_VISIT(known.dtype);
        Py_VISIT(known.type);
        Py_VISIT(known.values.first);
        Py_VISIT(known.values.second);
        Py_VISIT(known.owner);
        Py_VISIT(known.on_failure);
    }
    return 0;
}

int dispatcher_clear(PyObject* self) {
    Dispatcher* dispatcher = as_dispatcher(self);
    Py_CLEAR(dispatcher->slow);
    Py_CLEAR(dispatcher->first);
    Py_CLEAR(dispatcher->second);
    Py_CLEAR(dispatcher->out_name);
    for (Known& known : dispatcher->known) forget(known);
    return 0;
}

// forget(): drops everything taught, and the references it holds.
PyObject* dispatcher_forget(PyObject* self, PyObject*) {
    for (Known& known : as_dispatcher(self)->known) forget(known);
    Py_RETURN_NONE;
}

PyMethodDef dispatcher_methods[] = {
    {"learn", dispatcher_learn, METH_VARARGS,
     "learn(dtype, type, device, num_bytes, (first, second), out_bytes, own_offset, has_result, "
     "lacks_x, address, owner, on_failure): such calls run this one."},
    {"forget", dispatcher_forget, METH_NOARGS, "forget(): every call takes the slow path again."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot dispatcher_slots[] = {{Py_tp_init, reinterpret_cast<void*>(dispatcher_init)},
                                  {Py_tp_call, reinterpret_cast<void*>(dispatcher_call)},
                                  {Py_tp_methods, dispatcher_methods},
                                  {Py_tp_traverse, reinterpret_cast<void*>(dispatcher_traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(dispatcher_clear)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                  {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                                  {0, nullptr}};
}  // namespace

PyType_Spec dispatcher_spec = {"kccl._fastcall.Dispatcher", sizeof(Dispatcher), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                               dispatcher_slots};

}  // namespace kccl::host
