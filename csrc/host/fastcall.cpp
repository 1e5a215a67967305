// The hot path from Python: callable objects that run a prepared call without a Python frame.
// A second module in the same shared library as kccl._core (PEP 489, "multiple modules in one
// library"); kccl/base/abi.py loads both.
//
//   Op(address, result, on_failure, stream=None)   op() makes the call and returns `result`;
//                                                  op.after(fill) lets fill() change it first
//   Dispatcher(slow, option)                       see dispatcher.cpp
//   OneSided()                                     see one_sided.cpp
//   Group(address, owner, on_failure)              see group.cpp
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

// A call that Python made, and its interpreter state while the call has released the lock.
struct CallOfPython {
    PyThreadState* released = nullptr;
    uint64_t signals_handled_ns = 0;

    void release() {
        released = PyEval_SaveThread();
        signals_handled_ns = kccl_host_clock_ns();
    }
};

namespace {

// How often a waiting call lets the interpreter handle signals.
constexpr uint64_t kHandleSignalsEveryNs = 20'000'000;
constexpr uint64_t kLongMessageBytes = 32768;
// The value of KcclHostContext.refused when the user has been warned.
constexpr uint32_t kSaid = ~0u;

// This thread's innermost such call: a signal handler that runs within a call may make one of
// another communicator. Null for calls that others make, from C; they leave the interpreter alone.
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

KcclHostContext* context_of(const KcclHostOp* op) {
    const auto* state = reinterpret_cast<const KcclState*>(op->call.comm.state);
    return reinterpret_cast<KcclHostContext*>(state->idle_context);
}

void complain_of_use(int rank) {
    PyObject* errors = PyImport_ImportModule("kccl.base.errors");
    PyObject* error = errors == nullptr ? nullptr : PyObject_GetAttrString(errors, "Error");
    if (error != nullptr) {
        PyErr_Format(error,
                     "rank %d: a call of this communicator is under way, in another thread or "
                     "around this signal handler; nothing was sent. Threads and handlers that make "
                     "calls at the same time need a communicator each, as comm.split(0) makes it "
                     "on all ranks",
                     rank);
    }
    Py_XDECREF(error);
    Py_XDECREF(errors);
}

// Tells the user, once, that a peer's memory can no longer be read. An exception may be set, where
// warnings are errors.
void warn_of_refusal(KcclHostContext* context, int rank) {
    const auto error = static_cast<int>(context->refused);
    const int peer = context->refused_peer;
    context->refused = kSaid;
    PyObject* module = PyImport_ImportModule("kccl.backends.attach");
    PyObject* said = module == nullptr ? nullptr
                                       : PyObject_CallMethod(module, "warn", "iiii", rank, peer,
                                                             context->pid[peer], error);
    Py_XDECREF(said);
    Py_XDECREF(module);
}

// Runs `call` with the interpreter's lock handled; an interrupt leaves its exception set.
template <class F>
uint32_t with_lock_handled(const Use& use, bool is_long, F&& call) {
    CallOfPython here;
    CallOfPython** const innermost = &current;  // the thread's own, so found once
    CallOfPython* const around = *innermost;
    *innermost = &here;
    if (is_long || !use.context()->holds_gil) here.release();
    const uint32_t status = call();
    *innermost = around;
    if (here.released != nullptr) PyEval_RestoreThread(here.released);
    return status;
}

}  // namespace

Use::Use(const KcclHostOp* op) : context_(context_of(op)), is_granted_(context_->is_used == 0) {
    if (is_granted_) {
        context_->is_used = 1;
    } else {
        complain_of_use(op->call.comm.rank);
    }
}

uint32_t run(const Use& use, KcclHostOp* op) {
    const bool is_long = op->call.count * op->bytes_per_count > kLongMessageBytes;
    const uint32_t status = with_lock_handled(use, is_long, [op] { return kccl_host_run(op); });
    KcclHostContext* const context = use.context();
    // A call that has failed keeps its status; the next one that succeeds warns.
    if (status == kKcclOk && is_long && context->refused != 0 && context->refused != kSaid &&
        PyErr_Occurred() == nullptr) {
        warn_of_refusal(context, op->call.comm.rank);
        if (PyErr_Occurred() != nullptr) return kKcclInterrupted;
    }
    return status;
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

bool is_initialised(const Op* op) {
    if (op->op == nullptr) PyErr_SetString(PyExc_TypeError, "Op has not been initialised");
    return op->op != nullptr;
}

// Gives the call the current stream, within a Use. Returns false if an exception is set.
bool follow_stream(Op* op) {
    if (op->stream == nullptr) return true;
    // The function that it runs may make another op current.
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

// Makes the call, after `fill` if that is not null.
PyObject* make_call(Op* op, PyObject* fill) {
    if (!is_initialised(op)) return nullptr;
    uint32_t status;
    {
        const Use use(op->op);
        if (!use.is_granted()) return nullptr;
        if (fill != nullptr) {
            PyObject* filled = PyObject_CallNoArgs(fill);
            if (filled == nullptr) return nullptr;
            Py_DECREF(filled);
        }
        if (!follow_stream(op)) return nullptr;
        status = run(use, op->op);
    }
    return finish(status, op->result, op->on_failure);
}

PyObject* op_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    if (PyTuple_Size(args) != 0 || (kwargs != nullptr && PyDict_Size(kwargs) != 0)) {
        // kccl/collectives says what it takes.
        PyObject* refuse = PyObject_GetAttrString(self, "_refuse");
        PyObject* returned = refuse == nullptr ? nullptr : PyObject_Call(refuse, args, kwargs);
        Py_XDECREF(refuse);
        return returned;
    }
    return make_call(as_op(self), nullptr);
}

// after(fill): fill() fills in the call's arguments, and then the call is made. Meanwhile nothing
// else uses the communicator.
PyObject* op_after(PyObject* self, PyObject* fill) { return make_call(as_op(self), fill); }

// clock(iterations, address): runs the call `iterations` times; microseconds to the doubles there.
PyObject* op_clock(PyObject* self, PyObject* args) {
    unsigned long long iterations, address;
    if (!PyArg_ParseTuple(args, "KK", &iterations, &address)) return nullptr;
    Op* op = as_op(self);
    if (!is_initialised(op)) return nullptr;
    uint32_t status;
    {
        const Use use(op->op);
        if (!use.is_granted() || !follow_stream(op)) return nullptr;
        status = with_lock_handled(use, true, [=] {
            return kccl_host_time(op->op, iterations, reinterpret_cast<double*>(address));
        });
    }
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
    {"after", op_after, METH_O, "after(fill): calls fill(), which may change the call; makes it."},
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
    } types[] = {{"Op", &op_spec},
                 {"Dispatcher", &dispatcher_spec},
                 {"OneSided", &one_sided_spec},
                 {"Group", &group_spec}};
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
