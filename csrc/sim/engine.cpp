// The functions that kernels call through their table, KcclSimEngine: see targets/sim_device.h. All
// of them run on a fiber's stack.
#include <string.h>

#include "answers.h"
#include "machine.h"

namespace kccl::sim {
namespace {

#define KCCL_SIM_SITE() reinterpret_cast<uint64_t>(__builtin_return_address(0))

KcclSimThread* self = nullptr;

// Notes in the thread's Fiber where it calls the machine, for which address. Returns the machine.
Machine& at(uint64_t site, const void* address) {
    Machine& machine = *running;
    machine.me().site = site;
    machine.me().address = reinterpret_cast<uint64_t>(address);
    return machine;
}

// Tells whether an address is neither null nor in an array at null.
bool is_memory(const void* address) { return reinterpret_cast<uint64_t>(address) >= 4096; }

// Tells whether the thread may make an access. If not, reports it; the caller must not make it.
bool is_valid(Machine& machine, const void* address, uint32_t num_bytes,
              KcclSimEventKind kind = kKcclSimLoad) {
    const auto at = reinterpret_cast<uint64_t>(address);
    if (!is_memory(address) || at % num_bytes != 0) {
        machine.me().address = at;
        machine.report_here(kKcclSimInvalidAccess);
        if (is_memory(address)) machine.findings.back().alignment = num_bytes;
    } else if (machine.may_access(at, num_bytes, kind)) {
        return true;
    }
    machine.leave_if_found();
    return false;
}

Memory::Seen load_at(Machine& machine, const Memory::Access32Or64& access) {
    Fiber& me = machine.me();
    const Memory::Seen seen = machine.memory.load(me.knowledge, access);
    machine.look(*seen.granule);
    me.saw_old = me.saw_old || !seen.is_newest;
    machine.trace(kKcclSimLoad, access.address, seen.value, seen.age, access.order, access.scope);
    machine.leave_if_found();
    return seen;
}

void store_at(Machine& machine, const Memory::Access32Or64& access, uint64_t value) {
    Granule* const granule = machine.memory.store(machine.me().knowledge, access, value);
    machine.trace(kKcclSimStore, access.address, value, 0, access.order, access.scope);
    machine.wake(*granule);
    machine.leave_if_found();
}

uint64_t load(const void* address, uint32_t num_bytes, uint32_t order, uint32_t scope) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.point();
    if (!is_valid(machine, address, num_bytes)) return 0;
    const Memory::Seen seen =
        load_at(machine, {reinterpret_cast<uint64_t>(address), num_bytes, static_cast<Order>(order),
                          static_cast<Scope>(scope), site, false});
    return seen.value;
}

void store(void* address, uint64_t value, uint32_t num_bytes, uint32_t order, uint32_t scope) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.end_poll();
    machine.point();
    if (!is_valid(machine, address, num_bytes, kKcclSimStore)) return;
    store_at(machine,
             {reinterpret_cast<uint64_t>(address), num_bytes, static_cast<Order>(order),
              static_cast<Scope>(scope), site, false},
             value);
}

void load_packet(const void* address, uint64_t* halves, uint32_t unit_bytes, uint32_t scope) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.point();
    if (!is_valid(machine, address, 16)) return;
    const auto begin = reinterpret_cast<uint64_t>(address);
    auto* to = reinterpret_cast<uint8_t*>(halves);
    Event first;
    bool is_torn = false;
    for (uint32_t offset = 0; offset < 16; offset += unit_bytes) {
        const Memory::Seen seen = load_at(machine, {begin + offset, unit_bytes, Order::kRelaxed,
                                                    static_cast<Scope>(scope), site, true});
        memcpy(to + offset, &seen.value, unit_bytes);
        if (offset == 0) first = seen.writer;
        // If untorn, the units come from consecutive stores of one thread, or from no store.
        const uint32_t counter = first.counter == 0 ? 0 : first.counter + offset / unit_bytes;
        is_torn = is_torn || seen.writer.counter != counter || seen.writer.agent != first.agent;
    }
    if (is_torn) ++machine.torn_packets;
}

void store_packet(void* address, const uint64_t* halves, uint32_t unit_bytes, uint32_t scope) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.end_poll();
    if (!is_valid(machine, address, 16, kKcclSimStore)) return;
    const auto begin = reinterpret_cast<uint64_t>(address);
    const auto* from = reinterpret_cast<const uint8_t*>(halves);
    for (uint32_t offset = 0; offset < 16; offset += unit_bytes) {
        machine.point();
        uint64_t unit = 0;
        memcpy(&unit, from + offset, unit_bytes);
        store_at(
            machine,
            {begin + offset, unit_bytes, Order::kRelaxed, static_cast<Scope>(scope), site, true},
            unit);
    }
}

Memory::Updated update_at(Machine& machine, const Memory::Access32Or64& access, Memory::Update what,
                          uint32_t value) {
    const Memory::Updated done = machine.memory.update(machine.me().knowledge, access, what, value);
    const KcclSimEventKind kind = done.is_stored ? kKcclSimStore : kKcclSimLoad;
    machine.trace(kind, access.address, done.after, 0, access.order, access.scope);
    if (done.is_stored) machine.wake(*done.granule);
    machine.leave_if_found();
    return done;
}

