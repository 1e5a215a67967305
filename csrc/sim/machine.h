// The machine runs the threads of all ranks (grids.h) as fibers, one at a time; it "moves" them.
// One thread of the host at a time moves a machine, and only one machine moves at a time.
#pragma once

#include <stdint.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "../include/kccl/targets/sim_device.h"
#include "alike.h"
#include "coops.h"
#include "copies.h"
#include "edges.h"
#include "grids.h"
#include "memory.h"
#include "schedule.h"
#include "types.h"
#include "watchdog.h"

namespace kccl::sim {

class Machine final : public Reporter {
  public:
    explicit Machine(const KcclSimSettings& settings);

    void restart(uint64_t seed);
    bool can_launch(const KcclSimLaunch& launch) const;
    std::shared_ptr<Grid> enqueue(const KcclSimLaunch& launch);
    // Runs all launches to their end, or up to the first finding.
    void run();

    // ---- One host thread for each rank (hosts.cpp) ----
    int launch_and_wait(const KcclSimLaunch& launch);
    void set_host(int rank, Rank::HostState state);

    // ---- Kernels that do not come back, and Ctrl-C (watchdog.cpp) ----
    bool tick(uint64_t code);
    void leave_kernel();
    // Ends the run soon, whatever the kernels do. Any OS thread may call it.
    void interrupt();
    // Called when the running thread calls the machine without a step. Reports the thread if it has
    // used too much CPU time since its last step.
    void end_if_late() {
        if (is_late_) report_late();
    }

    // ---- Launches (launches.cpp) ----
    void await_kernels_before();
    void launch_dependents();

    // ---- Calls that all threads of a coop make (coops.cpp) ----
    void begin_call(const KcclSimCoopCall& call);
    // Called when the thread is about to wait for others of its block or warp, or has ended. If
    // some of them are in a call that it does not make, records that (lack()).
    void check_calls(bool is_of_block);
    // Makes the thread wait in a block in which a call is incomplete. The call is reported when all
    // other threads have come as far as they can. Until then nobody in the block is released.
    void wait_incomplete(Fiber::State state);
    // Called when the thread is about to wait in this state. In a call by thread() the threads of a
    // warp poll together. Reports such a call if some of them do not make it, because they wait for
    // their block.
    void check_lone_calls(Fiber::State state);

    // ---- What kernels call (engine.cpp) ----
    Fiber& me() { return *current_; }
    // Called before every access that other threads can see, and before barriers. Counts a step.
    // Another thread may move here.
    void point(bool is_access = true);
    void yield_as(Fiber::State state);
    void make_ready(Fiber* fiber);
    // Called when something was stored in the granule.
    void wake(Granule& granule);
    void wake(Warp& warp);
    // Called when the thread uses what it has loaded since the last pause.
    void take_loads();
    // Called when the thread stores, or does something else that ends a poll.
    void end_poll();
    void settle_poll();
    void look(Granule& granule) {
        std::vector<Look>& polled = current_->polled;
        if (polled.size() < kManyLooks) {
            polled.push_back({&granule, granule.num_stores});
        } else {
            look_again(granule);
        }
    }
    void meet_block(Meeting meeting, bool is_fenced);
    void meet_warp(Meeting meeting);
    void end_thread();
    void* shared(const void* declaration, uint64_t num_bytes, uint64_t alignment);
    void barrier_init(uint64_t barrier, uint32_t arrivals);
    void barrier_arrive(uint64_t barrier, uint32_t num_bytes);
    bool barrier_has_completed(uint64_t barrier, uint32_t parity);
    void copy_async(uint64_t to, uint64_t from, uint32_t num_bytes, uint64_t barrier);
    void leave_if_found() {
        if (!findings.empty()) switch_away();
    }
    // Adds an event: what the running thread does, or what a thread did.
    void trace(KcclSimEventKind kind, uint64_t address, uint64_t value, uint32_t age = 0,
               Order order = Order::kRelaxed, Scope scope = Scope::kSystem);
    void trace(const Deed& deed, uint64_t address, uint64_t value);
    KcclSimPlace place(Agent agent, uint32_t call, uint64_t site) const;
    KcclSimPlace place(const Fiber& fiber) const;

