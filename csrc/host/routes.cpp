// How a rank's messages reach ranks outside of its own teams (chain.inc), and how it waits for
// theirs: see routes.h.
#include "routes.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <new>

#include "../include/kccl/targets/host_idle.h"

namespace kccl::host {
namespace {

// Each rank's window has a part for each peer of its node. A part begins with kControlBytes bytes
// for both ranks' abort words (which say that a rank gave up) and failure records. Behind them are
// the control lines and the ring in which the peer leaves messages (include/kccl/messages.cuh).
constexpr uint64_t kControlBytes = 4 * kKcclLineBytes;

constexpr uint64_t ring_bytes(uint64_t message_bytes) {
    return kMessageLines * kKcclLineBytes + message_bytes;
}

KcclHostTeams& teams_of(const KcclRoutes& routes) {
    return *reinterpret_cast<KcclHostTeams*>(routes.teams);
}

KcclState* state_of(const KcclRoutes& routes) {
    return reinterpret_cast<KcclState*>(teams_of(routes).state);
}

FarLink** links_of(const KcclRoutes& routes) { return reinterpret_cast<FarLink**>(routes.links); }

void depart(KcclRoutes& routes, KcclDeparture departure, const KcclRecord& record) {
    if (routes.has_told != 0) return;
    routes.has_told = 1;
    for (int rank = 0; rank < routes.world_size; ++rank) {
        if (rank == routes.rank) continue;
        if (FarLink* link = link_of(routes, rank)) {
            // After MPI_Finalize() nothing can be sent. The peer then sees the end of the socket
            // between the two ranks instead.
            if (routes.mpi_has_ended == 0) link->depart(departure, record);
        } else if ((routes.far >> rank & 1u) == 0) {
            const KcclDeviceComm& pair = pair_of(routes, rank);
            const int place = place_in_pair(routes, rank);
            mem::store_plain(abort_record(pair, place, pair.rank), record);
            kccl::depart(pair, place, departure);
        }
    }
}

}  // namespace

FarLink* link_of(const KcclRoutes& routes, int rank) {
    return routes.links == 0 ? nullptr : links_of(routes)[rank];
}

void tell_routes(KcclRoutes& routes, const KcclRecord& record) {
    depart(routes, kKcclGaveUp, record);
}

bool hear_routes(KcclRoutes& routes) {
    KcclState* const state = state_of(routes);
    for (int rank = 0; rank < routes.world_size; ++rank) {
        if (rank == routes.rank) continue;
        const KcclRecord* told = nullptr;
        KcclRecord record;
        bool has_closed = false;
        if (const FarLink* link = link_of(routes, rank)) {
            told = link->given_up();
            has_closed = link->has_closed();
        } else if ((routes.far >> rank & 1u) == 0) {
            const KcclDeviceComm& pair = pair_of(routes, rank);
            const int place = place_in_pair(routes, rank);
            const uint32_t departure = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
                abort_word(pair, pair.rank, place));
            has_closed = departure == kKcclLeft;
            if (departure == kKcclGaveUp) {
                record = mem::load_plain(abort_record(pair, pair.rank, place));
                told = &record;
            }
        }
        if (has_closed) routes.closed |= uint64_t{1} << rank;
        if (told == nullptr) continue;
        if (mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) state->record = *told;
        pass_on(teams_of(routes));
        return true;
    }
    return false;
}

void MessagePatience::look_at_processes(uint64_t now) {
    if (now - looked_ns_ < kLookEveryNs) return;
    looked_ns_ = now;
    for (int rank = 0; rank < routes_.world_size; ++rank) {
        if ((hopes_ >> rank & 1u) == 0 || routes_.watched[rank] < 0) continue;
        const bool is_socket = (routes_.sockets >> rank & 1u) != 0;
        const short event = is_socket ? POLLRDHUP : POLLIN;
        pollfd fd = {routes_.watched[rank], event, 0};
        const bool has_ended = poll(&fd, 1, 0) > 0 && (fd.revents & (event | POLLHUP)) != 0;
        const FarLink* link = link_of(routes_, rank);
        if (has_ended || (link != nullptr && link->is_broken())) gone_ |= uint64_t{1} << rank;
    }
}