uint32_t claim(uint32_t* address, uint32_t value) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.end_poll();
    machine.point();
    if (!is_valid(machine, address, 4, kKcclSimStore)) return 0;
    const Memory::Updated done = update_at(
        machine,
        {reinterpret_cast<uint64_t>(address), 4, Order::kRelaxed, Scope::kDevice, site, false},
        Memory::Update::kClaim, value);
    return done.is_stored ? 1 : 0;
}

uint32_t add(uint32_t* address, uint32_t value, uint32_t order, uint32_t scope) {
    const uint64_t site = KCCL_SIM_SITE();
    Machine& machine = at(site, address);
    machine.end_poll();
    machine.point();
    if (!is_valid(machine, address, 4, kKcclSimStore)) return 0;
    return update_at(machine,
                     {reinterpret_cast<uint64_t>(address), 4, static_cast<Order>(order),
                      static_cast<Scope>(scope), site, false},
                     Memory::Update::kAdd, value)
        .after;
}

void fence(uint32_t order, uint32_t scope) {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.take_loads();
    // In an exhaustive search only a fence that other threads can notice gets a choice: kSeqCst.
    machine.point(order == static_cast<uint32_t>(Order::kSeqCst));
    machine.memory.fence(machine.me().knowledge, static_cast<Order>(order),
                         static_cast<Scope>(scope));
    machine.trace(kKcclSimFence, 0, 0, 0, static_cast<Order>(order), static_cast<Scope>(scope));
}

void fence_packets() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.take_loads();
    machine.point(false);
    Memory::fence_packets(machine.me().knowledge);
    machine.trace(kKcclSimFencePackets, 0, 0);
}

// Checks a plain access that the kernel makes next. No other thread runs in between.
void announce(const void* address, uint64_t num_bytes, uint64_t alignment, const void* site,
              bool is_write) {
    Machine& machine = at(reinterpret_cast<uint64_t>(site), address);
    machine.end_if_late();
    if (!is_memory(address) || reinterpret_cast<uint64_t>(address) % alignment != 0) {
        machine.report_here(kKcclSimInvalidAccess);
        if (is_memory(address)) machine.findings.back().alignment = uint32_t(alignment);
    } else if (machine.may_access(reinterpret_cast<uint64_t>(address), num_bytes,
                                  is_write ? kKcclSimWrite : kKcclSimRead)) {
        machine.memory.plain(machine.me().knowledge, reinterpret_cast<uint64_t>(address), num_bytes,
                             is_write, reinterpret_cast<uint64_t>(site));
    }
    machine.leave_if_found();
}

void read(const void* address, uint64_t num_bytes, uint64_t alignment, const void* site) {
    announce(address, num_bytes, alignment, site, false);
}

void write(const void* address, uint64_t num_bytes, uint64_t alignment, const void* site) {
    announce(address, num_bytes, alignment, site, true);
}

void meet_block(uint32_t fenced) {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.me().exchanged = 0;
    machine.point(false);
    machine.meet_block(Meeting::kSync, fenced != 0);
    machine.leave_if_found();
}

uint32_t block_any(uint32_t mine) {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.me().exchanged = mine != 0 ? 1 : 0;
    machine.point(false);
    machine.meet_block(Meeting::kAny, true);
    machine.leave_if_found();
    return machine.me().exchanged != 0 ? 1 : 0;
}

// A barrier of the warp does not end a poll (polls.cpp): the threads of a warp may poll together.
void meet_warp() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.trace(kKcclSimMeetWarp, 0, 0);
    machine.meet_warp(Meeting::kSync);
    machine.leave_if_found();
}

// A vote does not end a poll (polls.cpp): the thread still waits for the word that it loaded last.
uint64_t warp_ballot(uint32_t mine) {
    Machine& machine = *running;
    machine.me().exchanged = mine;
    machine.trace(kKcclSimMeetWarp, 0, mine);
    machine.meet_warp(Meeting::kBallot);
    machine.leave_if_found();
    return machine.me().exchanged;
}

uint64_t shuffle(uint64_t value, uint32_t source_lane) {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.me().exchanged = value;
    machine.me().source_lane = source_lane;
    machine.trace(kKcclSimMeetWarp, 0, value);
    machine.meet_warp(Meeting::kShuffle);
    machine.leave_if_found();
    return machine.me().exchanged;
}

void await_kernels_before() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.await_kernels_before();
    machine.leave_if_found();
}

void launch_dependents() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.launch_dependents();
}

void* shared(const void* declaration, uint64_t num_bytes, uint64_t alignment) {
    running->me().site = KCCL_SIM_SITE();
    return running->shared(declaration, num_bytes, alignment);
}

void* dynamic_shared() {
    return running->shared(nullptr, running->me().block->grid->launch.shared_bytes, 128);
}

