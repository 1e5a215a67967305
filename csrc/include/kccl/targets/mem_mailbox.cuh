// idle() and tell_host() of mem.cuh on GPUs: through a KcclMailbox in host memory that the device
// maps. If the context is null there is no mailbox, and both do nothing.
#pragma once

namespace kccl::mem {

KCCL_DEVICE uint32_t idle(uint64_t context, uint64_t, uint32_t, uint32_t* gone) {
    if (context == 0) return kKcclOk;
    const auto* mailbox = reinterpret_cast<const KcclMailbox*>(context);
    *gone = load<Order::kRelaxed, Scope::kSystem>(&mailbox->gone);
    const uint32_t interrupted = load<Order::kRelaxed, Scope::kSystem>(&mailbox->interrupted);
    return interrupted != 0 ? kKcclInterrupted : kKcclOk;
}

KCCL_DEVICE void tell_host(uint64_t context, uint32_t status, const KcclRecord& record) {
    if (context == 0) return;
    auto* mailbox = reinterpret_cast<KcclMailbox*>(context);
    mailbox->record = record;
    store<Order::kRelease, Scope::kSystem>(&mailbox->status, status);
}

}  // namespace kccl::mem
