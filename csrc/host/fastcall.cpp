// The hot path from Python: callable objects that run a prepared call without a Python frame.
// A second module in the same shared library as kccl._core (PEP 489, "multiple modules in one
// library"); kccl/base/abi.py loads both.
//
//   Op(address, result, on_failure, stream=None)   op() makes the call and returns `result`
//   Dispatcher(slow, option)                       see dispatcher.cpp
//
// `stream` is for calls on a GPU, whose address is a KcclGpuOp's: a callable that says, before each
// run, on which stream it goes. Without one the call keeps its stream.
//
// The interpreter's lock: between processes a call starts holding it and gives it up in its first
// long wait, because taking it back costs as much as a small message. Between threads of one
// process, and for long messages, it is given up before.
#include "fastcall.h"

#include "../include/kccl/targets/host_idle.h"

namespace kccl::host {
namespace {

// How often a waiting call lets the interpreter handle signals.
constexpr uint64_t kHandleSignalsEveryNs = 20'000'000;
constexpr uint64_t kLongMessageBytes = 32768;

// A call that Python made, and its interpreter state while it has given up the lock.
struct CallOfPython {
    PyThreadState* released = nullptr;
    uint64_t signals_handled_ns = 0;

    void release() {
        released = PyEval_SaveThread();
        signals_handled_ns = kccl_host_clock_ns();
    }
};

// This thread's innermost such call: a signal handler that runs within a call may make another.
// Null for calls that others make, from C; they leave the interpreter alone.
thread_local CallOfPython* current = nullptr;

uint32_t on_idle() {
    CallOfPython* call = current;
    if (call == nullptr) return 0;
    if (call->released == nullptr) call->release();
    if (kccl_host_clock_ns() - call->signals_handled_ns < kHandleSignalsEveryNs) return 0;
    PyEval_RestoreThread(call->released);
    const int raised = PyErr_CheckSignals();
    call->release();
    return raised != 0;
}

// Runs `call` with the interpreter's lock handled; an interrupt leaves its exception set.
template <class F>
uint32_t with_lock_handled(const KcclHostOp* op, bool is_long, F&& call) {
    const auto* state = reinterpret_cast<const KcclState*>(op->call.comm.state);
    const auto* context = reinterpret_cast<const KcclHostContext*>(state->idle_context);
    CallOfPython here;
    CallOfPython* const around = current;
    current = &here;
    if (is_long || !context->holds_gil) here.release();
    const uint32_t status = call();
    current = around;
    if (here.released != nullptr) PyEval_RestoreThread(here.released);
    return status;
}

}  // namespace

uint32_t run(KcclHostOp* op) {
    const bool is_long = op->call.count * op->bytes_per_count > kLongMessageBytes;
    return with_lock_handled(op, is_long, [op] { return kccl_host_run(op); });
}

void set_reference(PyObject** slot, PyObject* value) {
    PyObject* old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

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

namespace {

struct Op {
    PyObject_HEAD
    KcclHostOp* op;
    PyObject* result;
    PyObject* on_failure;
    PyObject* stream;  // null: the call keeps its stream
};

Op* as_op(PyObject* self) { return reinterpret_cast<Op*>(self); }

int op_init(PyObject* self, PyObject* args, PyObject* kwargs) {
    unsigned long long address;
    PyObject* result;
    PyObject* on_failure;
    PyObject* stream = Py_None;
    static const char* names[] = {"address", "result", "on_failure", "stream", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOO|O", const_cast<char**>(names), &address,
                                     &result, &on_failure, &stream)) {
        return -1;
    }
    as_op(self)->op = reinterpret_cast<KcclHostOp*>(address);
    set_reference(&as_op(self)->result, Py_NewRef(result));
    set_reference(&as_op(self)->on_failure, Py_NewRef(on_failure));
    set_reference(&as_op(self)->stream, stream == Py_None ? nullptr : Py_NewRef(stream));
    return 0;
}

// Whether the call can be made; else an exception is set. Gives it the stream of the moment.
bool is_ready(Op* op) {
    if (op->op == nullptr) {
        PyErr_SetString(PyExc_TypeError, "Op has not been initialised");
        return false;
    }
    if (op->stream == nullptr) return true;
    // What it runs may make this op another.
    PyObject* current = Py_NewRef(op->stream);
    PyObject* said = PyObject_CallNoArgs(current);
    Py_DECREF(current);
    if (said == nullptr) return false;
    const unsigned long long stream = PyLong_AsUnsignedLongLong(said);
    Py_DECREF(said);
    if (PyErr_Occurred() != nullptr) return false;
    reinterpret_cast<KcclGpuOp*>(op->op)->stream = stream;
    return true;
}

PyObject* op_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    if (PyTuple_Size(args) != 0 || (kwargs != nullptr && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a prepared call takes no arguments");
        return nullptr;
    }
    Op* op = as_op(self);
    if (!is_ready(op)) return nullptr;
    return finish(run(op->op), op->result, op->on_failure);
}

// clock(iterations, address): runs the call `iterations` times; microseconds to the doubles there.
PyObject* op_clock(PyObject* self, PyObject* args) {
    unsigned long long iterations, address;
    if (!PyArg_ParseTuple(args, "KK", &iterations, &address)) return nullptr;
    Op* op = as_op(self);
    if (!is_ready(op)) return nullptr;
    const uint32_t status = with_lock_handled(op->op, true, [=] {
        return kccl_host_time(op->op, iterations, reinterpret_cast<double*>(address));
    });
    return finish(status, Py_None, op->on_failure);
}

int op_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_op(self)->result);
    Py_VISIT(as_op(self)->on_failure);
    Py_VISIT(as_op(self)->stream);
    return 0;
}

int op_clear(PyObject* self) {
    Py_CLEAR(as_op(self)->result);
    Py_CLEAR(as_op(self)->on_failure);
    Py_CLEAR(as_op(self)->stream);
    return 0;
}

}  // namespace

void deallocate(PyObject* self) {
    PyObject_GC_UnTrack(self);
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<inquiry>(PyType_GetSlot(type, Py_tp_clear))(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

namespace {

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
    interpreter_hook = on_idle;
    return 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "kccl._fastcall", nullptr, 0,      nullptr,
                      module_slots,          nullptr,          nullptr, nullptr};

}  // namespace
}  // namespace kccl::host

PyMODINIT_FUNC PyInit__fastcall() { return PyModuleDef_Init(&kccl::host::module); }
