/* shrink(): how the ranks that are alive agree on who they are, as a Spin model.
 *
 * kccl/ranks/survivors.py argues why it is right; here all its runs are tried.
 * tests/csrc/test_spin_models.py starts the searches and plants bugs that must be found. It also
 * checks the quotes: what a comment quotes as "survivors.py function(): code" stands in that
 * function, and no decision or message of the functions modelled is missing.
 *
 * Modelled: WORLD_SIZE ranks call shrink(). LOST of them had ended before. ENDS others end, each
 * before any of its sends, so some peers have its last message and others do not. FAILURES times a
 * rank cannot make the communicator though all members live: no memory, or a time-out. A rank that
 * has returned closes its streams.
 *
 * Shown of a rank that returns with members M in an attempt:
 *   - Every rank that returns has M, from this attempt. So they have the same communicator.
 *   - Every member has made that communicator, and voted for M.
 *   - Every rank outside of M has ended. So M has all survivors. A member may have ended too, but
 *     only after it voted: no member votes for a rank that it knows to have ended.
 * Also:
 *   - Every rank returns or ends. Nobody waits for ever.
 *   - Each end and each failure costs one attempt at most.
 *
 * Left out:
 *   - time-outs of waits: they change nothing, and the next shrink() goes on. A rank that gives up
 *     then closes its streams, which is an end;
 *   - how the members connect and make the communicator, but for this: a rank succeeds only if all
 *     members have begun it, and it may fail as soon as one of them will not finish;
 *   - what the ranks said before shrink().
 *
 * Simplified: A rank ends as soon as it will send no more, because peers may hear of it later. It
 * sends one message to all peers in one step, because each may read it later. A link holds QUEUE
 * messages that are not read. If a link is full, a new message replaces the last one, and includes
 * what that said.
 * With QUEUE=1 the sockets take every message at once. With QUEUE=2 they may also take it late, or
 * never if the sender ends. */

#ifndef WORLD_SIZE
#define WORLD_SIZE 3
#endif
#ifndef LOST
#define LOST 0
#endif
#ifndef ENDS
#define ENDS 2
#endif
#ifndef FAILURES
#define FAILURES 0
#endif
#ifndef QUEUE
#define QUEUE 1
#endif

/* Without -DFINE, a rank says in one message that it begins an attempt and that it listens. */
#ifdef FINE
#define listens_at_once 0
#else
#define listens_at_once 1
#endif

/* The bugs that -DPLANTED=name plants. */
#define NOTHING 0
#define SETTLED_IN_ANY_ATTEMPT 1
#define VOTE_OF_AN_EARLIER_ATTEMPT 2
#define LATER_ATTEMPT_IGNORED 3
#define ENDED_NOT_COMPARED 4
#define TIME_OUT_TAKEN_FOR_END 5
#define VOTED_BEFORE_MADE 6
#define ONE_VOTE_MISSING 7
#define VOTES_NOT_RELAYED 8
#define GIVEN_UP_BEFORE_ALL_KNOW 9
#define NEVER_GIVEN_UP 10
#define END_BEFORE_MESSAGES 11
#define RETURNED_UNFLUSHED 12
#ifndef PLANTED
#define PLANTED NOTHING
#endif
#define planted(bug) (PLANTED == bug)

/* ---- Ranks ----------------------------------------------------------------------------------- */

#define me _pid
#define EVERY ((1 << WORLD_SIZE) - 1)
#define has(ranks, peer) (((ranks) >> (peer)) & 1)
#define MAX_ATTEMPT (1 + ENDS + FAILURES)

#define FOR_PEERS peer = 0; do :: peer < WORLD_SIZE -> if :: peer != me ->
#define END_PEERS :: else fi; peer++ :: else -> peer = 0; break od

#if WORLD_SIZE == 3
#define all(f) (f(0) && f(1) && f(2))
#define any(f) (f(0) || f(1) || f(2))
#else
#define all(f) (f(0) && f(1) && f(2) && f(3))
#define any(f) (f(0) || f(1) || f(2) || f(3))
#endif