uint64_t clock_ns() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.end_if_late();
    machine.leave_if_found();
    machine.me().looked_ns = machine.clock_ns;
    return machine.clock_ns;
}

void poll_pause() {
    Machine& machine = *running;
    Fiber& me = machine.me();
    machine.trace(kKcclSimPause, me.address, 0);
    machine.settle_poll();
}

// Simulated ranks have no processes that end, and the machine itself handles interrupts.
uint32_t idle(uint64_t, uint32_t, uint32_t*) { return kKcclOk; }

// The host finds the failure in the rank's KcclState, so here only the machine is told.
void tell_host(uint64_t, uint32_t, const void*) { running->has_failed_call = true; }

void barrier_init(void* barrier, uint32_t arrivals) {
    Machine& machine = at(KCCL_SIM_SITE(), barrier);
    if (!is_valid(machine, barrier, 8)) return;
    machine.end_poll();
    machine.point();
    machine.barrier_init(reinterpret_cast<uint64_t>(barrier), arrivals);
    machine.leave_if_found();
}

void barrier_arrive(void* barrier, uint32_t num_bytes) {
    Machine& machine = at(KCCL_SIM_SITE(), barrier);
    if (!is_valid(machine, barrier, 8)) return;
    machine.end_poll();
    machine.point();
    machine.barrier_arrive(reinterpret_cast<uint64_t>(barrier), num_bytes);
    machine.leave_if_found();
}

uint32_t barrier_has_completed(const void* barrier, uint32_t parity) {
    Machine& machine = at(KCCL_SIM_SITE(), barrier);
    if (!is_valid(machine, barrier, 8)) return 0;
    machine.point();
    const bool result = machine.barrier_has_completed(reinterpret_cast<uint64_t>(barrier), parity);
    machine.leave_if_found();
    return result ? 1 : 0;
}

void copy_async(void* to, const void* from, uint32_t num_bytes, void* barrier) {
    Machine& machine = at(KCCL_SIM_SITE(), to);
    if (!is_valid(machine, to, 16) || !is_valid(machine, from, 16) ||
        !is_valid(machine, barrier, 8)) {
        return;
    }
    if (!machine.may_access(reinterpret_cast<uint64_t>(to), num_bytes, kKcclSimWrite) ||
        !machine.may_access(reinterpret_cast<uint64_t>(from), num_bytes, kKcclSimRead)) {
        machine.leave_if_found();
    }
    machine.end_poll();
    machine.point();
    machine.copy_async(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), num_bytes,
                       reinterpret_cast<uint64_t>(barrier));
    machine.leave_if_found();
}

uint32_t copies_late() { return running->settings.model == kKcclSimSm90 ? 1 : 0; }

void fence_copies() {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.take_loads();
    machine.point();
    Fiber& me = machine.me();
    join(me.fenced, me.knowledge.snapshot());
    ++me.knowledge.counter;
    machine.trace(kKcclSimFence, 0, 0, 0, Order::kAcqRel, Scope::kBlock);
}

void enter_call(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch) {
    Machine& machine = at(KCCL_SIM_SITE(), nullptr);
    machine.end_poll();
    const BegunCall& begun = machine.me().begun;
    const uint64_t site = begun.name != nullptr ? begun.site : 0;
    machine.me().knowledge.call = machine.calls.enter(state, kernel, channel, epoch, site);
    machine.trace(kKcclSimEnterCall, 0, epoch);
}

constexpr KcclSimEngine kTable = {
    .self = &self,
    .load = load,
    .store = store,
    .load_packet = load_packet,
    .store_packet = store_packet,
    .claim = claim,
    .add = add,
    .fence = fence,
    .fence_packets = fence_packets,
    .read = read,
    .write = write,
    .meet_block = meet_block,
    .meet_warp = meet_warp,
    .block_any = block_any,
    .warp_ballot = warp_ballot,
    .shuffle = shuffle,
    .await_kernels_before = await_kernels_before,
    .launch_dependents = launch_dependents,
    .shared = shared,
    .dynamic_shared = dynamic_shared,
    .clock_ns = clock_ns,
    .poll_pause = poll_pause,
    .idle = idle,
    .tell_host = tell_host,
    .copies_late = copies_late,
    .barrier_init = barrier_init,
    .barrier_arrive = barrier_arrive,
    .barrier_has_completed = barrier_has_completed,
    .copy_async = copy_async,
    .fence_copies = fence_copies,
    .enter_call = enter_call,
    .window_room = window_room,
    .call_begins = call_begins,
    .channel_opens = channel_opens,
    .channel_closes = channel_closes,
    .move_bytes = move_bytes,
    .fill_bytes = fill_bytes,
    .stop_overrun = stop_overrun,
    .stop_assertion = stop_assertion,
    .begin_together = begin_together,
    .refuse_argument = refuse_argument,
};

}  // namespace

void show_self(Fiber& fiber) { self = &fiber.self; }

const KcclSimEngine* engine_table() { return &kTable; }

}  // namespace kccl::sim
