/* The two packet protocols, ll16 and sentinel, and the reuse of their slots, as a Spin model.
 *
 * channel.cuh, scrub.cuh, ll16.cuh and sentinel.cuh argue why they are right; here all their runs
 * are tried. tests/csrc/test_spin_models.py starts the searches and plants bugs that must be found. It
 * also checks the quotes: what a comment quotes as "file.cuh function(): code" stands in that
 * function, and no access or sync of the functions modelled is missing. mem.pml is the memory;
 * channel.pml has epochs, credits and scrub; packets and calls are here.
 *
 * Modelled: WORLD_SIZE ranks of THREADS threads make calls on one channel without end, of any KINDS
 * in any order. The kinds are all_reduce by ll16 (reduce_scatter and all_gather do the same),
 * all_reduce by sentinel, broadcast from any root, and barrier. With two threads there are also
 * all_reduces of different lengths, and either thread may be the coop's first. Epochs count modulo
 * PERIOD, so wrap and scrub are among the runs. A store to a peer becomes visible late, and in any
 * order with the stores to other words; the halves of a packet are two words. What a rank stores
 * into its own window (scrub, re-arming) comes before a peer's push only by a release or fence, then
 * a word that the peer polls, then an acquire or fence there, as in PTX.
 *
 * Shown:
 *   - No word is overwritten before it is taken.
 *   - No word is taken twice, or before it comes. So what a call takes was pushed in that call.
 *   - No two stores to a word are unordered.
 *   - No scrub wipes a word of its own call.
 *   - No wait ends before the peers have entered the call.
 *   - Nobody waits for ever.
 *
 * Left out:
 *   - payloads, but for whether one looks like the sentinel;
 *   - time-outs, failures, reset;
 *   - closing a channel and opening it again, which syncs; the ends of kernels, which order what
 *     fences do;
 *   - find_special(), which says beforehand where enter_special() is due;
 *   - the staging and the protocols that use it; other channels, which share nothing; rounds, which
 *     are calls.
 *
 * Simplified: One packet stands for all that a thread moves. A load is performed at once and in
 * program order, for a branch depends on it. The fence of one thread stands for those of its coop:
 * it orders earlier calls, which ended with a sync, and each thread has polled every rank. A release
 * lasts until the credits sent before are visible. Packets and credits are relaxed, as on GPUs, but
 * a barrier's are released and acquired. A CPU orders more. csrc/sim, which runs the source itself,
 * has all this. */

#ifndef WORLD_SIZE
#define WORLD_SIZE 2
#endif
#ifndef THREADS
#define THREADS 1
#endif
#ifndef PERIOD
#define PERIOD 8
#endif
#ifndef NUM_SENTINEL_SLOTS
#define NUM_SENTINEL_SLOTS 4 /* abi.inc: kKcclNumSentinelSlots = 4, */
#endif

#define LL16 1
#define BROADCAST 2
#define SENTINEL 4
#define BARRIER 8
#ifndef KINDS
#define KINDS (LL16 | BROADCAST | SENTINEL | BARRIER)
#endif

/* A thread stops only before it polls and before its next call, and words come as late as the polls
 * let them. That is the worst case: a thread that takes late also pushes late, and two steps that
 * nothing orders are tried in either order. With -DFINE a thread stops between any two steps, and
 * words come at any time. */
#ifdef FINE
#define ONE_STEP
#else
#define ONE_STEP atomic
#endif

/* The bugs that -DPLANTED=name plants. */
#define NOTHING 0
#define ONE_SLOT 1
#define NO_CREDIT 2
#define CREDIT_OF_AN_EARLIER_CALL 3
#define ARRIVAL_COMPARED_BEHIND 4 /* "<" in place of has_reached() */
#define NO_SCRUB 5
#define NO_SCRUB_BARRIER 6
#define SCRUB_ARRIVES_RELAXED 7
#define SCRUB_AWAITS_RELAXED 8
#define SCRUBBED_TO_THIS_EPOCH 9
#define BARRIER_SCRUBBED 10
#define FLAG_COMPARED_BEHIND 11 /* "<" in place of equality */
#define ONE_HALF_CHECKED 12
#define NO_COOP_SYNC 13     /* in leave() */
#define ARRIVAL_UNSYNCED 14 /* in arrive() */
#define REARM_UNFENCED 15
#define REARM_TOO_EARLY 16 /* in the call that uses the words */
#define REARM_TOO_LATE 17  /* two calls after it */
#define REARM_THIS_LENGTH 18
#define PAYLOAD_MAY_BE_SENTINEL 19
#ifndef PLANTED
#define PLANTED NOTHING
#endif
#define planted(bug) (PLANTED == bug)