#define WAITS 0 /* for its peers to be in its attempt */
#define MAKES 1 /* the communicator */
#define HAS_VOTED 2
#define RETURNED 3
#define ENDED 4
byte phase[WORLD_SIZE];
#define is_closed(peer) (phase[peer] >= RETURNED)

/* What survivors.py calls _attempt, ended(), _name, _members and _votes(), of each rank. Sets of
 * ranks are bits; a vote is a set, and 0 while it is missing. */
byte attempt[WORLD_SIZE] = 1;
byte ended[WORLD_SIZE];
bit name[WORLD_SIZE];
byte members[WORLD_SIZE];
int votes[WORLD_SIZE];
#define vote_of(all_votes, peer) (((all_votes) >> ((peer) * WORLD_SIZE)) & EVERY)
#define MY_VOTE (members[me] << (me * WORLD_SIZE))
/* _ended != ranks.ended() */
bit has_stale_name[WORLD_SIZE];
int told[WORLD_SIZE];
/* It has heard something, and _look() is not over. */
bit looks[WORLD_SIZE];

/* What a rank has heard of a peer in its own attempt: the ended, and these. */
#define IS_NAMED (1 << WORLD_SIZE)
#define IS_IN_ATTEMPT (2 << WORLD_SIZE)
byte heard[WORLD_SIZE * WORLD_SIZE];
#define HEARD(peer) heard[me * WORLD_SIZE + (peer)]

/* For the proof, and for what make() needs: the members with which a rank has begun it in each
 * attempt, and whether it succeeded. */
byte begun[WORLD_SIZE * (MAX_ATTEMPT + 1)];
bit made[WORLD_SIZE * (MAX_ATTEMPT + 1)];
#define IN_MY_ATTEMPT(peer) ((peer) * (MAX_ATTEMPT + 1) + attempt[me])
/* For the proof only: what the first rank that returned has. */
byte decided, decided_in;

byte ends_left = ENDS;
byte failures_left = FAILURES;
byte peer, i;
int message;

#include "knowledge.pml"

/* ---- The communicator ------------------------------------------------------------------------ */

/* Member `peer` has ended, has closed its listener or its communicator, or listens for others. */
#define will_not_finish(peer) \
    (has(members[me], peer) && \
     (phase[peer] == ENDED || attempt[peer] != attempt[me] || \
      (begun[IN_MY_ATTEMPT(peer)] != members[me] && \
       (!name[peer] || has_stale_name[peer] || ended[peer] != (EVERY & ~members[me])))))

/* survivors.py _try_to_make(): gone = set(members) & ranks.ended() */
#define is_gone(peer) (has(members[me], peer) && has(ended[me], peer))
/* survivors.py _try_to_make():
 *     if gone or attempt != self._attempt or self._contradicts(members): raise */
#define must_fail (any(is_gone) || any(contradicts))
#define has_begun(peer) (!has(members[me], peer) || begun[IN_MY_ATTEMPT(peer)] == members[me])

/* The attempts in which nobody is any more are forgotten, so that there are fewer states. */
inline forget() {
    message = MAX_ATTEMPT;
    do
    :: i < WORLD_SIZE ->
       if
       :: phase[i] != ENDED && attempt[i] < message -> message = attempt[i]
       :: else
       fi;
       i++
    :: else -> i = 0; break
    od;
    do
    :: i < WORLD_SIZE * (MAX_ATTEMPT + 1) ->
       if
       :: i % (MAX_ATTEMPT + 1) < message -> begun[i] = 0; made[i] = 0
       :: else
       fi;
       i++
    :: else -> i = 0; break
    od;
    message = 0
}

/* What a rank that has returned or ended knows is forgotten too. */
inline leave(how) {
    do
    :: i < WORLD_SIZE -> HEARD(i) = 0; drop_messages(i, me); i++
    :: else -> i = 0; break
    od;
    phase[me] = how;
    stop_listening();
    ended[me] = 0; looks[me] = 0; votes[me] = 0; told[me] = 0
}

inline end() {
    d_step {
        ends_left--;
        members[me] = 0;
        leave(ENDED);
        forget()
    }
}

