// The type OneSided: makes put, get, signal, wait, send or recv for Python without a Python frame.
//
//   put(x, peer, window, offset=0), get(x, peer, window, offset=0)
//   signal(peer, signal_id=0), wait(signal_id=0, count=1, peer=None)
//   send(x, peer, tag=0), recv(x, peer=None, tag=None)
//
// learn() sets which of these calls an object makes. learn_window() teaches put and get a window,
// learn_dtype() teaches send and recv a type of elements, and learn_group() a Group, to which they
// add while it is open. Other calls go to the object's method `_slow`, which makes them or raises.
#include "group.h"

namespace kccl::host {
namespace {

// What learn_window() or learn_dtype() has taught: arrays of this dtype object and type.
struct Known {
    PyObject* window;  // a weak reference, which does not keep the window's memory; or null
    PyObject* dtype;
    PyObject* type;                         // as Argument::type()
    Py_ssize_t num_bytes;                   // of each rank's part of the window
    uint64_t addresses[kKcclMaxWorldSize];  // of each rank's part, as this rank maps it
};

constexpr uint32_t kKnown = 16;  // entries of the hash table `known`; a power of two
// A window or dtype is stored in one of this many entries of `known`, beginning at its hash.
constexpr uint32_t kPlaces = 4;
constexpr int kMostArguments = 4;

struct OneSided {
    PyObject_HEAD
    KcclHostOp* op;   // null until learn() is called
    PyObject* owner;  // keeps `op` alive
    PyObject* on_failure;
    PyObject* names[kMostArguments];  // names of the arguments, in order; null behind the last
    int num_positional;               // so many of them may be given by position
    PyObject* group;                  // set by learn_group(); null before that
    Known known[kKnown];
};

OneSided* as_one_sided(PyObject* self) { return reinterpret_cast<OneSided*>(self); }

// Stores the arguments of a call in given[], in the order of `names`; null for those that are left
// out. Returns false if one has an unknown name or comes twice, or if too many come by position.
bool sort_arguments(const OneSided* self, PyObject* args, PyObject* kwargs,
                    PyObject* (&given)[kMostArguments]) {
    const Py_ssize_t count = PyTuple_Size(args);
    if (count > self->num_positional) return false;
    for (Py_ssize_t i = 0; i < count; ++i) given[i] = PyTuple_GetItem(args, i);
    if (kwargs == nullptr) return true;
    Py_ssize_t position = 0;
    PyObject *name, *value;
    while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
        int i = 0;
        while (i < kMostArguments && self->names[i] != nullptr && !is_name(name, self->names[i])) {
            ++i;
        }
        if (i == kMostArguments || self->names[i] == nullptr || given[i] != nullptr) return false;
        given[i] = value;
    }
    return true;
}

// Stores a Python int in [low, end) in *value and returns true. If given is null (argument left
// out), returns true and leaves *value as it is. Returns false for everything else: no int, a
// subclass of int such as bool, or out of range. *value may have changed then.
bool take_int(PyObject* given, long long low, long long end, long long* value) {
    if (given == nullptr) return true;
    if (!PyLong_CheckExact(given)) return false;
    int overflow = 0;
    *value = PyLong_AsLongLongAndOverflow(given, &overflow);
    return overflow == 0 && low <= *value && *value < end;
}

// Returns the i-th of the kPlaces entries for this window (which may be null) and dtype.
Known& place_of(OneSided* self, PyObject* window, PyObject* dtype, uint32_t i) {
    const uint64_t key = reinterpret_cast<uint64_t>(window) ^ reinterpret_cast<uint64_t>(dtype) * 3;
    return self->known[((key * 0x9E3779B97F4A7C15u >> 32) + i) % kKnown];
}

bool is_of(const Known& known, PyObject* window, PyObject* dtype) {
    return known.window != nullptr && known.dtype == dtype &&
           PyWeakref_GetObject(known.window) == window;
}

// Returns a window's entry for arrays of this dtype and type, or null if it has not been taught.
const Known* find_known(OneSided* self, PyObject* window, PyObject* dtype, PyObject* type) {
    for (uint32_t i = 0; i < kPlaces; ++i) {
        const Known& known = place_of(self, window, dtype, i);
        if (is_of(known, window, dtype)) return known.type == type ? &known : nullptr;
    }
    return nullptr;
}

bool knows_dtype(OneSided* self, PyObject* dtype, PyObject* type) {
    for (uint32_t i = 0; i < kPlaces; ++i) {
        const Known& known = place_of(self, nullptr, dtype, i);
        if (known.dtype == dtype && known.type == type) return true;
    }
    return false;
}

// Returns the entry in which to store a window: its own, else a free one, else the first.
Known& place_for(OneSided* self, PyObject* window, PyObject* dtype) {
    Known* free = nullptr;
    for (uint32_t i = 0; i < kPlaces; ++i) {
        Known& known = place_of(self, window, dtype, i);
        if (is_of(known, window, dtype)) return known;
        const bool is_free =
            known.window == nullptr || PyWeakref_GetObject(known.window) == Py_None;
        if (is_free && free == nullptr) free = &known;
    }
    return free != nullptr ? *free : place_of(self, window, dtype, 0);
}

// The fields of KcclHostOp.call that differ from call to call.
struct Fields {
    uint64_t output, input, count;
    long long peer, channel;
};

// Fills in a put or get, and gives x the array's buffer. Returns false if `_slow` must make it.
bool take_copy(OneSided* self, PyObject* (&given)[kMostArguments], Argument& x, Fields* fields) {
    const bool is_get = self->op->call.kernel == kKcclGet;
    if (given[0] == nullptr || given[1] == nullptr || given[2] == nullptr) return false;
    if (!take_int(given[1], 0, self->op->call.comm.world_size, &fields->peer)) return false;
    if (!x.look(given[0], is_get) || x.device().type != kDlpackCpu) return false;
    const Known* known = find_known(self, given[2], x.dtype(), x.type());
    if (known == nullptr) return false;
    long long offset = 0;
    if (!take_int(given[3], 0, known->num_bytes - x.num_bytes() + 1, &offset)) return false;
    if (x.num_bytes() > known->num_bytes) return false;
    const uint64_t remote = known->addresses[fields->peer] + static_cast<uint64_t>(offset);
    fields->output = is_get ? x.address() : remote;
    fields->input = is_get ? remote : x.address();
    fields->count = static_cast<uint64_t>(x.num_bytes());
    return true;
}

// Fills in a send or recv, and gives x the array's buffer. Returns false if `_slow` must make it.
bool take_message(OneSided* self, PyObject* (&given)[kMostArguments], Argument& x, Fields* fields) {
    const KcclCall& call = self->op->call;
    const bool receives = call.kernel == kKcclRecv;
    // The values for arguments left out: recv takes any peer and any tag (-1), send takes tag 0.
    fields->peer = -1;
    fields->channel = receives ? -1 : 0;
    PyObject* peer = receives && given[1] == Py_None ? nullptr : given[1];
    PyObject* tag = receives && given[2] == Py_None ? nullptr : given[2];
    if (given[0] == nullptr || (!receives && peer == nullptr) ||
        !take_int(peer, 0, call.comm.world_size, &fields->peer) ||
        !take_int(tag, 0, 1ll << 31, &fields->channel) || !x.look(given[0], receives) ||
        x.device().type != kDlpackCpu || !knows_dtype(self, x.dtype(), x.type())) {
        return false;
    }
    (receives ? fields->output : fields->input) = x.address();
    fields->count = static_cast<uint64_t>(x.num_bytes());
    return true;
}

bool take_fields(OneSided* self, PyObject* (&given)[kMostArguments], Argument& x, Fields* fields) {
    const KcclCall& call = self->op->call;
    const int world_size = call.comm.world_size;
    switch (call.kernel) {
        case kKcclSignal:
            return given[0] != nullptr && take_int(given[0], 0, world_size, &fields->peer) &&
                   take_int(given[1], 0, kKcclNumSignals, &fields->channel);
        case kKcclWait: {
            long long count = 1;
            fields->peer = -1;
            PyObject* peer = given[2] == Py_None ? nullptr : given[2];
            if (!take_int(given[0], 0, kKcclNumSignals, &fields->channel) ||
                !take_int(given[1], 1, 1ll << 31, &count) ||
                !take_int(peer, 0, world_size, &fields->peer)) {
                return false;
            }
            fields->count = static_cast<uint64_t>(count);
            return true;
        }
        case kKcclSend:
        case kKcclRecv: return take_message(self, given, x, fields);
        default: return take_copy(self, given, x, fields);
    }
}

PyObject* call_slowly(PyObject* self, PyObject* args, PyObject* kwargs) {
    PyObject* slow = PyObject_GetAttrString(self, "_slow");
    if (slow == nullptr) return nullptr;
    PyObject* result = PyObject_Call(slow, args, kwargs);
    Py_DECREF(slow);
    return result;
}

// Adds a send or recv to the group that is open.
PyObject* add_to_group(PyObject* object, PyObject* args, PyObject* kwargs) {
    OneSided* self = as_one_sided(object);
    PyObject* given[kMostArguments] = {};
    Fields fields = {};
    auto* const x = new Argument;
    if (self->op == nullptr || !sort_arguments(self, args, kwargs, given) ||
        !take_message(self, given, *x, &fields)) {
        delete x;
        return call_slowly(object, args, kwargs);
    }
    const bool receives = self->op->call.kernel == kKcclRecv;
    KcclMessage message = {};
    message.address = receives ? fields.output : fields.input;
    message.num_bytes = fields.count;
    message.peer = static_cast<int32_t>(fields.peer);
    message.tag = static_cast<int32_t>(fields.channel);
    message.receives = receives;
    const bool is_added = add_message(self->group, message, given[0], x);
    return is_added ? Py_NewRef(receives ? given[0] : Py_None) : nullptr;
}

PyObject* one_sided_call(PyObject* object, PyObject* args, PyObject* kwargs) {
    OneSided* self = as_one_sided(object);
    if (self->group != nullptr && is_open(self->group)) {
        // `_slow` refuses the call if another thread has opened the group.
        return (is_open_here(self->group) ? add_to_group : call_slowly)(object, args, kwargs);
    }
    PyObject* given[kMostArguments] = {};
    Argument x;
    Fields fields = {};
    if (self->op == nullptr || !sort_arguments(self, args, kwargs, given) ||
        !take_fields(self, given, x, &fields)) {
        return call_slowly(object, args, kwargs);
    }
    // Another thread may call forget() during the call, so these references are held until its end.
    PyObject* owner = Py_NewRef(self->owner);
    PyObject* on_failure = Py_NewRef(self->on_failure);
    KcclHostOp* op = self->op;
    PyObject* returned = nullptr;
    uint32_t status = kKcclOk;
    bool is_granted;
    {
        const Use use(op);
        is_granted = use.is_granted();
        if (is_granted) {
            op->call.output = fields.output;
            op->call.input = fields.input;
            op->call.count = fields.count;
            op->call.peer = static_cast<int32_t>(fields.peer);
            op->call.channel = static_cast<int32_t>(fields.channel);
            status = run(use, op);
        }
    }
    if (is_granted) {
        const bool gives = op->call.kernel == kKcclGet || op->call.kernel == kKcclRecv;
        PyObject* result = gives ? given[0] : Py_None;
        returned = finish(status, result, on_failure);
    }
    Py_DECREF(owner);
    Py_DECREF(on_failure);
    return returned;
}

void forget(Known& known) {
    Py_CLEAR(known.window);
    Py_CLEAR(known.dtype);
    Py_CLEAR(known.type);
}

int one_sided_clear(PyObject* self) {
    OneSided* call = as_one_sided(self);
    call->op = nullptr;
    Py_CLEAR(call->owner);
    Py_CLEAR(call->on_failure);
    Py_CLEAR(call->group);
    for (PyObject*& name : call->names) Py_CLEAR(name);
    for (Known& known : call->known) forget(known);
    return 0;
}

int one_sided_traverse(PyObject* self, visitproc visit, void* arg) {
    OneSided* call = as_one_sided(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(call->owner);
    Py_VISIT(call->on_failure);
    Py_VISIT(call->group);
    for (Known& known : call->known) {
        Py_VISIT(known.window);
        Py_VISIT(known.dtype);
        Py_VISIT(known.type);
    }
    return 0;
}

// learn(address, owner, on_failure, num_positional, names): sets the KcclHostOp that the object
// runs, and the names of its arguments, of which the first num_positional may be given by position.
PyObject* one_sided_learn(PyObject* self, PyObject* args) {
    unsigned long long address;
    PyObject *owner, *on_failure, *names;
    int num_positional;
    if (!PyArg_ParseTuple(args, "KOOiO!", &address, &owner, &on_failure, &num_positional,
                          &PyTuple_Type, &names)) {
        return nullptr;
    }
    OneSided* call = as_one_sided(self);
    if (PyTuple_Size(names) > kMostArguments || num_positional > PyTuple_Size(names)) {
        PyErr_SetString(PyExc_ValueError, "too many arguments");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
        set_reference(&call->names[i], Py_NewRef(PyTuple_GetItem(names, i)));
    }
    set_reference(&call->owner, Py_NewRef(owner));
    set_reference(&call->on_failure, Py_NewRef(on_failure));
    call->num_positional = num_positional;
    call->op = reinterpret_cast<KcclHostOp*>(address);
    Py_RETURN_NONE;
}

// learn_window(window, num_bytes, addresses, dtype, type): lets put and get use a window with
// arrays of this dtype and type (None: they give their memory by the buffer protocol). See Known.
PyObject* one_sided_learn_window(PyObject* self, PyObject* args) {
    PyObject *window, *addresses, *dtype, *type;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(args, "OnO!OO", &window, &num_bytes, &PyTuple_Type, &addresses, &dtype,
                          &type)) {
        return nullptr;
    }
    Known found = {nullptr, nullptr, nullptr, num_bytes, {}};
    for (Py_ssize_t i = 0; i < PyTuple_Size(addresses) && i < kKcclMaxWorldSize; ++i) {
        found.addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, i));
        if (PyErr_Occurred() != nullptr) return nullptr;
    }
    found.window = PyWeakref_NewRef(window, nullptr);
    if (found.window == nullptr) return nullptr;
    found.dtype = Py_NewRef(dtype);
    found.type = type == Py_None ? nullptr : Py_NewRef(type);
    Known& known = place_for(as_one_sided(self), window, dtype);
    forget(known);
    known = found;
    Py_RETURN_NONE;
}

