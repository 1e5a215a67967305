/* The links of the model in survivors.pml, and what a rank knows, hears and says. */

/* ---- Links ----------------------------------------------------------------------------------- */

/* 0: no message. */
int box[WORLD_SIZE * WORLD_SIZE * QUEUE];
#define BOX(from, to) (((from) * WORLD_SIZE + (to)) * QUEUE)
#define LAST (QUEUE - 1)

/* knowledge.py text(): "attempt": self.attempt, "ended": sorted(self.ended), "name": self.name,
 *     "votes": sorted(self.votes.items()), */
#define SAID(said_votes) \
    (attempt[me] | (ended[me] << 3) | (name[me] << (3 + WORLD_SIZE)) | \
     ((said_votes) << (4 + WORLD_SIZE)))
#define attempt_in(said) ((said) & 7)
#define ended_in(said) (((said) >> 3) & EVERY)
#define name_in(said) (((said) >> (3 + WORLD_SIZE)) & 1)
#define votes_in(said) ((said) >> (4 + WORLD_SIZE))

/* mesh.py tell(): for link in self._links.values(): link.put(LIVE, 0, payload) */
/* link.py put(): if self.is_open: */
inline tell() {
    FOR_PEERS
        if
        :: has(ended[me], peer) || is_closed(peer)
        :: else ->
           if
           :: box[BOX(me, peer)] == 0 || LAST == 0 -> box[BOX(me, peer)] = message
           :: box[BOX(me, peer)] != 0 && LAST != 0 -> box[BOX(me, peer) + LAST] = message
           :: box[BOX(me, peer)] != 0 && LAST != 0 && box[BOX(me, peer) + LAST] == 0 ->
              box[BOX(me, peer)] = message
           fi
        fi;
        if
        :: ends_left > 0 -> end(); break
        :: skip
        fi
    END_PEERS
}

/* mesh.py hear(): while (message := link.take()) is not None: */
/* mesh.py hear(): yield peer, payload */
#define has_message(from) (box[BOX(from, me)] != 0)
/* mesh.py hear(): link.fill() */
/* link.py fill(): if not data: self.is_open = False */
/* The sockets may not have taken the last messages of a rank that ended. */
#define may_hear_end(from) \
    (is_closed(from) && \
     (!has_message(from) || planted(END_BEFORE_MESSAGES) || \
      (QUEUE > 1 && (phase[from] == ENDED || planted(RETURNED_UNFLUSHED)))) || \
     planted(TIME_OUT_TAKEN_FOR_END))

inline drop_messages(from, to) {
    box[BOX(from, to)] = 0;
    box[BOX(from, to) + LAST] = 0
}

/* ---- What a rank knows ----------------------------------------------------------------------- */

/* survivors.py _alive():
 *     set(range(self._ranks.world_size)) - self._ranks.ended() - {self._ranks.rank} */
#define is_alive(peer) ((peer) != me && !has(ended[me], peer))

/* survivors.py _is_settled(): said is not None and said.attempt == self._attempt
 *     and said.ended == self._ranks.ended() */
#define is_settled(peer) \
    ((HEARD(peer) & IS_IN_ATTEMPT) && \
     ((HEARD(peer) & EVERY) == ended[me] || planted(ENDED_NOT_COMPARED)))

/* survivors.py _contradicts(): votes = self._votes()
 *     return any(votes.get(member, members) != members for member in members) */
#define contradicts(peer) \
    (has(members[me], peer) && vote_of(votes[me], peer) != 0 && \
     vote_of(votes[me], peer) != members[me])

/* survivors.py _is_lost(): missing = set(self._members) & self._ranks.ended() - set(self._votes()) */
#define is_missing(peer) \
    (has(members[me] & ended[me], peer) && vote_of(votes[me], peer) == 0)
/* survivors.py _is_lost(): all_know = all(map(self._is_settled, self._alive())) */
#define knows(peer) \
    (!is_alive(peer) || is_settled(peer) || planted(GIVEN_UP_BEFORE_ALL_KNOW))
/* survivors.py _is_lost():
 *     return self._contradicts(self._members) or (len(missing) > 0 and all_know) */
#define is_lost \
    (any(contradicts) || (any(is_missing) && all(knows) && !planted(NEVER_GIVEN_UP)))

/* survivors.py _is_complete():
 *     self._part is not None and set(self._members) <= set(self._votes()) */
