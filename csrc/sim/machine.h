// The machine runs the kernels of all ranks (grids.h), each simulated thread as a fiber, one at a
// time. A machine "moves" when it does that, and a thread "moves" when it runs. Only one machine of
// the process moves at a time, in one OS thread.
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
    // Runs all launches that have been enqueued to their end, or up to the first finding.
    void run();

    // ---- One host thread for each rank (hosts.cpp) ----
    int launch_and_wait(const KcclSimLaunch& launch);
    void set_host(int rank, Rank::HostState state);

    // ---- Kernels that do not come back, and Ctrl-C (watchdog.cpp) ----
    bool tick(uint64_t code);
    void leave_kernel();
    // Ends the run soon, whatever the kernels do. Any OS thread may call this.
    void interrupt();
    // Called when the running thread calls the machine without making a step. Reports the thread if
    // it has used too much CPU time since its last step, or if the run was interrupted.
    void end_if_late() {
        if (is_late_) report_late();
    }

    // ---- Launches (launches.cpp) ----
    void await_kernels_before();
    void launch_dependents();

    // ---- Calls that all threads of a coop make (coops.cpp) ----
    void begin_call(const KcclSimCoopCall& call);
    // Called when the running thread is about to wait for others of its block (is_of_block) or
    // warp, or has ended. If others have made a call that the thread then cannot make any more,
    // notes that by lack().
    void check_calls(bool is_of_block);
    // Makes the running thread wait, in this state, in a block in which one of the threads does not
    // make a call. The call is reported when all other threads have come as far as they can. Until
    // then no barrier of the block or its warps releases a thread.
    void wait_incomplete(Fiber::State state);
    // Called when the running thread is about to wait in this state. Checks calls with coop
    // kThread: the threads of a warp poll together in them, so all must make such a call. Reports a
    // call that threads of the warp wait in while others wait for their block instead.
    void check_lone_calls(Fiber::State state);

    // ---- What kernels call (engine.cpp) ----
    Fiber& me() { return *current_; }
    // Called before every access that other threads can see, and before barriers and fences. Counts
    // a step. Other threads may run here before the running thread goes on. is_access: false: an
    // exhaustive search does not choose the next thread here.
    void point(bool is_access = true);
    void yield_as(Fiber::State state);
    void make_ready(Fiber* fiber);
    // Called after a store to a granule. Wakes the warps that poll it, now or later.
    void wake(Granule& granule);
    void wake(Warp& warp);
    // Called when the running thread goes on with the values that it has loaded since its last
    // poll_pause(), so that these loads were no vain poll.
    void take_loads();
    // Called when the running thread stores, or does something else that no poll contains: its poll
    // is over, and has found what the thread waited for.
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
    // Adds an event to the ring: what the running thread does now, or what a thread did (`deed`).
    void trace(KcclSimEventKind kind, uint64_t address, uint64_t value, uint32_t age = 0,
               Order order = Order::kRelaxed, Scope scope = Scope::kSystem);
    void trace(const Deed& deed, uint64_t address, uint64_t value);
    KcclSimPlace place(Agent agent, uint32_t call, uint64_t site) const;
    KcclSimPlace place(const Fiber& fiber) const;

    void report(KcclSimFindingKind kind, const Deed& deed, uint64_t address,
                const Deed& other) override;
    void report_here(KcclSimFindingKind kind);
    // Reports that the running thread makes the call `made`, which conflicts with what another
    // thread has made (calls.cpp).
    void report_made(KcclSimFindingKind kind, const KcclSimMade& made, const Made& other);
    // Called when no thread can move. If the cause is that ranks make the same call on different
    // channels, reports that and returns true.
    bool report_crossed();

    // ---- Where memory ends (bounds.cpp) ----
    // Tells whether the running thread may access these bytes. If not, reports the access.
    bool may_access(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind) {
        return edges.allows(current_->owner, address, num_bytes) ||
               may_access_slowly(address, num_bytes, kind);
    }
    bool has_thread() const { return current_ != nullptr; }
    // Ends the run with a finding, because the running thread cannot go on; its stack may be
    // overwritten. Never returns.
    [[noreturn]] void fault(KcclSimFindingKind kind, uint64_t address, uint64_t site,
                            const char* text);
    // Ends the run with a finding for a signal that the CPU has raised in the running thread.
    // address: what the thread accessed. code_address: the instruction. Never returns.
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
    std::vector<KcclSimEvent> events;  // the last events of the run, as a ring
    uint64_t num_events = 0;           // how many events the run had
    std::vector<KcclSimWait> waits;    // who waited when waits last began to time out
    std::mutex mutex;                  // guards the machine if each rank has a host thread

  private:
    // Why move() has returned, in the order of the values: all launches have ended; no thread can
    // move; there is a finding; a launch has ended, or lets its dependents in.
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
    // note_change() is called when something has changed for which a thread may be waiting. Both
    // functions put off the step at which the run counts as endless.
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

    // How many loads of a poll are noted. After that a load is noted only if its word is not among
    // the last few noted (look_again()), because a wait without pauses would note loads forever.
    static constexpr size_t kManyLooks = 256;
    // kKcclSimStoppedThread: the level of the stopped thread, which moves only if no other can.
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
    uint32_t first_warp_ = 0;              // Warp::index of warps_[0]
    std::vector<uint32_t> slot_counters_;  // by slot: counter of its last event in ended launches
    ClockRef met_outside_;                 // what ranks knew that wait, or waited, outside
    bool has_turned_grid_ = false;         // move() must end a launch or begin blocks or launches
    size_t next_event_ = 0;                // position in the ring of events
    std::vector<uint32_t> to_wake_;        // warps that poll a word to which something was stored
    std::vector<Block*> copying_;          // blocks with asynchronous copies under way
    Fiber* current_ = nullptr;             // the running thread; null while the machine's own code
                                           // runs
    Warp* next_warp_ = nullptr;            // kKcclSimExhaustive: the warp that moves next
    Context host_;                         // the context of move(), outside of all fibers
    uint64_t next_grid_ = 1;               // number of the next launch
    uint64_t changes_ = 0;                 // how often note_change() was called
    uint64_t changes_at_wake_ = 0;         // `changes_` when wake_pollers() was last called
    // The host's time up to which the time that the machine was stuck has been added to its clock.
    uint64_t passed_until_ns_ = 0;
    uint32_t num_threads_ = 0;  // threads of running launches
    uint64_t endless_at_ = 0;   // step at which the run counts as endless
    uint32_t idle_rounds_ = 0;  // rounds of polls since the last change or jump of the clock
    uint64_t passed_ns_ = 0;    // pass_time(): the last jump; 0 if none since the last change
    uint64_t halted_ns_ = 0;    // the clock when all threads had come to wait
    std::vector<Lack> lacks_;
    uint64_t watch_period_ns_ = 0;  // CPU time between two calls of tick()
    uint64_t moved_at_tick_ = 0;    // steps and switches at the last tick
    uint64_t idle_ticks_ = 0;       // ticks since the last step
    // The running thread must be reported: see end_if_late().
    std::atomic<bool> is_late_ = false;
    uint32_t num_sampled_ = 0;
    std::array<uint64_t, kKcclSimNumNamed> sampled_ = {};  // where ticks met a thread that is late
    std::atomic<bool> is_interrupted_ = false;
    bool is_moved_ = false;            // a host thread is in move_for_hosts()
    std::condition_variable changed_;  // with `mutex`: wakes host threads that wait in hosts.cpp
};

// The machine that moves now, to which the calls of kernels go. Null if none moves.
extern Machine* running;

// Makes `fiber` the thread about which kernels get facts when they ask about themselves
// (engine.cpp).
void show_self(Fiber& fiber);
const KcclSimEngine* engine_table();

}  // namespace kccl::sim
