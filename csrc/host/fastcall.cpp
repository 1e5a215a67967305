// The hot path from Python: callable objects that run a prepared call without a Python frame.
// A second module in the same shared library as kccl._core (PEP 489, "multiple modules in one
// library"); kccl/abi.py loads both.
//
//   Op(address, result, on_failure)   op() makes the call and returns `result`
//   Dispatcher(slow, option)          dispatcher(x) and dispatcher(x, option=value) find the call
//                                     for x's dtype, size and the value, point it at x and make it;
//                                     what was not taught goes to `slow`
//
// The interpreter's lock: between processes a call starts holding it and gives it up in its first
// long wait, because taking it back costs as much as a small message. Between threads of one
// process, and for long messages, it is given up before.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "host.h"
#include "idle.h"

namespace {

// How often a waiting call lets the interpreter handle signals.
constexpr uint64_t kHandleSignalsEveryNs = 20'000'000;
constexpr uint64_t kLongMessageBytes = 32768;

// Whether this thread is in a call that Python made, and its interpreter state while that call has
// given up the lock. Calls that others make, from C, leave the interpreter alone.
thread_local bool called_by_python = false;
thread_local PyThreadState* released = nullptr;
thread_local uint64_t signals_handled_ns = 0;

uint32_t on_idle() {
    if (!called_by_python) return 0;
    const uint64_t now = kccl_host_clock_ns();
    if (released == nullptr) {
        released = PyEval_SaveThread();
        signals_handled_ns = now;
    }
    if (now - signals_handled_ns < kHandleSignalsEveryNs) return 0;
    signals_handled_ns = now;
    PyEval_RestoreThread(released);
    const int raised = PyErr_CheckSignals();
    released = PyEval_SaveThread();
    return raised != 0;
}

uint64_t num_bytes(const KcclCall& call) {
    constexpr uint64_t kItemBytes[kKcclNumDtypes] = {4, 8, 2, 2, 4, 8};
    return call.kernel <= kKcclAllReduceTwoShotCmaSimple ? call.count * kItemBytes[call.dtype]
                                                         : call.count;
}

// Runs `call` with the interpreter's lock handled; an interrupt leaves its exception set.
template <class F>
uint32_t with_lock_handled(const KcclHostOp* op, bool is_long, F&& call) {
    const auto* state = reinterpret_cast<const KcclState*>(op->call.comm.state);
    const auto* context = reinterpret_cast<const KcclHostContext*>(state->idle_context);
    called_by_python = true;
    released = nullptr;
    if (is_long || !context->holds_gil) {
        released = PyEval_SaveThread();
        signals_handled_ns = kccl_host_clock_ns();
    }
    const uint32_t status = call();
    called_by_python = false;
    if (released != nullptr) {
        PyEval_RestoreThread(released);
        released = nullptr;
    }
    return status;
}

uint32_t run(KcclHostOp* op) {
    return with_lock_handled(op, num_bytes(op->call) > kLongMessageBytes,
                             [op] { return kccl_host_run(op); });
}

// Drops the old value only after the slot holds the new one, because dropping may run Python code.
void set_reference(PyObject** slot, PyObject* value) {
    PyObject* old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

// Returns a new reference to `result`, or lets `on_failure` raise.
PyObject* finish(uint32_t status, PyObject* result, PyObject* on_failure) {
    if (status == kKcclOk) return Py_NewRef(result);
    if (PyErr_Occurred() != nullptr) return nullptr;
    PyObject* returned = PyObject_CallFunctionObjArgs(on_failure, nullptr);
    if (returned != nullptr) {
        Py_DECREF(returned);
        PyErr_SetString(PyExc_SystemError, "kccl: on_failure must raise");
    }
    return nullptr;
}

// ---- Op ---------------------------------------------------------------------------------------

struct Op {
    PyObject_HEAD
    KcclHostOp* op;
    PyObject* result;
    PyObject* on_failure;
};

Op* as_op(PyObject* self) { return reinterpret_cast<Op*>(self); }

int op_init(PyObject* self, PyObject* args, PyObject* kwargs) {
    unsigned long long address;
    PyObject* result;
    PyObject* on_failure;
    static const char* names[] = {"address", "result", "on_failure", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOO", const_cast<char**>(names), &address,
                                     &result, &on_failure)) {
        return -1;
    }
    as_op(self)->op = reinterpret_cast<KcclHostOp*>(address);
    set_reference(&as_op(self)->result, Py_NewRef(result));
    set_reference(&as_op(self)->on_failure, Py_NewRef(on_failure));
    return 0;
}

PyObject* op_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    if (PyTuple_Size(args) != 0 || (kwargs != nullptr && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a prepared call takes no arguments");
        return nullptr;
    }
    Op* op = as_op(self);
    if (op->op == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Op has not been initialised");
        return nullptr;
    }
    return finish(run(op->op), op->result, op->on_failure);
}

// clock(iterations, address): runs the call `iterations` times; microseconds to the doubles there.
PyObject* op_clock(PyObject* self, PyObject* args) {
    unsigned long long iterations, address;
    if (!PyArg_ParseTuple(args, "KK", &iterations, &address)) return nullptr;
    Op* op = as_op(self);
    if (op->op == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Op has not been initialised");
        return nullptr;
    }
    const uint32_t status = with_lock_handled(op->op, true, [=] {
        return kccl_host_time(op->op, iterations, reinterpret_cast<double*>(address));
    });
    return finish(status, Py_None, op->on_failure);
}

int op_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_op(self)->result);
    Py_VISIT(as_op(self)->on_failure);
    return 0;
}

