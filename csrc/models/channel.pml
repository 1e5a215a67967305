/* The coops, flag words and epochs of the model in packets.pml: coop, barrier and channel.cuh. */

/* ---- A rank and its coop --------------------------------------------------------------------- */

/* For the proof only: the call that some thread of the rank has entered. */
byte entered[WORLD_SIZE];

/* coop.cuh leads(): return coop.index() == 0; */
#define leads (index == 0)

#if THREADS == 1
#define sync() skip
#else
chan meeting[WORLD_SIZE] = [0] of { bit };
#define sync() if :: _pid % THREADS == 0 -> meeting[rank] ? _ :: else -> meeting[rank] ! 0 fi
#endif

/* ---- Flag words ------------------------------------------------------------------------------ */

#define BARRIER_FLAG 0
#define CREDIT_FLAG 1
#define FLAG(flag, box) ((flag) * NUM_BOXES + (box))
byte flag_memory[2 * NUM_BOXES];
/* The last store. It may overtake an earlier one, which says less. */
byte flag_in_flight[2 * NUM_BOXES] = NONE;

#define ends_wait(seen, wanted) \
    (has_reached(seen, wanted) || (planted(ARRIVAL_COMPARED_BEHIND) && (seen) > (wanted)))

/* barrier.cuh arrive():
 *     for (int peer = coop.index(); peer < comm.world_size; peer += coop.size()) */
#define is_mine (PEER(k) % THREADS == index)

inline flag_becomes_visible(word) {
    if
    :: flag_in_flight[word] != NONE ->
       flag_memory[word] = flag_in_flight[word];
       flag_in_flight[word] = NONE
    :: else
    fi
}

inline release() {
    publish(past);
    FOR_PEERS
        w = FLAG(CREDIT_FLAG, OUTBOX(k));
        flag_becomes_visible(w);
    END_PEERS
}

/* channel.cuh arrive(): kccl::arrive<order>(coop_, comm_, index_, flag, state_.epoch); */
inline arrive(flag, is_release) {
    if
    /* barrier.cuh arrive(): if constexpr (order == mem::Order::kRelease) coop.sync(); */
    :: is_release && !planted(ARRIVAL_UNSYNCED) -> sync()
    :: else
    fi;
    d_step {
        if
        :: is_release -> release()
        :: else
        fi;
        /* barrier.cuh arrive(): mem::store<order, mem::Scope::kSystem>(
         *     flag_word(comm, peer, index, flag, comm.rank), epoch); */
        FOR_PEERS
            if
            :: is_mine -> flag_in_flight[FLAG(flag, OUTBOX(k))] = epoch
            :: else
            fi;
        END_PEERS;
        w = 0
    }
}

/* channel.cuh await(): kccl::await<order>(coop_, comm_, index_, flag, awaited(), first, last) */
/* channel.cuh await(): return await<order>(flag, 0, world_size()); */
inline await(the_flag, wanted, is_acquire) {
    FOR_PEERS
        if
        :: is_mine ->
           w = FLAG(the_flag, INBOX(k));
           d_step {
               /* barrier.cuh await(): return has_reached(seen, awaited.wanted); */
               ends_wait(flag_memory[w], wanted) ||
                   (flag_in_flight[w] != NONE && ends_wait(flag_in_flight[w], wanted)) ->
               if
               :: ends_wait(flag_memory[w], wanted)
               :: else -> flag_becomes_visible(w)
               fi;
               assert(has_reached(entered[PEER(k)], wanted));
               if
               /* barrier.cuh await():
                *     if (is_mine) seen = mem::load<order, mem::Scope::kSystem>(word); */
               :: is_acquire -> learn(ORDERED)
               :: else
               fi;
               w = 0
           }
        :: else
        fi;
    END_PEERS;
    /* barrier.cuh await(): return coop.any(!arrived) ? status_of(comm) : kKcclOk; */
    sync()
}

/* ---- Epochs ---------------------------------------------------------------------------------- */

/* channel.cuh parity(): return (state_.epoch & comm_.epoch_step) != 0 ? 1 : 0; */
#define parity (epoch % (2 - planted(ONE_SLOT)))
#define stale ((past + planted(SCRUBBED_TO_THIS_EPOCH)) % PERIOD)
#define last_epoch ((past + PERIOD - planted(CREDIT_OF_AN_EARLIER_CALL)) % PERIOD)

