"""A fake communicator on a GPU, with what a prepared call needs. C functions replace the driver's,
so no GPU is needed.
"""

import ctypes
from types import SimpleNamespace

import kccl
from kccl.backends.gpu import GpuBackend
from kccl.base import abi
from kccl.base.abi import ffi, lib
from kccl.collectives.barrier import BarrierOnStream
from kccl.collectives.prepared import OnStream
from kccl.gpu import driver

CALL_US = 2.5
FUNCTION = 0x5500
CONTEXT = 0xC0
_Launch = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_uint64, *[ctypes.c_uint] * 7, ctypes.c_uint64),
    *(ctypes.c_void_p, ctypes.c_void_p),
)
_LaunchGraph = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_IsCapturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int))
_LaunchEx = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p
)
_CaptureInfo = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)),
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_void_p)] * 2,
    ctypes.POINTER(ctypes.c_size_t),
)
_NodeType = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int))
_Params = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64))
_FunctionName = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_uint64)
_Push = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_Pop = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """Records the streams that kernels are launched on. A launch takes 2.5 us of its stream.

    Attributes:
        nodes: Stream -> the nodes that the next captured work depends on: a kernel's mangled
            name, or None for a node of another kind.
        node_context: The context of these nodes' device.
        early: The streams of programmatic dependents, in order.
        comm, fit: Fields of the KcclCall that a node's kernel was launched with.
        has_arguments: Whether a node has kernelParams.
        calls: Number of a node -> its KcclCall.
        announced: The numbers of nodes whose KcclCall was replaced, in order.
        refusal: The error that an attempt to replace a KcclCall returns; 0: it succeeds.
    """

    def __init__(self):
        self.streams = []
        self.graphs = []
        self.capturing = {}
        self.nodes = {}
        self.node_context = CONTEXT
        self.early = []
        self.comm = {"abi_version": abi.ABI_VERSION, "world_size": 2}
        self.fit = 4
        self.has_arguments = True
        self.calls = {}
        self.announced = []
        self.refusal = 0
        self._kept = []
        self.meanwhile = lambda: None
        self.events = {}
        self.recorded = set()
        self.error = 0
        self.contexts = 0
        self._functions = {
            "launch": _Launch(self._launch),
            "launch_graph": _LaunchGraph(self._launch_graph),
            "launch_ex": _LaunchEx(self._launch_ex),
            "capture_info": _CaptureInfo(self._capture_info),
            "node_type": _NodeType(self._node_type),
            "get_params": _Params(self._get_params),
            "set_params": _Params(self._set_params),
            "function_name": _FunctionName(self._function_name),
            "is_capturing": _IsCapturing(self._is_capturing),
            "push_context": _Push(self._push),
            "pop_context": _Pop(self._pop),
        }
        self.queue = ffi.new("KcclGpuQueue *")
        for name, function in self._functions.items():
            setattr(self.queue, name, ctypes.cast(function, ctypes.c_void_p).value)
        self.queue.context = CONTEXT
        self.mailbox = self.queue.mailbox = ffi.new("KcclMailbox *")

    def _launch(self, *arguments):
        assert self.contexts == 1
        self.streams.append(arguments[8])
        return self.error

    def _launch_graph(self, graph, stream):
        assert self.contexts == 1
        self.graphs.append((graph, stream))
        return self.error

    def _is_capturing(self, stream, status):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        status[0], error = self.capturing.get(stream, (0, 0))
        return error

    # Nodes are numbered from 1 over all streams. A kernel's handle is its node's number.
    def _node(self, number):
        return [node for nodes in self.nodes.values() for node in nodes][number - 1]

    def _capture_info(self, stream, status, _id, _graph, nodes, edges, count):
        status[0], error = self.capturing.get(stream, (0, 0))
        first = 1
        for other, found in self.nodes.items():
            if other == stream:
                break
            first += len(found)
        count[0] = len(self.nodes.get(stream, ()))
        numbers = (ctypes.c_uint64 * 8)(*range(first, first + count[0]))
        self._kept.append(numbers)
        nodes[0] = edges[0] = ctypes.addressof(numbers)
        return error

    def _node_type(self, number, kind):
        kind[0] = 0 if self._node(number) is not None else 1
        return 0

    # CUDA_KERNEL_NODE_PARAMS_v2 as 8-byte words: [0] is func, [5] kernelParams, [8] ctx.
    def _get_params(self, number, params):
        call = self.calls.setdefault(
            number, ffi.new("KcclCall *", {"comm": self.comm, "fit": self.fit})
        )
        arguments = ffi.new("void *[1]", [call])
        self._kept.append(arguments)
        params[0] = number
        params[5] = int(ffi.cast("uintptr_t", arguments)) if self.has_arguments else 0
        params[8] = self.node_context
        return 0

    def _set_params(self, number, params):
        assert (params[0], params[8]) == (number, self.node_context)
        if self.refusal == 0:
            (given,) = ffi.cast("KcclCall **", params[5])[0:1]
            self.calls[number] = ffi.new("KcclCall *", given[0])
            self.announced.append(number)
        return self.refusal

    def _function_name(self, name, number):
        text = self._node(number).encode()
        self._kept.append(text)
        name[0] = text
        return 0

    def _launch_ex(self, config, function, arguments, _):
        assert self.contexts == 1 and function == FUNCTION
        call = ctypes.c_void_p.from_address(arguments).value
        assert ffi.cast("KcclCall *", call).kernel == abi.KERNELS["barrier_direct"]
        given = Config.from_address(config)
        attribute = given.attributes[0]
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert given.num_attributes == 1 and (attribute.id, attribute.value) == (6, 1)
        assert (*given.grid, *given.block, given.shared_bytes) == (8, 1, 1, 128, 1, 1, 0)
        self.early.append(given.stream)
        return self.error

    def _push(self, context):
        assert context == CONTEXT
        self.contexts += 1
        return 0

    def _pop(self, _):
        self.contexts -= 1
        return 0

    def call(self, name, *args):
        """Replaces the table's call(). An event records how long all launches so far took."""
        if name == "cuEventCreate":
            self.events[len(self.events)] = None
            return len(self.events) - 1
        if name == "cuEventRecord":
            event, stream = args
            self.recorded.add(stream)
            self.events[event] = len(self.streams) * CALL_US
        if name == "cuEventElapsedTime":
            begin, end = args
            return (self.events[end] - self.events[begin]) / 1e3
        return None

    def attempt(self, name, event):
        assert name == "cuEventDestroy"
        del self.events[event]