/* ---- Packets --------------------------------------------------------------------------------- */

/* ll16.cuh is_valid(): static_cast<uint32_t>(packet.half[0] >> 32) == epoch && */
/* ll16.cuh is_valid(): static_cast<uint32_t>(packet.half[1] >> 32) == epoch; */
#define is_valid_ll16(seen) \
    ((seen) == epoch || (planted(FLAG_COMPARED_BEHIND) && (seen) > epoch))
/* sentinel.cuh is_valid(): return packet.half[0] != kArmed && packet.half[1] != kArmed; */
#define is_valid(seen) \
    ((kind == SENTINEL && (seen) != ARMED) || (kind != SENTINEL && is_valid_ll16(seen)))
/* Whether poll() takes `seen` for the word of this call. */
#define is_accepted(word, seen) (is_valid(seen) || (planted(ONE_HALF_CHECKED) && (word) % 2 == 1))

/* exchange.cuh exchange(): const bool is_mine = first <= last; */
#define is_active (index < num_packets)

#include "mem.pml"
#include "channel.pml"

/* Packets to this rank itself are left out: its own threads take them, and no other rank sees them.
 * */
/* exchange.cuh push_to(): mem::store_packet(channel.outbox(k, i), pack(payload, channel.epoch())); */
/* exchange.cuh push(): if (k < channel.world_size()) push_to(channel, k, i, payload); */
/* exchange.cuh exchange(): for (uint32_t i = first; i <= last; i += size) send(i, false); */
/* exchange.cuh exchange(): if (is_mine && is_usable) send(first, true); */
/* all_reduce_one_shot_ll16.cuh all_reduce_one_shot_ll16():
 *     for (uint32_t n = 0; n < kUnit; ++n) ll16::push(channel, i * kUnit + n, unit[n]); */
/* reduce_scatter_direct_ll16.cuh reduce_scatter_direct_ll16():
 *     ll16::push_to(channel, k, i * kUnit + n, units[k][n]); */
/* all_gather_direct_ll16.cuh all_gather_direct_ll16():
 *     ll16::push(channel, i, load_payload(in, i, count, are_words)); */
/* sentinel.cuh push_to():
 *     mem::store_packet(at(channel_.receiver(k), outbox_) + i, packet); */
/* sentinel.cuh push():
 *     if (k < channel_.world_size()) mem::store_packet(outbox[k], packet); */
/* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
 *     slots.push(thread, sentinel::pack(first_payloads)); */
/* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
 *     slots.push(i, sentinel::pack(payloads)); */
/* broadcast_direct_ll16.cuh broadcast_direct_ll16(): ll16::push_to(channel, k, i, payload); */
inline push() {
    d_step {
        if
        :: is_active ->
           FOR_PEERS
               w = WORD(OUTBOX(k), slot, index);
               push_word(w, value);
               w++;
               push_word(w, value);
           END_PEERS
        :: else
        fi;
        w = 0
    }
}

/* A valid packet stays valid, so peers may be polled in turn. */
/* exchange.cuh await_all(): packets[source] = mem::load_packet(inbox[source]); */
/* exchange.cuh await_all(): are_valid &= is_valid(packets[source], epoch); */
/* exchange.cuh exchange(): failed = !take(is_mine ? turn + first : last, is_mine, false); */
/* all_reduce_one_shot_ll16.cuh all_reduce_one_shot_ll16():
 *     if (!ll16::await_units<kUnit>(channel, i, units)) return false; */
/* reduce_scatter_direct_ll16.cuh reduce_scatter_direct_ll16():
 *     if (!ll16::await_units<kUnit>(channel, i, units)) return false; */
/* all_gather_direct_ll16.cuh all_gather_direct_ll16():
 *     if (!ll16::await_all(channel, i, payloads)) return false; */
/* sentinel.cuh await_all(): packets[source] = mem::load_packet(inbox[source] + i); */
/* sentinel.cuh await_all(): are_valid &= is_valid(packets[source]); */
/* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
 *     failed = !slots.await_all(i, payloads); */
/* exchange.cuh await_one(): packet = mem::load_packet(inbox); return is_valid(packet, epoch); */
/* broadcast_direct_ll16.cuh broadcast_direct_ll16():
 *     if (!ll16::await_one(channel, root, i, &payload)) return false; */
/* barrier_direct.cuh acquire_each(): has_come = ll16::await_one(channel, source, 0, &nothing); */
/* barrier_direct.cuh acquire_each():
 *     mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>(); */