inline scrub_flag(flag) {
    assert(flag_memory[FLAG(flag, INBOX(k))] != epoch);
    assert(flag_in_flight[FLAG(flag, INBOX(k))] != epoch);
    flag_memory[FLAG(flag, INBOX(k))] = past
}

inline scrub() {
    d_step {
        FOR_PEERS
            do
            /* scrub.cuh scrub(): for (uint32_t parity = 0; parity < 2; ++parity) { */
            :: s < 2 ->
               w = WORD(INBOX(k), s, index);
               /* scrub.cuh scrub(): mem::store_packet(slot + i, mem::Packet{{stale, stale}}); */
               store_own_word(w, stale);
               w++;
               store_own_word(w, stale);
               s++
            :: else -> s = 0; break
            od;
            if
            /* scrub.cuh scrub(): if (!leads(coop)) continue; */
            :: leads ->
               scrub_flag(CREDIT_FLAG);
               if
               /* scrub.cuh scrub(): int flag = kKcclFlagCredit; flag < kKcclNumFlags; */
               /* scrub.cuh scrub(): mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                *     flag_word(comm, comm.rank, index, static_cast<KcclFlag>(flag), source), past); */
               :: planted(BARRIER_SCRUBBED) -> scrub_flag(BARRIER_FLAG)
               :: else
               fi
            :: else
            fi;
        END_PEERS;
        w = 0
    }
    if
    :: planted(NO_SCRUB_BARRIER)
    :: else ->
       /* scrub.cuh scrub():
        *     arrive<mem::Order::kRelease>(coop, comm, index, kKcclFlagBarrier, epoch); */
       arrive(BARRIER_FLAG, !planted(SCRUB_ARRIVES_RELAXED));
       /* scrub.cuh scrub():
        *     return await<mem::Order::kAcquire>(coop, comm, index, kKcclFlagBarrier, awaited, 0, */
       await(BARRIER_FLAG, epoch, !planted(SCRUB_AWAITS_RELAXED))
    fi
}

/* A kernel's last call ends with the kernel, which orders more than a sync. */
/* channel.cuh leave(): if (!launch_.is_stored()) coop_.sync(); */
/* channel.cuh leave(): if (!coop_.any(failed)) return kKcclOk; */
inline leave() {
    if
    :: planted(NO_COOP_SYNC)
    :: else -> sync()
    fi
}

inline next(is_credited) {
    d_step {
        /* channel.cuh next(): next_plain(kernel); */
        /* channel.cuh next_plain(): state_.epoch += step_; */
        epoch = (epoch + 1) % PERIOD;
        entered[rank] = epoch
    }
    /* channel.cuh next(): if (!is_plain) { const Status entered = enter_special(); */
    /* Seen by no peer: */
    /* channel.cuh enter_special(): mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(
     *     &state_of(comm_)->contacted, */
    if
    /* channel.cuh enter_special(): if ((state_.epoch << 1) == 0) {
     *     entered = scrub(coop_, comm_, index_, awaited()); */
    :: epoch % (PERIOD / 2) == 0 && !planted(NO_SCRUB) -> scrub()
    /* channel.cuh enter_special(): } else if (state_.credit_due != 0) { */
    /* channel.cuh enter_special():
     *     entered = kccl::await<kCreditAwait>(coop_, comm_, index_, kKcclFlagCredit, credit, 0, */
    :: (epoch % (PERIOD / 2) != 0 || planted(NO_SCRUB)) && credit_due ->
       await(CREDIT_FLAG, last_epoch, false)
    :: else
    fi;
    /* channel.cuh enter_special(): state_.credit_due = 0; */
    credit_due = false;
    if
    /* channel.cuh next(): if (exchange == Exchange::kCredited) { state_.credit_due = 1; */
    /* channel.cuh next(): arrive<kCreditArrive>(kKcclFlagCredit); */
    :: is_credited && !planted(NO_CREDIT) -> credit_due = true; arrive(CREDIT_FLAG, false)
    :: else
    fi
}
