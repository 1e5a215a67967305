// The type Group: collects messages, and sends and receives them together, without a Python frame
// for each message.
//
//   Group(address, owner, on_failure)  address: of a KcclHostOp that kccl_host_bind_messages() has
//                                      bound. owner: keeps the KcclHostOp alive. on_failure: called
//                                      when messages fail; it must raise
//   open(), close()                    between the two, send and recv of the thread that called
//                                      open() add messages to the group
//   add(address, num_bytes, peer, tag, receives, kept)
//                                      adds a message. kept: the object that keeps the memory at
//                                      `address` alive
//   len(group)                         the number of messages in the group
//   truncate(count)                    drops all messages but the first `count`
//   run()                              sends and receives all messages, and drops them
//   move_to(other)                     gives all messages to another Group, which drops its own
//   group()                            sends and receives all messages, and keeps them, so that
//                                      they can be sent and received again
//   drop()                             drops the references to the arrays of messages that failed;
//                                      called when the communicator no longer uses them
#include "group.h"

namespace kccl::host {
namespace {

// The reference that keeps a message's array alive.
struct Kept {
    PyObject* array;
    Argument* x;  // holds the array's buffer; null if `array` alone keeps the memory alive
};

// Messages that are sent and received together. From their start until all are done, the
// communicator has pointers to `messages`.
struct Batch {
    KcclMessage* messages;
    Kept* kept;
    Py_ssize_t count, capacity;
    Batch* next;  // in Group::failed
};

struct Group {
    PyObject_HEAD
    KcclHostOp* op;
    PyObject* owner;
    PyObject* on_failure;
    unsigned long thread;  // the thread that has opened it; 0 if it is not open
    Batch* batch;          // null until a message is added
    // Batches of calls that have failed. They are kept until drop(), because the communicator may
    // still have pointers to their messages.
    Batch* failed;
};

Group* as_group(PyObject* self) { return reinterpret_cast<Group*>(self); }

void let_go(const Kept& kept) {
    delete kept.x;
    Py_XDECREF(kept.array);
}

void free_batches(Batch* batch) {
    while (batch != nullptr) {
        Batch* const next = batch->next;
        for (Py_ssize_t i = 0; i < batch->count; ++i) let_go(batch->kept[i]);
        PyMem_Free(batch->messages);
        PyMem_Free(batch->kept);
        PyMem_Free(batch);
        batch = next;
    }
}

// Returns the group's batch, with room for one more message; null if there is no memory.
Batch* with_room(Group* group) {
    if (group->batch == nullptr) {
        group->batch = static_cast<Batch*>(PyMem_Calloc(1, sizeof(Batch)));
        if (group->batch == nullptr) return nullptr;
    }
    Batch* const batch = group->batch;
    if (batch->count < batch->capacity) return batch;
    const Py_ssize_t capacity = batch->capacity == 0 ? 4 : 2 * batch->capacity;
    auto* const messages = static_cast<KcclMessage*>(
        PyMem_Realloc(batch->messages, static_cast<size_t>(capacity) * sizeof(KcclMessage)));
    if (messages == nullptr) return nullptr;
    batch->messages = messages;
    auto* const kept = static_cast<Kept*>(
        PyMem_Realloc(batch->kept, static_cast<size_t>(capacity) * sizeof(Kept)));
    if (kept == nullptr) return nullptr;
    batch->kept = kept;
    batch->capacity = capacity;
    return batch;
}

int group_init(PyObject* self, PyObject* args, PyObject* kwargs) {
    unsigned long long address;
    PyObject *owner, *on_failure;
    static const char* names[] = {"address", "owner", "on_failure", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOO", const_cast<char**>(names), &address,
                                     &owner, &on_failure)) {
        return -1;
    }
    Group* const group = as_group(self);
    group->op = reinterpret_cast<KcclHostOp*>(address);
    set_reference(&group->owner, Py_NewRef(owner));
    set_reference(&group->on_failure, Py_NewRef(on_failure));
    return 0;
}

PyObject* group_open(PyObject* self, PyObject*) {
    as_group(self)->thread = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

PyObject* group_close(PyObject* self, PyObject*) {
    as_group(self)->thread = 0;
    Py_RETURN_NONE;
}

PyObject* group_add(PyObject* self, PyObject* args) {
    unsigned long long address, num_bytes;
    int peer, tag, receives;
    PyObject* kept;
    if (!PyArg_ParseTuple(args, "KKiipO", &address, &num_bytes, &peer, &tag, &receives, &kept)) {
        return nullptr;
    }
    KcclMessage message = {};
    message.address = address;
    message.num_bytes = num_bytes;
    message.peer = peer;
    message.tag = tag;
    message.receives = static_cast<uint32_t>(receives);
    if (!add_message(self, message, kept, nullptr)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* group_truncate(PyObject* self, PyObject* count) {
    const Py_ssize_t left = PyLong_AsSsize_t(count);
    if (left == -1 && PyErr_Occurred() != nullptr) return nullptr;
    Batch* const batch = as_group(self)->batch;
    while (batch != nullptr && batch->count > left) let_go(batch->kept[--batch->count]);
    Py_RETURN_NONE;
}

Py_ssize_t group_length(PyObject* self) {
    const Batch* const batch = as_group(self)->batch;
    return batch == nullptr ? 0 : batch->count;
}

// How a call has ended. kRefused: nothing was sent, because another call uses the communicator.
enum class Outcome { kRefused, kFailed, kDone };

// Sends and receives the messages of a batch. Stores in *returned what Python gets: None, or null
// with an exception set.
Outcome make(const Group* group, const Batch* batch, PyObject** returned) {
    PyObject* const owner = Py_NewRef(group->owner);
    PyObject* const on_failure = Py_NewRef(group->on_failure);
    KcclHostOp* const op = group->op;
    const KcclMessages together = {reinterpret_cast<uint64_t>(batch->messages),
                                   static_cast<uint64_t>(batch->count)};
    uint64_t num_bytes = 0;
    for (Py_ssize_t i = 0; i < batch->count; ++i) num_bytes += batch->messages[i].num_bytes;
    uint32_t status = kKcclOk;
    bool is_granted;
    {
        const Use use(op);
        is_granted = use.is_granted();
        if (is_granted) {
            op->call.input = reinterpret_cast<uint64_t>(&together);
            op->call.count = num_bytes;
            status = run(use, op);
        }
    }
    *returned = is_granted ? finish(status, Py_None, on_failure) : nullptr;
    Py_DECREF(owner);
    Py_DECREF(on_failure);
    return !is_granted ? Outcome::kRefused : status == kKcclOk ? Outcome::kDone : Outcome::kFailed;
}

bool is_initialised(const Group* group) {
    if (group->op == nullptr) PyErr_SetString(PyExc_TypeError, "Group has not been initialised");
    return group->op != nullptr;
}

PyObject* group_run(PyObject* self, PyObject*) {
    Group* const group = as_group(self);
    if (!is_initialised(group)) return nullptr;
    // The batch is taken out of the Group, so that another thread may add messages to a new one
    // during the call, which may release the GIL.
    Batch* const batch = group->batch;
    group->batch = nullptr;
    if (batch == nullptr) Py_RETURN_NONE;
    PyObject* returned = nullptr;
    if (make(group, batch, &returned) == Outcome::kFailed) {
        batch->next = group->failed;
        group->failed = batch;
    } else {
        free_batches(batch);
    }
    return returned;
}

PyObject* group_move_to(PyObject* self, PyObject* other) {
    if (Py_TYPE(other) != Py_TYPE(self)) {
        PyErr_SetString(PyExc_TypeError, "other must be a Group");
        return nullptr;
    }
    Batch* const old = as_group(other)->batch;
    as_group(other)->batch = as_group(self)->batch;
    as_group(self)->batch = nullptr;
    free_batches(old);
    Py_RETURN_NONE;
}

PyObject* group_call(PyObject* self, PyObject* args, PyObject* kwargs) {
    if (PyTuple_Size(args) != 0 || (kwargs != nullptr && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a prepared group takes no arguments");
        return nullptr;
    }
    Group* const group = as_group(self);
    if (!is_initialised(group)) return nullptr;
    if (group->batch == nullptr) Py_RETURN_NONE;
    PyObject* returned = nullptr;
    make(group, group->batch, &returned);
    return returned;
}

PyObject* group_drop(PyObject* self, PyObject*) {
    Batch* const failed = as_group(self)->failed;
    as_group(self)->failed = nullptr;
    free_batches(failed);
    Py_RETURN_NONE;
}

int group_clear(PyObject* self) {
    Group* const group = as_group(self);
    Batch* const batch = group->batch;
    group->batch = nullptr;
    free_batches(batch);
    Py_XDECREF(group_drop(self, nullptr));
    Py_CLEAR(group->owner);
    Py_CLEAR(group->on_failure);
    group->op = nullptr;
    return 0;
}

int group_traverse(PyObject* self, visitproc visit, void* arg) {
    const Group* const group = as_group(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(group->owner);
    Py_VISIT(group->on_failure);
    const Batch* const lists[] = {group->batch, group->failed};
    for (const Batch* first : lists) {
        for (const Batch* batch = first; batch != nullptr; batch = batch->next) {
            for (Py_ssize_t i = 0; i < batch->count; ++i) Py_VISIT(batch->kept[i].array);
        }
    }
    return 0;
}

PyMethodDef group_methods[] = {
    {"open", group_open, METH_NOARGS, "open(): this thread's send and recv add to the group."},
    {"close", group_close, METH_NOARGS, "close(): they no longer do."},
    {"add", group_add, METH_VARARGS,
     "add(address, num_bytes, peer, tag, receives, kept): adds a message."},
    {"truncate", group_truncate, METH_O, "truncate(count): drops those behind the first `count`."},
    {"run", group_run, METH_NOARGS, "run(): sends and receives all messages, and forgets them."},
    {"move_to", group_move_to, METH_O, "move_to(other): gives all messages to another Group."},
    {"drop", group_drop, METH_NOARGS, "drop(): lets go of the arrays of failed messages."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot group_slots[] = {{Py_tp_init, reinterpret_cast<void*>(group_init)},
                             {Py_tp_methods, group_methods},
                             {Py_tp_call, reinterpret_cast<void*>(group_call)},
                             {Py_sq_length, reinterpret_cast<void*>(group_length)},
                             {Py_tp_traverse, reinterpret_cast<void*>(group_traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(group_clear)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                             {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                             {0, nullptr}};

}  // namespace

bool is_open(PyObject* group) { return as_group(group)->thread != 0; }

bool is_open_here(PyObject* group) {
    return as_group(group)->thread == PyThread_get_thread_ident();
}

bool add_message(PyObject* self, const KcclMessage& message, PyObject* kept, Argument* x) {
    Batch* const batch = with_room(as_group(self));
    if (batch == nullptr) {
        delete x;
        PyErr_NoMemory();
        return false;
    }
    batch->messages[batch->count] = message;
    batch->kept[batch->count++] = {Py_NewRef(kept), x};
    return true;
}

PyType_Spec group_spec = {"kccl._fastcall.Group", sizeof(Group), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                          group_slots};

}  // namespace kccl::host
