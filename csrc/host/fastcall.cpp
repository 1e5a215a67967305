// The module kccl._fastcall: the fast path of calls from Python. Its objects run a prepared call
// without a Python frame. The module is in the same shared library as kccl._core (PEP 489,
// "multiple modules in one library"). kccl/base/abi.py loads both modules.
//
//   Op(address, result, on_failure, stream=None)
//     address: the address of a KcclHostOp; for a call on a GPU, of a KcclGpuOp
//     result: what op() returns when the call succeeds
//     on_failure: called when the call fails; it must raise
//     stream: only for a GPU: called before each launch, and returns the stream to launch on.
//         None: the stream in the KcclGpuOp stays as it is
//   op() makes the call. op.after(fill) runs fill(), which may change the KcclHostOp, and then
//   makes the call. op.clock() makes the call many times and measures each.
//
//   Dispatcher(slow, (first, second), is_positional)   see dispatcher.cpp
//   OneSided()                                         see one_sided.cpp
//   Group(address, owner, on_failure)                  see group.cpp
//
// The GIL. A short call on CPUs between processes starts with the GIL held, and releases it only if
// it must wait longer, because releasing and retaking the GIL costs as much as a small message. All
// other calls release the GIL before they start: long messages, calls between threads of one
// process, and calls on GPUs.
#include "fastcall.h"

#include "../include/kccl/targets/host_idle.h"

namespace kccl::host {

// A call from Python that is under way. released: the thread state, to retake the GIL with; null
// while the call holds the GIL. signals_handled_ns: when the GIL was last released; no signals have
// been handled since.
struct CallOfPython {
    PyThreadState* released = nullptr;
    uint64_t signals_handled_ns = 0;

    void release() {
        released = PyEval_SaveThread();
        signals_handled_ns = kccl_host_clock_ns();
    }
};

namespace {

// The time between two moments at which a waiting call lets Python's signal handlers run.
constexpr uint64_t kHandleSignalsEveryNs = 20'000'000;
// Calls of more bytes release the GIL before they start.
constexpr uint64_t kLongMessageBytes = 32768;
// Replaces the errno in KcclHostContext.refused once the user has been warned that a peer's memory
// cannot be read. No errno has this value.
constexpr uint32_t kSaid = ~0u;

// This thread's innermost call from Python. Calls nest, because a signal handler that runs within a
// call may make a call of another communicator. It is null while the thread makes no call from
// Python. Then on_idle() does nothing, because a thread of C code may not hold the GIL.
thread_local CallOfPython* current = nullptr;

// The function to which interpreter_hook (host.h) points: long waits call it to let Python run.
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

// Sets the exception of a call that another call of the same communicator excludes (Use,
// fastcall.h).
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

// Warns the user, once, that a peer's memory can no longer be read, so that large messages take
// longer. If Python turns warnings into errors, an exception is set.
void warn_of_refusal(KcclHostContext* context, int rank) {
    const auto error = static_cast<int>(context->refused);
    const int peer = context->refused_peer;
    context->refused = kSaid;
    PyObject* module = PyImport_ImportModule("kccl.backends.attach");
    PyObject* said = module == nullptr ? nullptr
                                       : PyObject_CallMethod(module, "warn", "iiii", rank, peer,
                                                             context->refused_pid, error);
    Py_XDECREF(said);
    Py_XDECREF(module);
}

// Runs call(), and returns its status, with the GIL held again. Releases the GIL before call() if
// the call is long, or if the communicator's calls must not hold the GIL. Otherwise on_idle()
// releases it if the call waits.
template <class F>
uint32_t with_lock_handled(const Use& use, bool is_long, F&& call) {
    CallOfPython here;
    CallOfPython** const innermost = &current;  // one look-up of the thread-local variable
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
    // Only a call that has succeeded may warn: the warning may become an exception, and a call that
    // has failed must raise its own.
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
    PyObject* stream;  // called before each launch; if null, the KcclGpuOp keeps its stream
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

// Calls the op's `stream`, if it has one, and stores the stream that this returns in the KcclGpuOp.
// Must be called within a Use, so that no other call runs the KcclGpuOp meanwhile. Returns false if
// an exception is set.
bool follow_stream(Op* op) {
    if (op->stream == nullptr) return true;
    // The callable may replace op->stream while it runs, so this keeps a reference to it.
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

// Calls `fill`, if it is not null, and then makes the call. Returns what Python gets: the op's
// result, or null with an exception set.
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
        // _refuse() of the subclass in kccl/collectives raises an error that says which arguments
        // the call takes.
        PyObject* refuse = PyObject_GetAttrString(self, "_refuse");
        PyObject* returned = refuse == nullptr ? nullptr : PyObject_Call(refuse, args, kwargs);
        Py_XDECREF(refuse);
        return returned;
    }
    return make_call(as_op(self), nullptr);
}

// after(fill): calls fill(), which fills in the call's arguments, and then makes the call. From
// before fill() until the end of the call, every other call of the communicator raises.
PyObject* op_after(PyObject* self, PyObject* fill) { return make_call(as_op(self), fill); }

// clock(iterations, address): makes the call `iterations` times in a C loop. `address` is that of
// an array of `iterations` doubles. Entry i gets the microseconds from the end of call i - 1 to the
// end of call i (kccl_host_time). Stops at the first failure. Releases the GIL before the loop.
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
