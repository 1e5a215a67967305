/* Failure and reset(), as a Spin model: Communicator.reset(), Mesh.reset(), and calls after a
 * failure: a call looks at the status before it pushes. The latch of an open channel is left out.
 * tests/csrc/test_spin_models.py starts the searches and plants bugs that must be found. It also checks
 * that what the comments quote of the two reset() is the code, and that no step of them is missing.
 *
 * Modelled: WORLD_SIZE ranks make CALLS calls, each by a kernel that runs beside the rank's program:
 * it pushes a packet to each peer and awaits theirs. Any wait may time out, NUM_FAILURES times in
 * all. Then the rank gives up: its status stays, and the peers learn of it by their abort words,
 * whenever they look. A rank whose call has failed calls reset() and begins anew. A wait in reset()
 * may time out too, NUM_RETRIES times in all, and reset() is called again.
 *
 * Shown:
 *   - A packet that a call takes was pushed behind the same reset.
 *   - What a rank clears is older than the reset, and nothing older comes later.
 *   - A failure behind a reset has its cause behind it, and each reset has a failure.
 *   - All ranks make all their calls in the end.
 *
 * Left out: how packets are pushed and slots used again (packets.pml); epochs that wrap; shrink(). A
 * rank that calls reset() without a failure is left out too: reset() first sets its status, as a
 * failure does, and its peers' waits for it time out, which is modelled.
 *
 * A rank may hear a message of reset() arbitrarily late, because nothing makes it look. A later
 * message includes the earlier ones. */

#ifndef WORLD_SIZE
#define WORLD_SIZE 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef NUM_FAILURES
#define NUM_FAILURES 2
#endif
#ifndef NUM_RETRIES
#define NUM_RETRIES 1
#endif

#define NOTHING 0
#define CALLS_NOT_AWAITED 1 /* a rank announces that it makes no call while its kernel runs */
#define CLEARED_UNHEARD 2   /* a rank clears before all have announced that they make no call */
#define ONE_PHASE 3         /* a rank goes on before all have cleared */
#define PHASE_FORGOTTEN 4   /* reset() that is called again begins anew */
#define SLOTS_KEPT 5
#define EPOCH_KEPT 6
#define ABORT_KEPT 7
#define STATUS_KEPT 8
#define UNTOLD 9 /* a rank that gives up tells nobody */
#ifndef PLANTED
#define PLANTED NOTHING
#endif

#define AT(owner, source) ((owner) * WORLD_SIZE + (source))
/* Three ranks at most. */
#define LAST (WORLD_SIZE - 1)

byte slot[WORLD_SIZE * WORLD_SIZE]; /* the epoch of the packet; 0: none */
bit abort_word[WORLD_SIZE * WORLD_SIZE];
bit failed[WORLD_SIZE]; /* the status */
byte epoch[WORLD_SIZE];
bit runs[WORLD_SIZE]; /* its kernel does */
byte said[WORLD_SIZE]; /* the phase that the rank has announced */
bit is_done[WORLD_SIZE]; /* it has made all its calls */
byte failures;
byte retries;

/* For the proof only: how many resets a rank has completed, its window has been cleared for, and
 * the writer of a word had completed. */
byte resets[WORLD_SIZE];
byte cleared[WORLD_SIZE];
byte slot_of[WORLD_SIZE * WORLD_SIZE];
byte abort_of[WORLD_SIZE * WORLD_SIZE];

#define FOR_PEERS(p) p = 0; do :: p < WORLD_SIZE -> if :: p == me :: else ->
#define END_PEERS(p) fi; p++ :: else -> break od

inline give_up() {
    failed[me] = 1;
    if
    :: PLANTED != UNTOLD ->
        FOR_PEERS(p)
            atomic {
                assert(cleared[p] == resets[me]);
                abort_word[AT(p, me)] = 1;
                abort_of[AT(p, me)] = resets[me]
            }
        END_PEERS(p)
    :: else
    fi
}

/* A peer gave up, and this rank follows. */
#define GAVE_UP (abort_word[AT(me, 0)] || abort_word[AT(me, 1)] || abort_word[AT(me, LAST)])
inline follow() {
    assert(!abort_word[AT(me, 0)] || abort_of[AT(me, 0)] == resets[me]);
    assert(!abort_word[AT(me, 1)] || abort_of[AT(me, 1)] == resets[me]);
    assert(!abort_word[AT(me, LAST)] || abort_of[AT(me, LAST)] == resets[me]);
    failed[me] = 1
}