#define has_vote(peer) \
    (!has(members[me], peer) || vote_of(votes[me], peer) != 0 || \
     (planted(ONE_VOTE_MISSING) && peer == (me + 1) % WORLD_SIZE))

/* survivors.py _has_members():
 *     all(self._is_settled(peer) and self._heard[peer].name for peer in self._alive()) */
#define has_name(peer) (!is_alive(peer) || (is_settled(peer) && (HEARD(peer) & IS_NAMED)))

/* survivors.py _say(): said = Said(self._attempt, self._ranks.ended(), self._name, self._votes(), *why) */
/* survivors.py _say(): if text != self._told: self._ranks.tell(text) self._told = text */
inline say() {
    message = SAID((planted(VOTES_NOT_RELAYED) ->
                    votes[me] & (EVERY << (me * WORLD_SIZE)) : votes[me]));
    if
    :: message != told[me] -> told[me] = message; tell()
    :: else
    fi;
    peer = 0; message = 0
}

/* survivors.py _stop_listening():
 *     listener, self._listener, self._name = self._listener, None, "" */
inline stop_listening() {
    name[me] = 0; has_stale_name[me] = 0
}

/* survivors.py _has_members(): if self._name == "": self._ended = self._ranks.ended()
 *     self._listener, self._name = self._ranks.listen() self._say() */
inline listen() {
    assert(!has_stale_name[me]);
    name[me] = 1
}

/* survivors.py _begin(): if attempt > self._attempt: */
inline begin(next) {
    if
    :: next > attempt[me] ->
       assert(next <= MAX_ATTEMPT);
       /* survivors.py _begin(): self._attempt, self._members = attempt, () */
       attempt[me] = next;
       members[me] = 0;
       /* survivors.py _begin(): self.close() */
       /* survivors.py close(): self._stop_listening() */
       stop_listening();
       /* survivors.py close(): part, self._part = self._part, None
        *     if part is not None: part.close() */
       phase[me] = WAITS;
       /* survivors.py _votes(): for said in self._heard.values():
        *     if said.attempt == self._attempt: votes |= said.votes */
       votes[me] = (planted(VOTE_OF_AN_EARLIER_ATTEMPT) -> votes[me] : 0);
       do
       :: i < WORLD_SIZE ->
          HEARD(i) = (planted(SETTLED_IN_ANY_ATTEMPT) -> HEARD(i) : 0);
          i++
       :: else -> i = 0; break
       od
    :: else
    fi
}

/* survivors.py _look(): for peer, text in ranks.hear():
 *     self._heard[peer] = Said.parse(text) */
inline hear(from) {
    d_step {
        message = box[BOX(from, me)];
        box[BOX(from, me)] = box[BOX(from, me) + LAST];
        box[BOX(from, me) + LAST] = 0;
        /* survivors.py _look():
         *     self._begin(max((said.attempt for said in self._heard.values()), default=1)) */
        if
        :: planted(LATER_ATTEMPT_IGNORED)
        :: else -> begin(attempt_in(message))
        fi;
        if
        :: attempt_in(message) == attempt[me] ->
           HEARD(from) = IS_IN_ATTEMPT | (name_in(message) * IS_NAMED) | ended_in(message);
           votes[me] = votes[me] | votes_in(message)
        :: else
        fi;
        message = 0;
        looks[me] = 1
    }
}

inline hear_end(from) {
    d_step {
        ended[me] = ended[me] | (1 << from);
        HEARD(from) = 0;
        drop_messages(from, me);
        drop_messages(me, from);
        has_stale_name[me] = name[me];
        looks[me] = 1
    }
}

/* The rest of _look(), once something was heard. */
inline look() {
    looks[me] = 0;
    if
    /* survivors.py _look(): elif self._part is not None and self._is_lost():
     *     self._begin(self._attempt + 1) */
    :: phase[me] == HAS_VOTED ->
       d_step {
           if
           :: is_lost -> begin(attempt[me] + 1)
           :: else
           fi
       }
    /* survivors.py _look(): if self._part is None and self._ended != ranks.ended():
     *     self._stop_listening() */
    :: phase[me] != HAS_VOTED && has_stale_name[me] -> stop_listening()
    :: else
    fi;
    if
    :: listens_at_once && phase[me] == WAITS -> listen()
    :: else
    fi;
    /* survivors.py _look(): self._say() */
    say()
}