    void report(KcclSimFindingKind kind, const Deed& deed, uint64_t address,
                const Deed& other) override;
    void report_here(KcclSimFindingKind kind);
    // Reports that the running thread makes `made`, which does not go with what another made
    // (calls.cpp).
    void report_made(KcclSimFindingKind kind, const KcclSimMade& made, const Made& other);
    // Called when the machine is stuck. Returns true if the reason is that ranks make their calls
    // on different channels.
    bool report_crossed();

    // ---- Where memory ends (bounds.cpp) ----
    // Tells whether the running thread may make this access. If not, reports it.
    bool may_access(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind) {
        return edges.allows(current_->owner, address, num_bytes) ||
               may_access_slowly(address, num_bytes, kind);
    }
    bool has_thread() const { return current_ != nullptr; }
    // Ends a running thread that cannot go on, and whose stack may be broken. Never returns.
    [[noreturn]] void fault(KcclSimFindingKind kind, uint64_t address, uint64_t site,
                            const char* text);
    // Reports a signal that the CPU has raised in the running thread. Never returns.
    [[noreturn]] void fault_by_signal(int signal, uint64_t address, uint64_t code_address);

    KcclSimSettings settings;
    Slots slots;
    Calls calls;
    Alike alike;
    Openings openings;
    Memory memory;
    Edges edges;
    Tape tape;
    uint64_t seed = 0;
    uint64_t steps = 0;
    uint64_t switches = 0;
    uint64_t torn_packets = 0;
    uint64_t late_copies = 0;
    uint64_t clock_ns = 0;
    bool has_failed_call = false;  // a call of some rank has failed
    std::vector<KcclSimFinding> findings;
    std::vector<KcclSimEvent> events;  // the last ones, as a ring
    uint64_t num_events = 0;
    std::vector<KcclSimWait> waits;  // who waited when waits last began to time out
    std::mutex mutex;

  private:
    enum class Halt { kAllEnded, kStuck, kFound, kGridEnded };

    void choose_style();
    Halt move();
    void start_pending();
    void start_next(Rank& rank, Stream& stream);
    void start(const std::shared_ptr<Grid>& grid);
    void start_block(Grid& grid);
    void start_thread(Block& block, Warp& warp, uint32_t index);
    void let_dependents_in(Block& block);
    void enter_call(Coop coop, CallLog& log, const KcclSimCoopCall& call, uint32_t num_common);
    void check_collected(const KcclSimCoopCall& call);
    void check_inputs(Coop coop, const KcclSimCoopCall& call);
    void step_exchange(Exchanges& exchanges, const KcclSimCoopCall& call);
    void lack(Coop coop, const Fiber& fiber, uint32_t number);
    void report_lack(const Lack& lack);
    void report_settled();
    void report_call(KcclSimFindingKind kind, const Fiber& fiber, const MadeCall& other,
                     const char* name);
    bool is_settled(const Lack& lack) const;
    template <class F>
    void for_threads_of(Coop coop, const Fiber& fiber, F f) const;
    void end_grid(Grid& grid);
    void end_block(Block& block, Known* known);
    uint32_t level_of(const Fiber& fiber) const;
    Fiber* pick();
    uint32_t movable(const Warp* except, Warp** warps) const;
    Fiber* take_turn();
    void offer_turn();
    void switch_away();
    bool complete_copy();
    void end_phase(Block& block, uint64_t barrier);
    bool wake_stored();
    bool wake_pollers();
    bool has_pollers() const;
    bool has_unstarted() const;
    bool pass_time(uint64_t at_least_ns);
    void count_step();
    void report_endless();
    void report_late();
    void report_barrier(const char* what);
    void name_shared(KcclSimFinding& finding) const;
    // Called when something has changed that a waiting thread may be waiting for.
    void note_change();
    void note_progress();
    void report_stuck(KcclSimFindingKind kind);
    void report_divergence(bool is_of_block);
    void name_missing(Coop among, Coop coop, const Fiber& fiber, uint32_t number,
                      KcclSimFinding& finding);
    void name_first_lack(KcclSimFinding& finding);
    void note_waits();
    void report_overdue();
    bool is_overdue(const Fiber& fiber) const;
    KcclSimEvent* next_event();
    void look_again(Granule& granule);
    Warp* warp_at(uint32_t index) const;
    void end_in_block(Fiber& fiber);
    void share_knowledge(const std::vector<Fiber*>& fibers, uint32_t slot, bool is_block);
    static void begin_poll(Fiber& fiber);
    void release_warp(Warp& warp);
    void release_block(Block& block);
    void move_for_hosts(std::unique_lock<std::mutex>& lock);
    bool may_move(uint64_t now_ns, uint64_t* wake_at_ns) const;
    static void body(void* fiber);
    bool may_access_slowly(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind);
    const Region* own_region(uint64_t address, uint64_t num_bytes) const;
    bool is_explained(uint64_t address, uint64_t num_bytes);
    template <class Visit>
    void visit_regions(Visit visit) const;
    void check_shared(const Block& block);
    void report_edge(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind);