proctype Kernel(byte me) {
    byte p;
end:
    do
    :: runs[me] ->
        if
        :: failed[me]
        :: else ->
            epoch[me]++;
            FOR_PEERS(p)
                atomic {
                    assert(cleared[p] == resets[me]);
                    slot[AT(p, me)] = epoch[me];
                    slot_of[AT(p, me)] = resets[me]
                }
            END_PEERS(p);
            FOR_PEERS(p)
                if
                :: failed[me]
                :: atomic {
                    !failed[me] && slot[AT(me, p)] >= epoch[me] ->
                    assert(slot_of[AT(me, p)] == resets[me])
                }
                :: atomic { !failed[me] && GAVE_UP -> follow() }
                :: atomic { !failed[me] && failures < NUM_FAILURES -> failures++ };
                    give_up()
                fi
            END_PEERS(p)
        fi;
        p = 0;
        runs[me] = 0
    od
}

/* Waits until all have announced the phase. */
/* mesh.py _announce_phase(): got = self._exchange(RESET, self._phase, b"", "reset", timeout,
 *     self._links)
 * self._check_complete(got, "reset", self._links) */
inline hear(phase) {
    is_late = 0;
    FOR_PEERS(p)
        if
        :: said[p] >= phase
        :: atomic { retries < NUM_RETRIES -> retries++; is_late = 1 }; break
        fi
    END_PEERS(p);
    p = 0
}

/* comm.py reset(): def clear() -> None:
 *     self._backend.clear()
 *     self._drop_messages()
 *     state.status = lib.kKcclAborted */
inline clear() {
    atomic {
        FOR_PEERS(p)
            assert(slot[AT(me, p)] == 0 || slot_of[AT(me, p)] == resets[me]);
            slot[AT(me, p)] = (PLANTED == SLOTS_KEPT -> slot[AT(me, p)] : 0);
            abort_word[AT(me, p)] = (PLANTED == ABORT_KEPT -> abort_word[AT(me, p)] : 0)
        END_PEERS(p);
        p = 0;
        epoch[me] = (PLANTED == EPOCH_KEPT -> epoch[me] : 0);
        cleared[me] = resets[me] + 1
    }
}

proctype Program(byte me) {
    byte p, made, phase, completed;
    bit is_late;
    do
    :: atomic { made < CALLS && !runs[me] -> made++; runs[me] = 1 } /* also behind a failure */
    :: atomic { !failed[me] && made == CALLS && !runs[me] && !is_done[me] -> is_done[me] = 1 }
    :: is_done[me] && !failed[me] && is_done[0] && is_done[1] && is_done[LAST] -> goto end
    :: atomic { is_done[me] && !failed[me] && GAVE_UP -> follow() } /* by its next call */
    /* comm.py reset(): if state.status == lib.kKcclOk: state.status = lib.kKcclAborted */
    :: failed[me] ->
        is_done[me] = 0;
        /* comm.py reset(): self._backend.wait_for_calls("reset()") */
        if
        :: PLANTED != CALLS_NOT_AWAITED -> !runs[me]
        :: else
        fi;
        /* comm.py reset(): self._mesh.reset(clear, self.context.limit_s()) */
        /* mesh.py reset(): if not self.is_resetting: self._phase += 1 */
        if
        :: phase == completed || PLANTED == PHASE_FORGOTTEN -> phase = completed + 1
        :: else
        fi;
        /* mesh.py reset(): if self._phase % 2 == 1: self._announce_phase(timeout) */
        if
        :: phase % 2 == 1 ->
            said[me] = phase;
            if
            :: PLANTED != CLEARED_UNHEARD -> hear(phase)
            :: else
            fi;
            if
            :: is_late -> goto again
            :: else
            fi;
            /* mesh.py reset(): clear()
             * self._phase += 1 */
            clear();
            phase++
        :: else
        fi;
        /* mesh.py reset(): self._announce_phase(timeout)
         * self._number = 0
         * self.has_met = False
         * self._seen_in.clear()
         * self._completed = self._phase */
        said[me] = phase;
        if
        :: PLANTED != ONE_PHASE -> hear(phase)
        :: else
        fi;
        if
        :: is_late
        :: else ->
            atomic {
                completed = phase;
                made = 0;
                resets[me]++;
                assert(resets[me] <= failures);
                /* comm.py reset(): state.status = lib.kKcclOk */
                failed[me] = (PLANTED == STATUS_KEPT -> 1 : 0)
            }
        fi;
again:
        is_late = 0
    od;
end:
    skip
}

init {
    atomic {
        byte rank;
        for (rank : 0 .. WORLD_SIZE - 1) {
            run Kernel(rank);
            run Program(rank)
        }
    }
}