inline poll(is_from_all) {
    if
    :: is_active ->
       FOR_PEERS
           if
           :: is_from_all || PEER(k) == root ->
              w = WORD(INBOX(k), slot, index);
              d_step {
                  has_come(w) && has_come(w + 1) ->
                  take_word(w);
                  w++;
                  take_word(w);
                  /* A barrier acquires. */
                  learn((kind == BARRIER -> ORDERED : LEARNED));
                  w = 0
              }
           :: else
           fi;
       END_PEERS
    :: else
    fi
}

/* sentinel.cuh slot(): calls % kKcclNumSentinelSlots */
#define sentinel_slot(calls) (2 + (calls) % NUM_SENTINEL_SLOTS)
#define calls_ (slot - 2 + NUM_SENTINEL_SLOTS)
#define back (1 - planted(REARM_TOO_EARLY) + planted(REARM_TOO_LATE))

/* All words are packets here, so a fence of packets is a fence. */
/* sentinel.cuh Slots(): mem::fence_packets(); */
inline order_rearmed() {
    d_step {
        if
        :: planted(REARM_UNFENCED)
        :: else -> fence()
        fi
    }
}

inline rearm() {
    d_step {
        if
        /* sentinel.cuh rearm(): for (uint32_t i = channel_.thread(); i < stale_packets_; */
        :: index < sentinel_packets &&
           (!planted(REARM_THIS_LENGTH) || index < num_packets) ->
           FOR_PEERS
               /* sentinel.cuh: calls_ % kNumSlots == 0 ? kNumSlots - 1 : -1 */
               /* sentinel.cuh rearm(): mem::Packet* const stale = inbox_ + to_stale_; */
               w = WORD(INBOX(k), sentinel_slot(calls_ - back), index);
               /* sentinel.cuh rearm():
                *     mem::store_packet(stale + (source * slot_packets_ + i),
                *                       mem::Packet{{kArmed, kArmed}}); */
               store_own_word(w, ARMED);
               w++;
               store_own_word(w, ARMED);
           END_PEERS
        :: else
        fi;
        w = 0
    }
    d_step {
        /* sentinel.cuh rearm(): channel_.state().sentinel_calls = calls_ + 1; */
        sentinel_calls = (calls_ + 1) % NUM_SENTINEL_SLOTS;
        /* sentinel.cuh rearm(): channel_.state().sentinel_packets = num_packets; */
        sentinel_packets = num_packets
    }
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* The first thread to make a call decides for all threads which call it is. Only planted bugs let
 * it get far ahead. */
#define MAX_AHEAD 3
chan calls[WORLD_SIZE * THREADS] = [MAX_AHEAD] of { byte, byte, byte, bit };

inline decide() {
    if
    :: (KINDS) & LL16 -> kind = LL16
    :: (KINDS) & SENTINEL -> kind = SENTINEL
    :: (KINDS) & BARRIER -> kind = BARRIER
    :: (KINDS) & BROADCAST -> kind = BROADCAST; root = 0
    :: (KINDS) & BROADCAST -> kind = BROADCAST; root = 1
    :: (KINDS) & BROADCAST && WORLD_SIZE > 2 -> kind = BROADCAST; root = 2
    fi;
    num_packets = THREADS;
#if THREADS > 1
    if
    :: skip
    :: kind == LL16 || kind == SENTINEL -> num_packets = 1
    :: kind != BROADCAST -> is_swapped = true
    fi;
#endif
    do
    :: w < WORLD_SIZE * THREADS -> nfull(calls[w]); w++
    :: else -> break
    od;
    w = 0;
    d_step {
        do
        :: w < WORLD_SIZE * THREADS ->
           calls[w] ! kind, root, num_packets, is_swapped;
           w++
        :: else -> break
        od;
        w = 0
    }
}

active [WORLD_SIZE * THREADS] proctype Thread() {
    byte kind, root, num_packets, index, slot, value;
    bit is_swapped;
    /* The channel, open: */
    byte epoch, sentinel_calls, sentinel_packets;
    bit credit_due;
    byte k, s, w;
    do
    :: ONE_STEP {
           if
           :: len(calls[_pid]) == 0 -> decide()
           :: else
           fi;
           d_step {
               calls[_pid] ? kind, root, num_packets, is_swapped;
               index = (is_swapped -> THREADS - 1 - _pid % THREADS : _pid % THREADS)
           }
           /* all_reduce_one_shot_ll16.cuh all_reduce_one_shot_ll16():
            *     return ll16::exchange<platform::DefaultFloats>(
            *         channel, kKcclAllReduceOneShotLl16, Exchange::kPairwise, */
           /* reduce_scatter_direct_ll16.cuh reduce_scatter_direct_ll16():
            *     return ll16::exchange<platform::DefaultFloats>(
            *         channel, kKcclReduceScatterDirectLl16, Exchange::kPairwise, */
           /* all_gather_direct_ll16.cuh all_gather_direct_ll16():
            *     return ll16::exchange(channel, kKcclAllGatherDirectLl16, Exchange::kPairwise, */
           /* A relaxed barrier is a call of one packet. */
           /* barrier_direct.cuh barrier_direct(): ll16::push(channel, i, 0); */
           /* barrier_direct.cuh barrier_direct(): return ll16::await_all(channel, i, nothing); */
           /* barrier_direct.cuh barrier_direct():
            *     return ll16::exchange(channel, kKcclBarrierDirect, Exchange::kPairwise, 1, */
           /* barrier_direct.cuh barrier_direct(): channel.coop().sync(); */
           /* barrier_direct.cuh barrier_direct():
            *     if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>(); */
           if
           :: kind == BARRIER -> sync(); d_step { release(); w = 0 }
           :: else
           fi;
           /* exchange.cuh exchange(): const Status entered = channel.next(kernel, kind); */
           /* exchange.cuh exchange(): channel.next_plain(kernel); */
           /* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
            *     if (!channel.enter(kKcclAllReduceOneShotSentinel)) return channel.leave(true); */
           /* channel.cuh enter(): return next(kernel, Exchange::kPairwise) == kKcclOk; */
           /* channel.cuh enter(): next_plain(kernel); return usable; */
           /* barrier_direct.cuh barrier_direct():
            *     if (!channel.enter(kKcclBarrierDirect)) return channel.leave(true); */
           /* broadcast_direct_ll16.cuh broadcast_direct_ll16():
            *     return ll16::exchange(channel, kKcclBroadcastDirectLl16, Exchange::kCredited, */
           next(kind == BROADCAST);
           d_step {
               if
               :: kind == SENTINEL ->
                  /* sentinel.cuh: calls_(channel.state().sentinel_calls), */
                  slot = sentinel_slot(sentinel_calls);
                  /* sentinel.cuh disarmed(): return payload == kArmed ? payload >> 1 : payload; */
                  value = DATA * !planted(PAYLOAD_MAY_BE_SENTINEL)
               :: else ->
                  slot = parity;
                  value = epoch
               fi
           }
           if
           :: kind == LL16 -> push()
           :: kind == SENTINEL ->
              order_rearmed();
              push();
              /* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
               *     slots.rearm(num_packets); */
              rearm()
           /* broadcast_direct_ll16.cuh broadcast_direct_ll16():
            *     const bool is_root = channel.comm().rank == root; */
           :: kind == BROADCAST && rank == root -> push()
           /* Here all threads push. In the source only the first one does, and its packet orders
            * what all have done. */
           /* barrier_direct.cuh barrier_direct(): if (leads) ll16::push(channel, 0, 0); */
           :: kind == BARRIER -> push()
           :: else
           fi
       }
       ONE_STEP {
           if
           :: kind == LL16 || kind == SENTINEL || kind == BARRIER -> poll(true)
           :: kind == BROADCAST && rank != root -> poll(false)
           :: else
           fi;
           /* exchange.cuh exchange(): return channel.leave(failed); */
           /* exchange.cuh exchange():
            *     return channel.leave(!is_usable ||
            *                          !take(is_mine ? first : last, is_mine, true)); */
           /* all_reduce_one_shot_sentinel.cuh all_reduce_one_shot_sentinel():
            *     return channel.leave(failed); */
           /* barrier_direct.cuh barrier_direct():
            *     return channel.leave(!acquire_each(channel)); */
           leave();
           kind = 0;
           d_step {
               root = 0; num_packets = 0; index = 0; slot = 0; value = 0; is_swapped = 0
           }
       }
    od
}

#ifdef FINE
#define wire (_pid - WORLD_SIZE * THREADS)
active [NUM_WORDS] proctype Wire() {
end:
    do
    :: d_step { in_flight[wire] != NONE -> becomes_visible(wire) }
    od
}

#define flag_wire (wire - NUM_WORDS)
active [2 * NUM_BOXES] proctype FlagWire() {
end:
    do
    :: d_step { flag_in_flight[flag_wire] != NONE -> flag_becomes_visible(flag_wire) }
    od
}
#endif