    static constexpr size_t kManyLooks = 256;
    // The level of the thread that a seed stops: it moves when nothing else can.
    static constexpr uint32_t kStoppedLevel = 0;

    Random random_;
    Style style_;
    Weakness weakness_;
    Stacks stacks_;
    std::deque<Fiber> fibers_;
    std::vector<Fiber*> idle_fibers_;
    Ready ready_;
    std::vector<Rank> ranks_;
    std::vector<std::shared_ptr<Grid>> running_;
    std::deque<Warp*> warps_;              // begins with the first warp that has not ended
    uint32_t first_warp_ = 0;              // index of warps_[0]
    std::vector<uint32_t> slot_counters_;  // counter of each slot's last event
    ClockRef met_outside_;                 // knowledge of ranks that met outside of the machine
    bool has_turned_grid_ = false;         // a launch has ended, or lets the next one in
    size_t next_event_ = 0;                // position in the ring of events
    std::vector<uint32_t> to_wake_;        // warps that wait for a word that was stored
    std::vector<Block*> copying_;          // blocks with asynchronous copies under way
    Fiber* current_ = nullptr;
    Warp* next_warp_ = nullptr;  // by tape: the warp whose turn it is
    Context host_;
    uint64_t next_grid_ = 1;
    uint64_t changes_ = 0;
    uint64_t changes_at_wake_ = 0;
    // The host's time up to which the time that the machine was stuck has been added to its clock.
    uint64_t passed_until_ns_ = 0;
    uint32_t num_threads_ = 0;  // threads of running launches
    uint64_t endless_at_ = 0;   // step at which the run counts as endless
    uint32_t idle_rounds_ = 0;
    uint64_t passed_ns_ = 0;
    uint64_t halted_ns_ = 0;  // the time at which all threads had come to wait
    std::vector<Lack> lacks_;
    uint64_t watch_period_ns_ = 0;
    uint64_t moved_at_tick_ = 0;
    uint64_t idle_ticks_ = 0;  // since the last step
    std::atomic<bool> is_late_ = false;
    uint32_t num_sampled_ = 0;
    std::array<uint64_t, kKcclSimNumNamed> sampled_ = {};  // code of a thread that is late
    std::atomic<bool> is_interrupted_ = false;
    bool is_moved_ = false;
    std::condition_variable changed_;
};

// The machine that moves now. Calls of kernels go to it.
extern Machine* running;

// Makes a fiber the thread that kernels see as themselves (engine.cpp).
void show_self(Fiber& fiber);
const KcclSimEngine* engine_table();

}  // namespace kccl::sim