inline check() {
    assert(decided == 0 || (decided == members[me] && decided_in == attempt[me]));
    decided = members[me];
    decided_in = attempt[me];
    do
    :: i < WORLD_SIZE ->
       assert(!has(members[me], i) || made[IN_MY_ATTEMPT(i)]);
       assert(!has(members[me], i) || begun[IN_MY_ATTEMPT(i)] == members[me]);
       assert(has(members[me], i) || phase[i] == ENDED);
       i++
    :: else -> i = 0; break
    od
}

/* ---- shrink() -------------------------------------------------------------------------------- */

/* Peers in the order from this rank on. */
#define NEXT(k) ((me + (k)) % WORLD_SIZE)
/* survivors.py agree(): while True: self._look() */
#define HEAR(from) \
    :: atomic { !is_closed(me) && is_alive(from) && has_message(from) -> hear(from) } \
    :: atomic { !is_closed(me) && is_alive(from) && may_hear_end(from) -> hear_end(from) }
#define is_at_rest (!looks[me])

/* When waits end by time-out: */
/* survivors.py agree(): if ended != self._ranks.ended():
 *     ended, deadline = self._ranks.ended(), clock.now() + timeout */
active [WORLD_SIZE] proctype Rank() {
    atomic {
        if
        :: me >= WORLD_SIZE - LOST -> leave(ENDED)
        :: me < WORLD_SIZE - LOST && ends_left > 0 -> end()
        :: me < WORLD_SIZE - LOST -> looks[me] = 1
        fi
    }
    do
    HEAR(NEXT(1))
    HEAR(NEXT(2))
#if WORLD_SIZE > 3
    HEAR(NEXT(3))
#endif
    :: atomic { looks[me] -> look() }
    :: atomic { phase[me] == WAITS && is_at_rest && !name[me] -> listen(); say() }
    /* survivors.py agree(): if self._has_members():
     *     with contextlib.suppress(PeerLost): self._try_to_make(make, timeout) */
    :: atomic {
           phase[me] == WAITS && is_at_rest && name[me] && all(has_name) ->
           phase[me] = MAKES;
           /* survivors.py _try_to_make(): for peer in self._alive()} | {ranks.rank: self._name} */
           /* survivors.py _try_to_make(): members = tuple(sorted(names)) */
           members[me] = EVERY & ~ended[me];
           begun[IN_MY_ATTEMPT(me)] = members[me];
           votes[me] = votes[me] | (planted(VOTED_BEFORE_MADE) * MY_VOTE);
           looks[me] = planted(VOTED_BEFORE_MADE);
           if
           :: ends_left > 0 -> end()
           :: skip
           fi
       }
    /* It calls look() in between, or not. */
    /* survivors.py _try_to_make(): def look() -> None: self._look() */
    /* survivors.py _try_to_make(): try: look() */
    /* survivors.py _try_to_make():
     *     part = make(connect_part(ranks, in_order, listener, timeout, look)) */
    :: atomic {
           phase[me] == MAKES && is_at_rest && all(has_begun) && !must_fail ->
           made[IN_MY_ATTEMPT(me)] = 1;
           /* survivors.py _try_to_make(): self._part, self._members = part, members */
           phase[me] = HAS_VOTED;
           /* survivors.py _votes():
            *     votes = {} if self._part is None else {self._ranks.rank: self._members} */
           votes[me] = votes[me] | MY_VOTE;
           looks[me] = 1
       }
    /* survivors.py _try_to_make():
     *     except BaseException: listener.close() self._begin(attempt + 1) */
    :: atomic {
           phase[me] == MAKES && is_at_rest &&
           (must_fail || any(will_not_finish) || failures_left > 0) ->
           if
           :: must_fail || any(will_not_finish)
           :: else -> failures_left--
           fi;
           d_step { begin(attempt[me] + 1); forget() }
           if
           :: listens_at_once -> listen()
           :: else
           fi;
           /* survivors.py _try_to_make(): self._say() raise */
           say()
       }
    /* survivors.py agree(): if self._is_decided(): part, self._part = self._part, None
     *     return part */
    /* survivors.py _is_decided(): return self._is_complete() and self._ranks.is_flushed() */
    :: atomic {
           phase[me] == HAS_VOTED && is_at_rest && all(has_vote) ->
           d_step { check(); leave(RETURNED) }
       }
    :: is_closed(me) -> break
    od
}