// learn_dtype(dtype, type): lets send and recv use arrays of this dtype and type. type: None: they
// give their memory by the buffer protocol. The elements must be no Python objects.
PyObject* one_sided_learn_dtype(PyObject* self, PyObject* args) {
    PyObject *dtype, *type;
    if (!PyArg_ParseTuple(args, "OO", &dtype, &type)) return nullptr;
    if (type == Py_None) type = nullptr;
    OneSided* call = as_one_sided(self);
    if (knows_dtype(call, dtype, type)) Py_RETURN_NONE;
    uint32_t i = 0;
    while (i < kPlaces && place_of(call, nullptr, dtype, i).dtype != nullptr) ++i;
    Known& known = place_of(call, nullptr, dtype, i % kPlaces);
    forget(known);
    known = {nullptr, Py_NewRef(dtype), Py_XNewRef(type), 0, {}};
    Py_RETURN_NONE;
}

// learn_group(group): from now on send and recv add to this Group while their thread has it open.
PyObject* one_sided_learn_group(PyObject* self, PyObject* group) {
    set_reference(&as_one_sided(self)->group, Py_NewRef(group));
    Py_RETURN_NONE;
}

// forget_window(window): drops the window's entries, so that calls with it go to `_slow` again.
PyObject* one_sided_forget_window(PyObject* self, PyObject* window) {
    for (Known& known : as_one_sided(self)->known) {
        if (known.window != nullptr && PyWeakref_GetObject(known.window) == window) forget(known);
    }
    Py_RETURN_NONE;
}