class World:
    """A fake Context of a communicator on a GPU, with what a prepared call needs."""

    def __init__(self):
        self.driver = Driver()
        self._context = ffi.new("KcclHostContext *")
        self.state = ffi.new("KcclState *")
        self.state.idle_context = int(ffi.cast("uintptr_t", self._context))
        self.now = 7
        self.backend = SimpleNamespace(
            name="cuda",
            has_streams=True,
            set_stream=lambda handle, stream: GpuBackend.set_stream(None, handle, stream),
            as_graph=self.as_graph,
            stream=lambda given, view: self.now if given is None else given,
            intervals_us=driver.intervals_us,
        )
        self.checks = False
        self.graph = 0
        self.fit = 4

    def as_graph(self, handle):
        ffi.cast("KcclGpuOp *", handle).graph = self.graph
        return self.graph

    def handle(self):
        call = ffi.new("KcclGpuOp *")
        call.queue = self.driver.queue
        call.function = FUNCTION
        call.op.kernel = lib.kccl_gpu_run_op
        call.op.call.kernel = abi.KERNELS["barrier_direct"]
        call.op.call.comm.state = int(ffi.cast("uintptr_t", self.state))
        call.op.call.fit = self.fit
        return ffi.gc(ffi.addressof(call, "op"), lambda _, owner=call: None)

    def prepared(self, stream):
        return OnStream(self, None, self.handle(), "the result", (), stream)

    def barrier(self):
        return BarrierOnStream("barrier", self, None, self.handle())

    def check_usable(self):
        if self.state.status != lib.kKcclOk:
            self.raise_failure()

    def check_agreement(self, signature):
        pass

    def raise_failure(self):
        raise kccl.BackendError(f"error {self.driver.queue.error}")
