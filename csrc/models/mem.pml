/* The memory of the model in packets.pml: the words that a rank pushes into a peer's window, and
 * what orders the owner's own stores to them. */

/* k counts a rank's peers, from the rank after it. A box is what one rank pushes to one peer. Its
 * slots 0 and 1 are those of ll16, by parity; the others are the sentinel's. */
#define NUM_PEERS (WORLD_SIZE - 1)
#define NUM_BOXES (WORLD_SIZE * NUM_PEERS)
#define NUM_SLOTS (2 + NUM_SENTINEL_SLOTS)
#define NUM_WORDS (NUM_BOXES * NUM_SLOTS * THREADS * 2)
#define rank (_pid / THREADS)
#define PEER(k) ((rank + 1 + (k)) % WORLD_SIZE)
#define INBOX(k) (rank * NUM_PEERS + (k))
#define OUTBOX(k) (PEER(k) * NUM_PEERS + NUM_PEERS - 1 - (k))
#define SLOT(box, slot) ((box) * NUM_SLOTS + (slot))
#define WORD(box, slot, packet) ((SLOT(box, slot) * THREADS + (packet)) * 2)
#define SLOT_OF(word) ((word) / (THREADS * 2))

#define FOR_PEERS do :: k < NUM_PEERS ->
#define END_PEERS k++ :: else -> k = 0; break od
#define FOR_SLOTS do :: s < NUM_SLOTS ->
#define END_SLOTS s++ :: else -> s = 0; break od

/* wait.cuh has_reached(): return static_cast<int32_t>(seen - wanted) >= 0; */
#define has_reached(seen, wanted) (((seen) + PERIOD - (wanted)) % PERIOD < PERIOD / 2)
/* scrub.cuh scrub(): const uint32_t past = epoch - comm.epoch_step; */
#define past ((epoch + PERIOD - 1) % PERIOD)

#define NONE 255
#define ARMED 0 /* sentinel.cuh: constexpr uint64_t kArmed = ~uint64_t{0}; */
#define DATA 1

/* ---- Order ----------------------------------------------------------------------------------- */

/* For the proof only: how far a rank's own stores to a slot of its window are ordered before the
 * next push of the peer that uses the slot. A release or fence publishes the stores, by the words
 * of later calls. The peer learns of them when it takes such a word. Then a fence of the peer
 * orders them; if the peer awaited the word with an acquire, they are ordered at once. */
byte order[NUM_BOXES * NUM_SLOTS];
#define ORDERED 0
#define STORED 1
#define LEARNED 2
#define PUBLISHED(epoch) (3 + (epoch)) /* by the words of later calls than `epoch` */
#define is_published(state, epoch) \
    ((state) >= PUBLISHED(0) && has_reached(epoch, (state) - PUBLISHED(0) + 1))

inline publish(since) {
    FOR_PEERS
        FOR_SLOTS
            if
            :: order[SLOT(INBOX(k), s)] == STORED -> order[SLOT(INBOX(k), s)] = PUBLISHED(since)
            :: else
            fi;
        END_SLOTS;
    END_PEERS
}

/* This rank has a word of peer k's call `epoch`. */
inline learn(state) {
    FOR_SLOTS
        if
        :: is_published(order[SLOT(OUTBOX(k), s)], epoch) -> order[SLOT(OUTBOX(k), s)] = state
        :: else
        fi;
    END_SLOTS
}

/* Acquires what was learned, and releases. Comes before the thread's pushes in this call. */
inline fence() {
    publish(past);
    FOR_PEERS
        FOR_SLOTS
            if
            :: order[SLOT(OUTBOX(k), s)] == LEARNED -> order[SLOT(OUTBOX(k), s)] = ORDERED
            :: else
            fi;
        END_SLOTS;
    END_PEERS
}

/* ---- Words ----------------------------------------------------------------------------------- */

/* A word is half of an ll16 packet, given by its flag, or a sentinel word, ARMED or DATA. For each:
 * what a load returns now, and the push that is not visible yet. */
byte memory[NUM_WORDS];
byte in_flight[NUM_WORDS] = NONE;
/* For the proof only: pushed, and not taken yet. */
bool unread[NUM_WORDS];

/* Whether a poll can end with this word. take_word() prefers the value that was there before. */
#define has_come(word) \
    (is_accepted(word, memory[word]) || (in_flight[word] != NONE && is_valid(in_flight[word])))

inline push_word(word, what) {
    assert(!unread[word]);
    assert(order[SLOT_OF(word)] == ORDERED);
    in_flight[word] = what;
    unread[word] = true
}

inline store_own_word(word, what) {
    assert(!unread[word]);
    memory[word] = what;
    order[SLOT_OF(word)] = STORED
}

inline becomes_visible(word) {
    memory[word] = in_flight[word];
    in_flight[word] = NONE
}

inline take_word(word) {
    if
    :: is_accepted(word, memory[word])
    :: else -> becomes_visible(word)
    fi;
    assert(unread[word] && in_flight[word] == NONE);
    unread[word] = false
}
