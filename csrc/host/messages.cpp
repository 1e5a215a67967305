// The functions by which others begin, wait for and test messages, which messages.h has.
#include "messages.h"

namespace kccl::host {
namespace {

uint64_t open_messages(const KcclDeviceComm& comm, bool may_attach, KcclRoutes* routes) {
    void* memory = malloc(Messages::num_bytes(comm.world_size));
    if (memory == nullptr) return 0;
    return reinterpret_cast<uint64_t>(new (memory) Messages(comm, may_attach, routes));
}

Messages* from_handle(uint64_t messages) { return reinterpret_cast<Messages*>(messages); }
Messages& of_context(uint64_t idle_context) {
    return *from_handle(reinterpret_cast<const KcclHostContext*>(idle_context)->messages);
}

}  // namespace

void make_messages(uint64_t idle_context, KcclMessage* messages, const uint64_t* offsets,
                   uint64_t count, uint64_t input, uint64_t output) {
    for (uint64_t i = 0; i < count; ++i) {
        messages[i].address = (messages[i].receives != 0 ? output : input) + offsets[i];
    }
    of_context(idle_context).make_all(messages, count);
}

}  // namespace kccl::host

extern "C" {

uint64_t kccl_host_open_messages(const KcclDeviceComm* comm, uint32_t may_attach) {
    return kccl::host::open_messages(*comm, may_attach != 0, nullptr);
}

uint64_t kccl_host_open_routed_messages(const KcclDeviceComm* comm, KcclRoutes* routes) {
    return kccl::host::open_messages(*comm, routes->may_attach != 0, routes);
}

void kccl_host_close_messages(uint64_t messages) {
    kccl::host::Messages* each = kccl::host::from_handle(messages);
    each->~Messages();
    free(each);
}

uint32_t kccl_host_start_message(uint64_t messages, KcclMessage* message) {
    return kccl::host::from_handle(messages)->start(message);
}

uint32_t kccl_host_test_message(uint64_t messages, const KcclMessage* message) {
    return kccl::host::from_handle(messages)->test(message);
}

void kccl_host_send(uint64_t idle_context, const void* in, uint64_t num_bytes, int peer, int tag) {
    KcclMessage message = {};
    message.address = reinterpret_cast<uint64_t>(in);
    message.num_bytes = num_bytes;
    message.peer = peer;
    message.tag = tag;
    kccl::host::of_context(idle_context).make(&message);
}

void kccl_host_receive(uint64_t idle_context, void* out, uint64_t num_bytes, int peer, int tag) {
    KcclMessage message = {};
    message.address = reinterpret_cast<uint64_t>(out);
    message.num_bytes = num_bytes;
    message.peer = peer;
    message.tag = tag;
    message.receives = 1;
    kccl::host::of_context(idle_context).make(&message);
}

void kccl_host_bind_message(KcclHostOp* op) {
    op->kernel = [](const KcclCall* call) {
        const auto* state = reinterpret_cast<const KcclState*>(call->comm.state);
        kccl::host::of_context(state->idle_context)
            .wait(reinterpret_cast<KcclMessage*>(call->input));
    };
}

void kccl_host_bind_messages(KcclHostOp* op) {
    op->kernel = [](const KcclCall* call) {
        const auto* state = reinterpret_cast<const KcclState*>(call->comm.state);
        const auto& messages = *reinterpret_cast<const KcclMessages*>(call->input);
        kccl::host::of_context(state->idle_context)
            .make_all(reinterpret_cast<KcclMessage*>(messages.first), messages.count);
    };
}

}  // extern "C"