int op_clear(PyObject* self) {
    Py_CLEAR(as_op(self)->result);
    Py_CLEAR(as_op(self)->on_failure);
    return 0;
}

void deallocate(PyObject* self) {
    PyObject_GC_UnTrack(self);
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<inquiry>(PyType_GetSlot(type, Py_tp_clear))(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyMethodDef op_methods[] = {
    {"clock", op_clock, METH_VARARGS,
     "clock(iterations, address): makes the call again and again, clocked in C."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot op_slots[] = {{Py_tp_init, reinterpret_cast<void*>(op_init)},
                          {Py_tp_methods, op_methods},
                          {Py_tp_call, reinterpret_cast<void*>(op_call)},
                          {Py_tp_traverse, reinterpret_cast<void*>(op_traverse)},
                          {Py_tp_clear, reinterpret_cast<void*>(op_clear)},
                          {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                          {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                          {0, nullptr}};
PyType_Spec op_spec = {"kccl._fastcall.Op", sizeof(Op), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, op_slots};

// ---- Dispatcher -------------------------------------------------------------------------------

// A call taught by `learn`: for arrays of this dtype object and size, and this object as the
// option's value (null: not given). Values are compared by identity: literals in a program are one
// object.
struct Known {
    PyObject* dtype;
    PyObject* value;
    Py_ssize_t num_bytes;
    KcclHostOp* op;
    PyObject* owner;  // keeps `op` alive
    PyObject* on_failure;
};

constexpr uint32_t kKnown = 64;  // a power of two

struct Dispatcher {
    PyObject_HEAD
    PyObject* slow;
    PyObject* option;
    PyObject* dtype_name;
    Known known[kKnown];
};

Dispatcher* as_dispatcher(PyObject* self) { return reinterpret_cast<Dispatcher*>(self); }

Known* place(Dispatcher* self, PyObject* dtype, PyObject* value, Py_ssize_t num_bytes) {
    const uint64_t key =
        (reinterpret_cast<uint64_t>(dtype) ^ reinterpret_cast<uint64_t>(value) * 3) +
        static_cast<uint64_t>(num_bytes) * 0x9E3779B97F4A7C15u;
    return &self->known[(key >> 40 ^ key >> 20 ^ key >> 6) % kKnown];
}

int dispatcher_init(PyObject* self, PyObject* args, PyObject*) {
    PyObject *slow, *option;
    if (!PyArg_ParseTuple(args, "OU", &slow, &option)) return -1;
    PyObject* dtype_name = PyUnicode_InternFromString("dtype");
    if (dtype_name == nullptr) return -1;
    set_reference(&as_dispatcher(self)->slow, Py_NewRef(slow));
    set_reference(&as_dispatcher(self)->option, Py_NewRef(option));
    set_reference(&as_dispatcher(self)->dtype_name, dtype_name);
    return 0;
}

// The option's value in a call (x, **kwargs), null when not given. False: there is something else.
bool only_option(Dispatcher* self, PyObject* args, PyObject* kwargs, PyObject** value) {
    *value = nullptr;
    if (PyTuple_Size(args) != 1) return false;
    if (kwargs == nullptr || PyDict_Size(kwargs) == 0) return true;
    if (PyDict_Size(kwargs) != 1) return false;
    Py_ssize_t position = 0;
    PyObject* name;
    PyDict_Next(kwargs, &position, &name, value);
    return name == self->option || PyUnicode_Compare(name, self->option) == 0;
}

// The taught call for x and the value, pointed at x's memory, which `view` then holds; null when
// the slow path must look.
Known* find(Dispatcher* self, PyObject* x, PyObject* value, Py_buffer* view) {
    PyObject* dtype = PyObject_GetAttr(x, self->dtype_name);
    if (dtype == nullptr) {
        PyErr_Clear();
        return nullptr;
    }
    if (PyObject_GetBuffer(x, view, PyBUF_ND | PyBUF_WRITABLE) != 0) {
        // The slow path says what is wrong with x, by the name of the argument.
        PyErr_Clear();
        Py_DECREF(dtype);
        return nullptr;
    }
    Known* known = place(self, dtype, value, view->len);
    if (known->dtype == dtype && known->value == value && known->num_bytes == view->len) {
        const auto address = reinterpret_cast<uint64_t>(view->buf);
        known->op->call.input = known->op->call.output = address;
    } else {
        known = nullptr;
        PyBuffer_Release(view);
    }
    Py_DECREF(dtype);
    return known;
}

PyObject* dispatcher_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    Dispatcher* dispatcher = as_dispatcher(self);
    if (dispatcher->slow == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Dispatcher has not been initialised");
        return nullptr;
    }
    PyObject* value;
    if (only_option(dispatcher, args, kwargs, &value)) {
        PyObject* x = PyTuple_GetItem(args, 0);
        Py_buffer view;
        const Known* known = find(dispatcher, x, value, &view);
        if (known != nullptr) {
            PyObject* on_failure = Py_NewRef(known->on_failure);
            PyObject* owner = Py_NewRef(known->owner);
            const uint32_t status = run(known->op);
            PyBuffer_Release(&view);
            PyObject* result = finish(status, x, on_failure);
            Py_DECREF(owner);
            Py_DECREF(on_failure);
            return result;
        }
    }
    return PyObject_Call(dispatcher->slow, args, kwargs);
}

void forget(Known& known) {
    Py_CLEAR(known.dtype);
    Py_CLEAR(known.value);
    Py_CLEAR(known.owner);
    Py_CLEAR(known.on_failure);
}

// learn(dtype, num_bytes, value, address, owner, on_failure); a value of ... means "not given".
PyObject* dispatcher_learn(PyObject* self, PyObject* args) {
    PyObject *dtype, *value, *owner, *on_failure;
    Py_ssize_t num_bytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OnOKOO", &dtype, &num_bytes, &value, &address, &owner,
                          &on_failure)) {
        return nullptr;
    }
    if (value == Py_Ellipsis) value = nullptr;
    Known* known = place(as_dispatcher(self), dtype, value, num_bytes);
    forget(*known);
    known->dtype = Py_NewRef(dtype);
    known->value = Py_XNewRef(value);
    known->owner = Py_NewRef(owner);
    known->on_failure = Py_NewRef(on_failure);
    known->num_bytes = num_bytes;
    known->op = reinterpret_cast<KcclHostOp*>(address);
    Py_RETURN_NONE;
}

int dispatcher_traverse(PyObject* self, visitproc visit, void* arg) {
    Dispatcher* dispatcher = as_dispatcher(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(dispatcher->slow);
    for (Known& known : dispatcher->known) {
        Py_VISIT(known.dtype);
        Py_VISIT(known.value);
        Py_VISIT(known.owner);
        Py_VISIT(known.on_failure);
    }
    return 0;
}

int dispatcher_clear(PyObject* self) {
    Dispatcher* dispatcher = as_dispatcher(self);
    Py_CLEAR(dispatcher->slow);
    Py_CLEAR(dispatcher->option);
    Py_CLEAR(dispatcher->dtype_name);
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
     "learn(dtype, num_bytes, value, address, owner, on_failure): such calls run this one."},
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
PyType_Spec dispatcher_spec = {"kccl._fastcall.Dispatcher", sizeof(Dispatcher), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                               dispatcher_slots};

int execute(PyObject* module) {
    const struct {
        const char* name;
        PyType_Spec* spec;
    } types[] = {{"Op", &op_spec}, {"Dispatcher", &dispatcher_spec}};
    for (const auto& type : types) {
        PyObject* object = PyType_FromSpec(type.spec);
        if (object == nullptr) return -1;
        const int added = PyModule_AddObjectRef(module, type.name, object);
        Py_DECREF(object);
        if (added != 0) return -1;
    }
    kccl::host::interpreter_hook = on_idle;
    return 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "kccl._fastcall", nullptr, 0,      nullptr,
                      module_slots,          nullptr,          nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__fastcall() { return PyModuleDef_Init(&module); }
