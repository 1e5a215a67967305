// Implements the simulator's C interface: see api.inc.
#include <string.h>

#include <algorithm>
#include <cstddef>

#include "machine.h"

using kccl::sim::Machine;
using kccl::sim::Rank;

struct KcclSimMachine {
    explicit KcclSimMachine(const KcclSimSettings& settings) : machine(settings) {}
    Machine machine;
};

extern "C" {

KcclSimMachine* kccl_sim_create(const KcclSimSettings* settings) {
    return new KcclSimMachine(*settings);
}

void kccl_sim_destroy(KcclSimMachine* machine) { delete machine; }

void kccl_sim_add_window(KcclSimMachine* machine, int rank, uint64_t address, uint64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    machine->machine.memory.add_window(rank, address, num_bytes);
    machine->machine.edges.add({address, num_bytes, kKcclSimEdgeWindow, rank, -1, 0});
}

void kccl_sim_remove_window(KcclSimMachine* machine, uint64_t address) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    machine->machine.memory.remove_window(address);
    machine->machine.edges.remove(address);
}

void kccl_sim_add_memory(KcclSimMachine* machine, int rank, uint64_t address, uint64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    machine->machine.edges.add({address, num_bytes, kKcclSimEdgeWindow, rank, -1, 0, false});
}

void kccl_sim_forget_array(KcclSimMachine* machine, int rank, const KcclSimArray* array) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    machine->machine.edges.free(
        {array->address, array->num_bytes, kKcclSimEdgeFreed, rank, -1, array->name});
}

void kccl_sim_restart(KcclSimMachine* machine, uint64_t seed) { machine->machine.restart(seed); }

int kccl_sim_enqueue(KcclSimMachine* machine, const KcclSimLaunch* launch) {
    if (!machine->machine.can_launch(*launch)) return -1;
    machine->machine.enqueue(*launch);
    return 0;
}

uint32_t kccl_sim_run(KcclSimMachine* machine) {
    machine->machine.run();
    return static_cast<uint32_t>(machine->machine.findings.size());
}

void kccl_sim_set_tape(KcclSimMachine* machine, const uint8_t* tape, uint64_t length) {
    machine->machine.tape.prefix.assign(tape, tape + length);
}

uint64_t kccl_sim_choices(KcclSimMachine* machine, uint8_t* choices, uint8_t* bounds,
                          uint64_t capacity) {
    const kccl::sim::Tape& tape = machine->machine.tape;
    const uint64_t count = std::min<uint64_t>(capacity, tape.choices.size());
    memcpy(choices, tape.choices.data(), count);
    memcpy(bounds, tape.bounds.data(), count);
    return tape.choices.size();
}

int kccl_sim_launch(KcclSimMachine* machine, const KcclSimLaunch* launch) {
    if (!machine->machine.can_launch(*launch) || launch->stream != 0 || launch->is_dependent != 0) {
        return -1;
    }
    return machine->machine.launch_and_wait(*launch);
}

void kccl_sim_set_outside(KcclSimMachine* machine, int rank, int is_outside) {
    machine->machine.set_host(rank, is_outside != 0 ? Rank::kOutside : Rank::kRunning);
}

void kccl_sim_forget_calls(KcclSimMachine* machine, uint64_t state) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    machine->machine.calls.forget(state);
    machine->machine.alike.forget(state);
}

void kccl_sim_interrupt(KcclSimMachine* machine) { machine->machine.interrupt(); }

void kccl_sim_leave(KcclSimMachine* machine, int rank) {
    machine->machine.set_host(rank, Rank::kLeft);
}

void kccl_sim_run_op(const KcclCall* call) {
    const auto* op = reinterpret_cast<const KcclSimOp*>(reinterpret_cast<const uint8_t*>(call) -
                                                        offsetof(KcclSimOp, op.call));
    auto* state = reinterpret_cast<KcclState*>(call->comm.state);
    // The status is not ok after a failure, and after the communicator was closed. Its machine may
    // be gone then, so nothing is launched.
    if (state->status != kKcclOk) return;
    KcclSimLaunch launch = op->launch;
    launch.arguments = call;
    launch.argument_bytes = sizeof(KcclCall);
    if (kccl_sim_launch(op->machine, &launch) == 0) return;
    if (state->status == kKcclOk) state->status = kKcclAborted;
}

uint32_t kccl_sim_num_findings(KcclSimMachine* machine) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    return static_cast<uint32_t>(machine->machine.findings.size());
}

KcclSimFinding kccl_sim_finding(KcclSimMachine* machine, uint32_t index) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    return machine->machine.findings.at(index);
}

uint64_t kccl_sim_events(KcclSimMachine* machine, KcclSimEvent* events, uint64_t capacity) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    const std::vector<KcclSimEvent>& ring = machine->machine.events;
    const uint64_t total = machine->machine.num_events;
    const uint64_t count = std::min<uint64_t>({capacity, total, ring.size()});
    for (uint64_t i = 0; i < count; ++i) events[i] = ring[(total - count + i) % ring.size()];
    return count;
}

uint32_t kccl_sim_waits(KcclSimMachine* machine, KcclSimWait* waits, uint32_t capacity) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    const std::vector<KcclSimWait>& known = machine->machine.waits;
    const auto count = std::min<uint32_t>(capacity, static_cast<uint32_t>(known.size()));
    std::copy_n(known.begin(), count, waits);
    return count;
}

uint32_t kccl_sim_counts(KcclSimMachine* machine, KcclSimCount* counts, uint32_t capacity) {
    Machine& of = machine->machine;
    const std::lock_guard<std::mutex> lock(of.mutex);
    uint32_t count = 0;
    of.alike.visit_uneven([&](uint32_t rank, uint64_t num_calls, const kccl::sim::Made* last) {
        if (count == capacity) return;
        counts[count] = {};
        counts[count].rank = rank;
        counts[count].num_calls = num_calls;
        if (last != nullptr) {
            counts[count].made = last->what;
            const kccl::sim::Deed& deed = last->deed;
            counts[count].place = of.place(deed.event.agent, deed.call, deed.site);
        }
        ++count;
    });
    return count;
}

int kccl_sim_has_failed(KcclSimMachine* machine) {
    const std::lock_guard<std::mutex> lock(machine->machine.mutex);
    return machine->machine.has_failed_call ? 1 : 0;
}

KcclSimStats kccl_sim_stats(KcclSimMachine* machine) {
    const Machine& of = machine->machine;
    return {of.steps,        of.switches,
            of.memory.loads, of.memory.old_loads,
            of.torn_packets, of.memory.passed_stores,
            of.late_copies,  of.tape.choices.size()};
}

const void* kccl_sim_engine_table(void) { return kccl::sim::engine_table(); }

}  // extern "C"
