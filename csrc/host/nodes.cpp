// Makes the steps of a call that a team with one rank of each node makes by MPI (kKcclNodesStep).
//
// In every step each rank sends each other rank at least one message, even where there is no data
// to move. So a rank that runs ahead waits for the others. Each message says which call it belongs
// to, so that ranks that make different calls find this out.
//
// Reductions combine the nodes' data in the order of the nodes, so all nodes get the same bits.
#include "nodes.h"

#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "../include/kccl/reduce.cuh"
#include "nodes_exchange.h"

namespace kccl::host {
namespace {

// An all_reduce of at least this many bytes between more than two nodes is divided: each node
// reduces one part of the message.
constexpr uint64_t kDividesFromBytes = 65536;

// What a rank sends each peer by their socket (nodes_exchange.h) when it has failed or closes.
struct ControlRecord {
    uint32_t departure;  // KcclDeparture
    // The sender's KcclNodes.tag. It changes at a reset, so that receivers ignore control records
    // from before the reset.
    int32_t tag;
    KcclRecord record;  // of a failure
};

// One step, as one rank makes it.
class Step {
  public:
    Step(KcclNodes& nodes, const KcclHostStep& step)
        : nodes_(nodes),
          step_(step),
          in_(input_of<uint8_t>(step.op.call)),
          out_(output_of<uint8_t>(step.op.call)),
          bytes_(step.op.call.count * step.op.bytes_per_count) {}

    bool make() {
        const int root = step_.op.call.peer, rank = nodes_.rank;
        switch (static_cast<KcclNodesCall>(step_.nodes_call)) {
            case kKcclNodesAllReduce: return all_reduce();
            case kKcclNodesReduceScatter:
                return reduce(
                    in_ + chunk(rank), out_, bytes_, [&](int peer) { return in_ + chunk(peer); },
                    nodes_.world_size);
            case kKcclNodesReduce:
                return reduce(
                    in_, out_, bytes_, [&](int) { return in_; },
                    rank == root ? nodes_.world_size : 0);
            case kKcclNodesAllGather:
                copy(out_ + chunk(rank), in_);
                return move([&](int) { return in_; }, [&](int peer) { return out_ + chunk(peer); });
            case kKcclNodesAllToAll:
                copy(out_ + chunk(rank), in_ + chunk(rank));
                return move([&](int peer) { return in_ + chunk(peer); },
                            [&](int peer) { return out_ + chunk(peer); });
            case kKcclNodesBroadcast:
                if (rank == root) copy(out_, in_);
                return move([&](int) { return rank == root ? in_ : nullptr; },
                            [&](int peer) { return peer == root ? out_ : nullptr; });
            case kKcclNodesGather:
                if (rank == root) copy(out_ + chunk(rank), in_);
                return move([&](int peer) { return peer == root ? in_ : nullptr; },
                            [&](int peer) { return rank == root ? out_ + chunk(peer) : nullptr; });
            case kKcclNodesScatter:
                if (rank == root) copy(out_, in_ + chunk(rank));
                return move([&](int peer) { return rank == root ? in_ + chunk(peer) : nullptr; },
                            [&](int peer) { return peer == root ? out_ : nullptr; });
            case kKcclNodesBarrier: break;
        }
        return move([](int) { return nullptr; }, [](int) { return nullptr; });
    }

  private:
    uint64_t chunk(int rank) const { return static_cast<uint64_t>(rank) * bytes_; }

    void copy(uint8_t* to, const uint8_t* from) const {
        if (to != from) memcpy(to, from, bytes_);
    }

    bool finish(Exchange& exchange, bool is_done) const {
        if (!is_done) exchange.abandon();
        return is_done;
    }

    // Sends bytes_ bytes to peers and receives as many from peers. from(peer): the address of the
    // bytes to send to a peer, or null if it gets none. to(peer): where to store the bytes that the
    // peer sends, or null if it sends none. Returns false if the step has failed.
    template <class From, class To>
    bool move(From from, To to) {
        Exchange exchange(nodes_, step_);
        for (int peer = 0; peer < nodes_.world_size; ++peer) {
            const uint8_t* const source = from(peer);
            uint8_t* const target = to(peer);
            exchange.transfer[peer] = {source, source ? bytes_ : 0, target, target ? bytes_ : 0};
        }
        return finish(exchange, exchange.run());
    }

    // Reduces a row of `bytes` bytes from each of the first `num` ranks into `out`; num = 0: this
    // rank only sends. own: this rank's row; the peers send theirs. given(peer): the row that this
    // rank sends to a peer. Returns false if the step has failed.
    template <class Given>
    bool reduce(const uint8_t* own, uint8_t* out, uint64_t bytes, Given given, int num) {
        const Call& call = step_.op.call;
        const RowsReducer rows_of_type = rows_reducer(call.dtype, call.op);
        Exchange exchange(nodes_, step_);
        for (int peer = 0; peer < nodes_.world_size; ++peer) {
            const bool sends = step_.nodes_call != kKcclNodesReduce || peer == call.peer;
            exchange.transfer[peer] = {given(peer), sends ? bytes_to(peer, bytes) : 0, nullptr,
                                       peer < num ? bytes : 0};
        }
        const platform::DefaultFloats floats{};
        const auto take = [&](uint64_t piece) {
            const uint64_t payload = piece_bytes(bytes, piece);
            if (payload == 0 || num == 0) return;
            const void* rows[kMost];
            for (int peer = 0; peer < num; ++peer) {
                rows[peer] = peer == nodes_.rank ? own + piece * kPieceBytes
                                                 : exchange.received(peer, piece);
            }
            rows_of_type(out + piece * kPieceBytes, rows, num, payload / step_.op.bytes_per_count);
        };
        return finish(exchange, exchange.run(take));
    }

