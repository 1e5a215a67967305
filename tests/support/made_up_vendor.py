"""A vendor that is made up: a driver in host memory, and its table for kccl.gpu.

The driver differs from CUDA as HIP does: a device is made current by its number, code is loaded for
each device, the code lists the parameters of its kernels, and an allocation takes flags.
"""

import ctypes
import dataclasses
import json
import queue
import threading

from kccl.gpu.table import Names, Table

LAUNCH_US = 3.0
WORDS = [field.name for field in dataclasses.fields(Names)]


class Code:
    """The driver's error codes, as an enumeration of a binding."""

    def __init__(self, name, number):
        self.name = name
        self.number = number

    def __int__(self):
        return self.number


OK, WRONG, FULL = Code("TOY_OK", 0), Code("TOY_WRONG", 9), Code("TOY_FULL", 7)


def add(n, x):
    """The one kernel: adds a number to another."""
    ctypes.c_int32.from_address(x).value += n


class Toy:
    """The binding: functions return a code and their results.

    Attributes:
        made: Calls that freed memory: name, address, the device that was current.
        ends: Device -> an event that ends the kernel that it runs. Who loads code, or waits for
            the device, waits for it.
        loads: The devices that have loaded code, in order.
        waiting: The devices for whose kernels somebody has begun to wait, in order.
    """

    codes = (OK, WRONG, FULL)

    def __init__(self):
        self.here = threading.local()
        self.memory = {}
        self.made = []
        self.clock_us = 0.0
        self.is_full = False
        self.events = []
        self.functions = []
        self.graphs = []
        self.ends = {}
        self.loads = []
        self.waiting = queue.SimpleQueue()

    def toyCount(self):
        return OK, 2

    def toyHere(self):
        return OK, getattr(self.here, "ordinal", 0)

    def toyGo(self, ordinal):
        self.here.ordinal = ordinal
        return (OK,)

    def toyWait(self):
        return (OK,) if self.has_ended() else (WRONG,)

    def has_ended(self):
        """Waits for the kernel of this thread's device; false if it does not end."""
        here = self.here.ordinal
        if here not in self.ends:
            return True
        self.waiting.put(here)
        return self.ends[here].wait(30)

    def toyStream(self, flags):
        return (OK, 5) if flags == 0x10 else (WRONG, 0)

    def toyWaitFor(self, stream):
        return (OK,) if stream == 5 else (WRONG,)

    def toyAllocate(self, num_bytes, flags):
        if self.is_full:
            return FULL, 0
        assert flags == "uncached"
        buffer = ctypes.create_string_buffer(b"\xee" * num_bytes, num_bytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return OK, ctypes.addressof(buffer)

    def toyReach(self, device, flags):
        return (OK,)

    def toyPinned(self, num_bytes, flags):
        assert flags == 0x30
        return self.toyAllocate(num_bytes, "uncached")

    def toyFree(self, address):
        self.made.append(("toyFree", address, self.here.ordinal))
        del self.memory[address]
        return (OK,)

    def toyFill(self, address, byte, num_bytes, stream):
        ctypes.memset(address, byte, num_bytes)
        return self.toyWaitFor(stream)

    def toyToDevice(self, to, data, num_bytes, stream):
        ctypes.memmove(to, bytes(data), num_bytes)
        return (OK,)

    def toyToHost(self, data, address, num_bytes, stream):
        data[:] = ctypes.string_at(address, num_bytes)
        return (OK,)

    def toyEvent(self, flags):
        self.events.append(None)
        return OK, len(self.events) - 1

    def toyRecord(self, event, stream):
        self.events[event] = self.clock_us
        return (OK,)

    def toyElapsed(self, begin, end):
        return OK, (self.events[end] - self.events[begin]) / 1e3

    def toyLoad(self, code):
        here = self.here.ordinal
        if not self.has_ended():
            return WRONG, 0
        self.loads.append(here)
        return OK, (code, here)

    def toyFunction(self, module, name):
        self.functions.append((*module, name))
        return OK, len(self.functions) - 1

    def toyLaunch(self, function, *facts):
        *shape, stream, where, _ = facts
        assert shape == [2, 1, 1, 64, 1, 1, 0]
        assert self.functions[function][1] == self.here.ordinal
        self.run(where)
        return self.toyWaitFor(stream)

    def toyGraph(self, flags):
        return OK, 1

    def toyNode(self, graph, before, count, node):
        self.graphs.append(node)
        return OK, 1

    def toyInstantiate(self, graph, flags):
        return OK, len(self.graphs) - 1

    def toyLaunchGraph(self, number, stream):
        _, grid, block, value = self.graphs[number]
        assert (grid, block) == (2, 64)
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        self.run(ctypes.addressof(pointer))
        return (OK,)

    def toyDrop(self, _):
        return (OK,)

    def run(self, where):
        self.clock_us += LAUNCH_US
        argument = ctypes.c_void_p.from_address(where).value
        n, x = ctypes.c_int64.from_address(argument), ctypes.c_uint64.from_address(argument + 8)
        add(n.value, x.value)


OWN_NAMES = {
    "num_devices": "toyCount",
    "current_ordinal": "toyHere",
    "synchronize_device": "toyWait",
    "create_stream": "toyStream",
    "synchronize_stream": "toyWaitFor",
    "copy_to_device": "toyToDevice",
    "copy_to_host": "toyToHost",
    "fill": "toyFill",
    "create_event": "toyEvent",
    "record_event": "toyRecord",
    "synchronize_event": "toyDrop",
    "elapsed_ms": "toyElapsed",
    "query_event": "toyDrop",
    "destroy_event": "toyDrop",
    "launch": "toyLaunch",
    "create_graph": "toyGraph",
    "add_kernel_node": "toyNode",
    "instantiate_graph": "toyInstantiate",
    "destroy_graph": "toyDrop",
    "destroy_instance": "toyDrop",
    "free": "toyFree",
    "enable_access": "toyReach",
    "allocate_on_host": "toyPinned",
    "free_on_host": "toyFree",
    "close_handle": "toyDrop",
}


def _unasked(self, *_, **__):
    raise AssertionError("nothing here needs it")


class MadeUp(Table):
    backend = "toys"
    vendor = "Toys"
    names = Names(**{word: OWN_NAMES.get(word, "toyMissing") for word in WORDS})
    errors = "codes"
    out_of_memory = 7
    not_ready = 10
    is_accessible = 8
    stream_flags = 0x10
    capture_mode = "missing"
    legacy_stream = 5
    host_flags = 0x30
    multiprocessors = "cores"
    shared_bytes = "bytes"
    maps_memory = exports_memory = "maps"
    warp_size = 16
    dlpack_type = 77
    queue = {"launch": "toyLaunch", "push_context": "toyGo"}  # noqa: RUF012
    dependents_queue = {"launch_ex": "toyMissing"}  # noqa: RUF012
    dependents_version = 0
    visible_devices = "TOYS"
    handles = paths = needs = "toy"
    cure = "buy one"
    compiler = None

    def load(self):
        return Toy()

    def function_address(self, name, version=0):
        return len(name)

    def attribute(self, ordinal, name):
        return {"cores": 3, "bytes": 4096, "maps": 0}[name]

    def device_name(self, ordinal):
        return "a toy"

    def device_uuid(self, ordinal):
        return f"toy {ordinal}"

    def device_arch(self, ordinal):
        return "toy1"

    def open_device(self, ordinal):
        return ordinal

    def push(self, context):
        self.binding.here.before = (self.call("toyHere"), self._before())
        self.call("toyGo", context)

    def pop(self):
        ordinal, self.binding.here.before = self._before()
        self.call("toyGo", ordinal)

    # This thread's stack of devices: (top, (next, ...)).
    def _before(self):
        return getattr(self.binding.here, "before", ())

    def has_current(self):
        return False

    def load_code(self, code, names):
        offsets, module = json.loads(code), self.call("toyLoad", code)
        return [
            (self.call("toyFunction", module, name), tuple(map(tuple, offsets[name])))
            for name in names
        ]

    def kernel_node(self, function, *, grid, block, arguments):
        value = ctypes.c_void_p.from_address(arguments).value
        return function, grid, block, ctypes.create_string_buffer(ctypes.string_at(value, 16), 16)

    def launches_dependents(self, ordinal):
        return False

    def relax_captures(self):
        return None

    def restore_captures(self, before):
        assert before is None

    def allocate(self, num_bytes, note):
        return self.call("toyAllocate", num_bytes, "uncached", note=note)

    def export_handle(self, address):
        return address.to_bytes(8, "little")

    def open_handle(self, handle, note):
        return int.from_bytes(handle, "little")

    arch_for = device_of = allow_shared_bytes = function_attribute = _unasked
    memory_kind = memory_unit = allow_access = export_memory = import_memory = _unasked