bool MessagePatience::may_go_on(const KcclDeviceComm& comm, uint32_t num_early) {
    KcclState* const state = state_of(routes_);
    const uint64_t now = kccl_host_clock_ns();
    const uint64_t waited_ns = waited_until(now, started_ns_, clock_looked_ns_);
    if (status_of(comm) != kKcclOk || hear_routes(routes_)) return false;
    uint32_t none = 0;
    uint32_t status = kccl_host_idle(state->idle_context, waited_ns, 0, &none);
    if (status_of(comm) != kKcclOk) return false;
    look_at_processes(now);
    const uint64_t lost = (routes_.closed | gone_) & hopes_;
    const bool is_hopeless = needs_all_ ? lost != 0 : lost == hopes_;
    const auto lowest = [](uint64_t ranks) { return __builtin_ctzll(ranks); };
    int32_t culprit = needs_all_ ? lowest(hopes_) : -1;
    if (status == kKcclInterrupted) {
        culprit = comm.rank;
    } else if (is_hopeless) {
        // A lost rank may have sent the message before its end. In shared memory it is there
        // already, so one more round of polls finds it. By MPI it may still be on its way, so the
        // wait polls on for kLastWordsNs.
        culprit = lowest(lost);
        const bool is_first_look = hopeless_since_ns_ == 0;
        if (is_first_look) hopeless_since_ns_ = now;
        const uint64_t on_its_way = lost & routes_.far & ~routes_.closed;
        if (is_first_look || (on_its_way != 0 && now - hopeless_since_ns_ < kLastWordsNs)) {
            return true;
        }
        status = (routes_.closed >> culprit & 1u) != 0 ? kKcclPeerLeft : kKcclPeerLost;
    } else {
        const uint64_t limit_ns = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
            state->contacted != 0 ? &state->limit_ns : &state->first_limit_ns);
        if (!has_limit_ || waited_ns <= limit_ns) return true;
        status = kKcclTimeout;
    }
    fail_all(teams_of(routes_), Record{status, comm.rank, culprit, awaited_.kernel,
                                       awaited_.channel, num_early, awaited_.wanted, 0, waited_ns});
    return false;
}

}  // namespace kccl::host

extern "C" {

uint64_t kccl_host_pair_bytes(uint64_t message_bytes) {
    return kccl::host::kControlBytes + kccl::host::ring_bytes(message_bytes);
}

void kccl_host_fill_pair(KcclDeviceComm* filled, int place, int world_size, uint64_t message_bytes,
                         const uint64_t* parts, uint64_t state, uint32_t polls_per_check) {
    using namespace kccl::host;
    *filled = {};
    filled->abi_version = kKcclAbiVersion;
    filled->rank = place;
    filled->world_size = world_size;
    filled->polls_per_check = polls_per_check;
    filled->state = state;
    filled->layout.records = kKcclLineBytes;
    filled->layout.messages = kControlBytes;
    filled->layout.message_bytes = message_bytes;
    for (int rank = 0; rank < world_size; ++rank) {
        filled->window[rank] = parts[rank];
        // A part has only one ring, in which the other rank leaves messages, where a scratch has
        // one for each source. On rank 0 of the pair it is the ring of source 1, the second in a
        // scratch. So this scratch begins, in address, one ring before the part.
        const bool has_second = world_size == 2 && rank == 0;
        filled->scratch[rank] = parts[rank] - (has_second ? ring_bytes(message_bytes) : 0);
    }
}

void kccl_host_clear_pairs(uint64_t address, uint64_t num_bytes) {
    void* const begin = reinterpret_cast<void*>(address);
    if (madvise(begin, num_bytes, MADV_REMOVE) != 0) memset(begin, 0, num_bytes);
}

uint64_t kccl_host_link_bytes(void) { return kccl::host::FarLink::num_bytes(); }

int kccl_host_open_routes(KcclRoutes* routes) {
    using namespace kccl::host;
    if (routes->far == 0) return 0;
    const auto num = static_cast<uint64_t>(routes->world_size);
    auto** links = static_cast<FarLink**>(calloc(num, sizeof(FarLink*)));
    if (links == nullptr) return -1;
    routes->links = reinterpret_cast<uint64_t>(links);
    for (int rank = 0; rank < routes->world_size; ++rank) {
        if ((routes->far >> rank & 1u) == 0) continue;
        void* memory = malloc(sizeof(FarLink));
        if (memory == nullptr) {
            kccl_host_close_routes(routes);
            return -1;
        }
        links[rank] = new (memory) FarLink(*routes, rank);
    }
    return 0;
}

void kccl_host_close_routes(KcclRoutes* routes) {
    using namespace kccl::host;
    if (routes->links == 0) return;
    for (int rank = 0; rank < routes->world_size; ++rank) {
        FarLink* link = links_of(*routes)[rank];
        // After MPI_Finalize() MPI cannot be asked whether it still uses the link's memory, so that
        // counts as used.
        if (link != nullptr && (routes->mpi_has_ended != 0 || link->close())) {
            routes->is_pending = 1;
        }
        free(link);
    }
    free(links_of(*routes));
    routes->links = 0;
}

void kccl_host_leave_routes(KcclRoutes* routes, uint32_t may_wait) {
    using namespace kccl::host;
    if (routes->mpi_has_ended != 0) may_wait = 0;
    kccl::host::depart(*routes, kKcclLeft, {});
    const uint64_t began_ns = kccl_host_clock_ns();
    const auto is_sending = [&] {
        for (int rank = 0; rank < routes->world_size; ++rank) {
            FarLink* link = link_of(*routes, rank);
            if (link != nullptr && link->is_sending()) return true;
        }
        return false;
    };
    while (may_wait != 0 && is_sending() && kccl_host_clock_ns() - began_ns < kFlushNs) {
        sched_yield();
    }
}

}  // extern "C"