    uint64_t bytes_to(int peer, uint64_t bytes) const { return is_divided_ ? part(peer) : bytes; }

    // In an all_reduce that is divided among the nodes, begin() returns where a node's part begins,
    // in bytes, and part() the part's length in bytes.
    uint64_t begin(int node) const {
        const uint64_t count = step_.op.call.count, nodes = nodes_.world_size;
        return count * static_cast<uint64_t>(node) / nodes * step_.op.bytes_per_count;
    }
    uint64_t part(int node) const { return begin(node + 1) - begin(node); }

    bool all_reduce() {
        const int rank = nodes_.rank;
        if (nodes_.world_size == 2 || bytes_ < kDividesFromBytes) {
            return reduce(in_, out_, bytes_, [&](int) { return in_; }, nodes_.world_size);
        }
        is_divided_ = true;
        if (!reduce(
                in_ + begin(rank), out_ + begin(rank), part(rank),
                [&](int peer) { return in_ + begin(peer); }, nodes_.world_size)) {
            return false;
        }
        Exchange exchange(nodes_, step_);
        for (int peer = 0; peer < nodes_.world_size; ++peer) {
            exchange.transfer[peer] = {out_ + begin(rank), part(rank), out_ + begin(peer),
                                       part(peer)};
        }
        return finish(exchange, exchange.run());
    }

    KcclNodes& nodes_;
    const KcclHostStep& step_;
    const uint8_t* const in_;
    uint8_t* const out_;
    const uint64_t bytes_;
    bool is_divided_ = false;
};

void tell(KcclNodes& nodes, const ControlRecord& control) {
    if (nodes.has_told != 0) return;
    nodes.has_told = 1;
    for (int peer = 0; peer < nodes.world_size; ++peer) {
        // send() fails if the peer has ended. That does no harm, because then nobody needs the
        // record.
        if (nodes.socket[peer] >= 0) {
            send(nodes.socket[peer], &control, sizeof(control), MSG_DONTWAIT | MSG_NOSIGNAL);
        }
    }
}

// Returns true when every peer has closed or ended, or one has failed: then all messages that this
// rank sent have been received, or are no longer needed.
bool have_all_ended(KcclNodes& nodes) {
    KcclRecord record;
    if (hear_nodes(nodes, &record)) return true;
    for (int peer = 0; peer < nodes.world_size; ++peer) {
        pollfd watched = {nodes.socket[peer], POLLRDHUP, 0};
        if (watched.fd < 0 || (nodes.closed >> peer & 1u) != 0) continue;
        if (poll(&watched, 1, 0) == 0) return false;
    }
    return true;
}

}  // namespace

uint32_t run_between_nodes(KcclNodes& nodes, const KcclHostStep& step) {
    const DeviceComm& comm = step.op.call.comm;
    if (status_of(comm) != kKcclOk) return status_of(comm);
    if (Step(nodes, step).make()) reinterpret_cast<KcclState*>(comm.state)->contacted = 1;
    return status_of(comm);
}

void tell_nodes(KcclNodes& nodes, const KcclRecord& record) {
    tell(nodes, {kKcclGaveUp, nodes.tag, record});
}

bool hear_nodes(KcclNodes& nodes, KcclRecord* record) {
    for (int peer = 0; peer < nodes.world_size; ++peer) {
        if (nodes.socket[peer] < 0) continue;
        ControlRecord control;
        // Peeks first: a record of which only a part has come stays in the socket until the rest
        // comes.
        if (recv(nodes.socket[peer], &control, sizeof(control), MSG_DONTWAIT | MSG_PEEK) !=
            sizeof(control))
            continue;
        recv(nodes.socket[peer], &control, sizeof(control), MSG_DONTWAIT);
        if (control.departure == kKcclLeft) {
            nodes.closed |= 1u << peer;
            continue;
        }
        if (control.tag != nodes.peer_tag[peer]) continue;
        *record = control.record;
        return true;
    }
    return false;
}

}  // namespace kccl::host

extern "C" {

uint64_t kccl_host_nodes_bytes(int32_t world_size) {
    using namespace kccl::host;
    return 2 * static_cast<uint64_t>(world_size) * kSlots * kSlotBytes;
}

void kccl_host_leave_nodes(KcclNodes* nodes, uint32_t may_wait) {
    using namespace kccl::host;
    if (nodes->has_told != 0) return;
    tell(*nodes, {kKcclLeft, nodes->tag, {}});
    const uint64_t began_ns = kccl_host_clock_ns();
    while (may_wait != 0 && !have_all_ended(*nodes) && kccl_host_clock_ns() - began_ns < kFlushNs) {
        nodes->handle_bytes == 4 ? Mpi<int>::progress(*nodes) : Mpi<void*>::progress(*nodes);
        sched_yield();
    }
}

}  // extern "C"