// forget(): drops all that was taught, so that every call goes to `_slow` again.
PyObject* one_sided_forget(PyObject* self, PyObject*) {
    one_sided_clear(self);
    Py_RETURN_NONE;
}

PyMethodDef one_sided_methods[] = {
    {"learn", one_sided_learn, METH_VARARGS,
     "learn(address, owner, on_failure, num_positional, names): makes this call from now on."},
    {"learn_window", one_sided_learn_window, METH_VARARGS,
     "learn_window(window, num_bytes, addresses, dtype, type): put and get may use it."},
    {"learn_dtype", one_sided_learn_dtype, METH_VARARGS,
     "learn_dtype(dtype, type): send and recv take such arrays."},
    {"learn_group", one_sided_learn_group, METH_O,
     "learn_group(group): send and recv add to it while it is open."},
    {"forget_window", one_sided_forget_window, METH_O,
     "forget_window(window): put and get take the slow path for it."},
    {"forget", one_sided_forget, METH_NOARGS, "forget(): every call takes the slow path again."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot one_sided_slots[] = {{Py_tp_call, reinterpret_cast<void*>(one_sided_call)},
                                 {Py_tp_methods, one_sided_methods},
                                 {Py_tp_traverse, reinterpret_cast<void*>(one_sided_traverse)},
                                 {Py_tp_clear, reinterpret_cast<void*>(one_sided_clear)},
                                 {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                 {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                                 {0, nullptr}};

}  // namespace

PyType_Spec one_sided_spec = {"kccl._fastcall.OneSided", sizeof(OneSided), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                              one_sided_slots};

}  // namespace kccl::host
