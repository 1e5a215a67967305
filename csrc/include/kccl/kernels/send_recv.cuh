// send_recv: sends messages to peers and receives messages from peers, all at the same time, on
// GPUs. A call has at most one message to each rank and one from each. The sender writes a message
// once, into the receiver's pipes (pipes.cuh). Ranks without a message take no part.
//
// Why the next call cannot corrupt this one: each step of a pipe waits for the credit of the step
// that used its slot before.
#pragma once

#include "../any_source.cuh"

namespace kccl {

// Sends and receives the messages that `call` describes in `messages`, `sends`, `receives`,
// `send_from` and `receive_to`. The messages of two ranks on one channel are received in the order
// in which they were sent. Both ranks must give a message the same length and tag, except that a
// receive may take any tag. On return this coop has received its slices. It may reuse the slices
// that it sends, although the peer may not have received the short ones yet.
//
// If `call.peer` is not zero, it has a bit for each rank from which one of the receives takes its
// message: the first one that comes with the receive's tag. This receive stands in `messages`,
// `receives` and `receive_to` as one from the lowest of these ranks, and no other receive of the
// call is from one of them. `call.output` is the address of a word that gets the source plus 1, and
// above 8 bits the message's tag; 0: none. A kernel that makes several such calls makes each by one
// coop.
//
// Called by all threads of the coop (a thread, warp or block: coop.cuh). `blocks` coops make the
// call together, and this is number `block` of them. If `blocks` is at least the number of
// messages, no message waits for another one. On each rank only one call at a time may use a
// channel.
//
// `begin()` is called once, by all threads, before memory is read. What is computed from `call`
// alone comes before it, so that a kernel does that while the kernel before it still runs.
template <class Coop, class Begin>
KCCL_DEVICE Status send_recv(Coop coop, const DeviceComm& comm, const Call& call, uint32_t block,
                             uint32_t blocks, const Begin& begin) {
    const PipeShape shape(comm);
    uint32_t num_messages = 0;
    for (uint64_t rest = call.messages; rest != 0; rest &= rest - 1) ++num_messages;
    // The number of blocks that share one message.
    const uint32_t each = num_messages != 0 && blocks > num_messages ? blocks / num_messages : 1;
    // The number of the block that has the next message's first slice.
    uint32_t first = 0;
    const auto sources = static_cast<uint32_t>(call.peer);
    bool has_begun = false;
    const auto begin_once = [&] {
        if (!has_begun) begin();
        has_begun = true;
    };
    for (uint64_t rest = call.messages; rest != 0; rest &= rest - 1) {
        const int bit = first_of(static_cast<uint32_t>(rest));
        const uint32_t number = block - first;
        first = first + each < blocks ? first + each : 0;
        if (number >= each) continue;
        const bool receives = bit >= kKcclMaxWorldSize;
        int peer = receives ? bit - kKcclMaxWorldSize : bit;
        const MessageHead head = {receives ? call.receives[peer] : call.sends[peer]};
        const uint64_t num_bytes = head.num_bytes();
        const uint32_t num_slices = shape.slices_of(num_bytes, call.channel);
        constexpr uint64_t kUnit = 16;
        const uint64_t units = (num_bytes + kUnit - 1) / kUnit;
        // keep() makes the compiler have these before begin().
        const uint64_t share = mem::keep((units + num_slices - 1) / num_slices * kUnit);
        const uint64_t array = receives ? call.receive_to[peer] : call.send_from[peer];
        if (receives && sources != 0 && peer == first_of(sources) && number < num_slices) {
            begin_once();
            const AnySource<Coop> any(coop, comm, shape, call.channel, sources, head);
            peer = any.choose(number, each < num_slices ? each : num_slices, call.output);
            if (peer < 0) return status_of(comm);
        }
        for (uint32_t i = number; i < num_slices; i += each) {
            const Slice slice = slice_of(num_bytes, share, i);
            auto* const bytes = reinterpret_cast<uint8_t*>(mem::keep(array + slice.begin));
            PipeEnd<Coop> end(coop, comm, shape, receives ? kKcclRecvFrom : kKcclSendTo, peer,
                              call.channel, i);
            begin_once();
            end.open();
            const Status status = receives ? end.receive(bytes, slice.count, head)
                                           : end.send(bytes, slice.count, head);
            if (status != kKcclOk) return status;
        }
    }
    if (has_begun) return kKcclOk;
    begin();
    return coop.any(status_of(comm) != kKcclOk) ? status_of(comm) : kKcclOk;
}

// The call in a kernel that makes other calls too.
template <class Coop>
KCCL_DEVICE Status send_recv(Coop coop, const DeviceComm& comm, const Call& call, uint32_t block,
                             uint32_t blocks) {
    // An earlier call in this kernel may have stored the pipes' counters, which all threads load.
    return send_recv(coop, comm, call, block, blocks, [&] { coop.sync(); });
}

namespace kernels {

KCCL_KERNEL_OF(kMostStepThreads)
void send_recv(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    kccl::send_recv(block(), call.comm, call, platform::block_in_grid(),
                    platform::blocks_per_grid(), [&] {
                        mem::await_kernels_before();
                        // The next call's blocks compute, and wait for the end of this kernel.
                        if (call.dependent == kKcclEarlyDependent) mem::launch_dependents();
                    });
}

}  // namespace kernels
}  // namespace kccl
