// The type Dispatcher: repeats calls of one collective that were made before, without a Python
// frame.
//
//   Dispatcher(slow, (first, second), is_positional)
//     slow: makes any call, in Python
//     first, second: the names of the collective's options; "": there is none
//     is_positional: the first option may be given by position
//   dispatcher(x), dispatcher(x, out=out), dispatcher(None, out=out), each with first=value and
//   second=value; dispatcher(x, value) too if the first option is positional
//
// After `slow` has made a call, it teaches the dispatcher that call by learn(). The dispatcher
// finds a taught call by the dtype and size of x, the size of out and the values of the options. It
// sets the call's input and output to the caller's arrays, and makes it. Calls that have not been
// taught, and calls with wrong arguments, go to `slow`, which makes the call or raises the error.
#include "arguments.h"

namespace kccl::host {
namespace {

// The values of a call's two options. A value is null if the caller has not given the option.
struct Values {
    PyObject* first;
    PyObject* second;
    bool operator==(const Values&) const = default;
};

// A call taught by learn(), which may be repeated for arrays with the same dtype object, size,
// device and type, and with the same objects as the options' values. The objects are compared by
// identity, which is fast, and mostly enough: a literal in a program is always the same object.
struct Known {
    PyObject* dtype;
    PyObject* type;  // as Argument::type()
    Values values;
    DlpackDevice device;
    Py_ssize_t num_bytes;   // of x
    Py_ssize_t out_bytes;   // 0 if there is no out, and x gets the result
    Py_ssize_t own_offset;  // where in the larger of x and out this rank's chunk begins, in bytes
    int has_result;         // 0 if the call returns None on this rank
    int lacks_x;            // not 0: x is None on this rank, and num_bytes is that of out
    KcclHostOp* op;         // on a GPU the first member of a KcclGpuOp
    PyObject* owner;        // keeps `op` alive
    PyObject* on_failure;   // called when the call fails; it must raise
};

constexpr uint32_t kKnown = 64;  // entries of the hash table `known`; a power of two
// A call is stored in one of this many entries of `known`, from the entry of its hash on. So this
// many calls with the same hash do not evict each other.
constexpr uint32_t kPlaces = 4;

struct Dispatcher {
    PyObject_HEAD
    PyObject* slow;
    PyObject* first;
    PyObject* second;
    PyObject* out_name;  // the interned string "out"
    int is_positional;
    Known known[kKnown];
};

Dispatcher* as_dispatcher(PyObject* self) { return reinterpret_cast<Dispatcher*>(self); }

bool is_of(const Known& known, PyObject* dtype, const Values& values, Py_ssize_t num_bytes,
           Py_ssize_t out_bytes) {
    return known.dtype == dtype && known.values == values && known.num_bytes == num_bytes &&
           known.out_bytes == out_bytes;
}

// Returns the entry for a call: the one that holds this call, else a free one. If there is neither,
// returns the entry at the call's hash, and the caller replaces what it holds.
Known* known_at(Dispatcher* self, PyObject* dtype, const Values& values, Py_ssize_t num_bytes,
                Py_ssize_t out_bytes) {
    const uint64_t key =
        (reinterpret_cast<uint64_t>(dtype) ^ reinterpret_cast<uint64_t>(values.first) * 3 ^
         reinterpret_cast<uint64_t>(values.second) * 5) +
        static_cast<uint64_t>(num_bytes + 3 * out_bytes) * 0x9E3779B97F4A7C15u;
    const uint64_t home = key >> 40 ^ key >> 20 ^ key >> 6;
    for (uint32_t i = 0; i < kPlaces; ++i) {
        Known& known = self->known[(home + i) % kKnown];
        // Only forget() frees entries, and it frees all. So behind a free entry there is no call of
        // this hash, and the search can end here.
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

// Finds the values of the options and of out among the arguments of a call. Stores null for an
// argument that is not given. Returns false if an argument has an unknown name, or if x is not the
// first by position, or if too many are given by position.
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

// Tells whether a call may use x and out: they must not overlap, or the smaller one must lie at
// `own_offset` in the larger one, as the in-place form of all_gather or reduce_scatter has it.
bool may_be_used(const Argument& x, const Argument& out, Py_ssize_t own_offset) {
    const uint64_t x_begin = x.address(), out_begin = out.address();
    if (x_begin + x.num_bytes() <= out_begin || out_begin + out.num_bytes() <= x_begin) return true;
    return x.num_bytes() < out.num_bytes() ? x_begin == out_begin + own_offset
                                           : out_begin == x_begin + own_offset;
}

// Finds the memory of the arrays, and returns the taught call for these arrays and values. Returns
// null if there is none or out does not fit x; then the call must go to `slow`. out is null if the
// caller gave none. lacks_x: the caller gave None for x, and `x` is the out array instead.
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

// Stores in *stream the stream on which to launch a GPU's call on x. For a call on CPUs returns
// true and leaves *stream unchanged. Returns false if the call must go to `slow`.
bool find_stream(const Known& known, const Argument& x, uint64_t* stream) {
    if (!is_on_gpu(known)) return true;
    // barrier() has no array, so it uses the current stream of the library whose arrays came last.
    // `slow` notes that library in queue->array_type. So a call with arrays of another library goes
    // to `slow`.
    const KcclGpuQueue* queue = reinterpret_cast<const KcclGpuOp*>(known.op)->queue;
    return queue->array_type == reinterpret_cast<uint64_t>(x.type()) && x.current_stream(stream);
}

// Makes a taught call, with these addresses as its input and output. stream: null for a call on
// CPUs. Returns what Python gets: `result`, or null with an exception set.
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
        // These objects hold the arrays' buffers until the call has ended. Memory that came by
        // DLPack needs no holder: it lives as long as the arrays, which the caller holds as
        // arguments.
        Argument x_memory, out_memory;
        const Known* known = find(dispatcher, x, out, values, lacks_x, x_memory, out_memory);
        uint64_t stream = 0;
        if (known != nullptr && find_stream(*known, x_memory, &stream)) {
            // The call may release the GIL. Another thread may then overwrite this entry, so these
            // references keep the op and on_failure alive until the call has ended.
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
// lacks_x, address, owner, on_failure): teaches a call. The arguments are the members of Known;
// address is that of the KcclHostOp. type: None: the arrays give their memory by the buffer
// protocol. first, second: `...` (Ellipsis): the option is not given. device: DLPack's pair of type
// and id.
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

// forget(): drops all taught calls, and the references that they hold. Every call then goes to
// `slow`.
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
