// Makes a KcclStagedOp: a call on arrays of a GPU whose ranks are on several nodes (staged.inc).
//
// All copies of a call are enqueued on the caller's stream. Those of the next piece's input stand
// before those of this piece's output, so they run while the ranks exchange this piece:
//
//     stream   in 0   in 1            out 0  in 2            out 1  in 3   ...
//     host            exchange 0             exchange 1             exchange 2
//
// Why a slot may be used again. A call begins when the copies of earlier calls to the GPU, which
// may be on other streams, have ended. The input of piece i + kKcclStagedSlots is copied to the
// host once the host has made piece i. Its output is written there once the copy of piece i's
// output to the GPU has ended; an event tells.
#include <stddef.h>

#include "../include/kccl/wait.cuh"
#include "chain.h"
#include "on_device.h"

extern "C" {
#include "staged.inc"
}

namespace kccl::host {
namespace {

class Staged {
  public:
    explicit Staged(const KcclStagedOp& op)
        : op_(op),
          staging_(*op.staging),
          call_(op.op.op.call),
          state_(*reinterpret_cast<KcclState*>(call_.comm.state)),
          teams_(*reinterpret_cast<const KcclHostTeams*>(staging_.teams)),
          stream_(op.op.stream) {}

    // Makes the call. Returns false if it was refused or has failed.
    bool make() {
        int device = 0;
        const KcclGpuQueue& queue = *op_.op.queue;
        const int code = make_current(queue, &device);
        if (code != 0) {
            note(code, kKcclStagedContext);
            return refuse(kKcclStagedDriver);
        }
        const bool is_made = !is_captured() && make_pieces();
        make_previous_current(queue, device);
        return is_made;
    }

  private:
    bool make_pieces() {
        for (uint64_t slot = 0; slot < kKcclStagedSlots; ++slot) {
            if (!await_left(slot)) return false;
        }
        if (!copy_in(0)) return false;
        for (uint64_t i = 0; i < op_.num_pieces; ++i) {
            if (i + 1 < op_.num_pieces && !copy_in(i + 1)) return false;
            const uint64_t slot = i % kKcclStagedSlots;
            if (!await(staging_.arrived[slot]) || !await_left(slot)) return false;
            const KcclStagedPiece& piece = op_.pieces[i];
            piece.op->call.input = piece.input;
            piece.op->call.output = piece.output;
            if (kccl_host_run(piece.op) != kKcclOk || !copy_out(i)) return false;
        }
        return true;
    }

    // Enqueues the copies of a piece's input to the host, and the event that follows them. Without
    // an input the event follows the work before the call.
    bool copy_in(uint64_t i) {
        const KcclStagedPiece& piece = op_.pieces[i];
        const auto copy = reinterpret_cast<driver::CopyToHost>(staging_.copy_to_host);
        for (uint64_t n = 0; n < piece.num_in; ++n) {
            const KcclStagedRow& row = piece.in[n];
            const int code = copy(reinterpret_cast<void*>(row.address), call_.input + row.offset,
                                  row.num_bytes, stream_);
            if (!check(code, kKcclStagedToHost)) return false;
        }
        return record(staging_.arrived[i % kKcclStagedSlots]);
    }

    bool copy_out(uint64_t i) {
        const KcclStagedPiece& piece = op_.pieces[i];
        if (piece.num_out == 0) return true;
        const auto copy = reinterpret_cast<driver::CopyToDevice>(staging_.copy_to_device);
        for (uint64_t n = 0; n < piece.num_out; ++n) {
            const KcclStagedRow& row = piece.out[n];
            const int code =
                copy(call_.output + row.offset, reinterpret_cast<const void*>(row.address),
                     row.num_bytes, stream_);
            if (!check(code, kKcclStagedToDevice)) return false;
        }
        const uint64_t slot = i % kKcclStagedSlots;
        staging_.has_left[slot] = 1;
        return record(staging_.left[slot]);
    }

    // Waits until the last output in this slot is on the GPU.
    bool await_left(uint64_t slot) {
        if (staging_.has_left[slot] != 0 && !await(staging_.left[slot])) return false;
        staging_.has_left[slot] = 0;
        return true;
    }

    bool record(uint64_t event) {
        const auto record = reinterpret_cast<driver::RecordEvent>(staging_.record_event);
        return check(record(event, stream_), kKcclStagedRecord);
    }

    // Waits for an event of the GPU. Returns false if that failed, if another rank has failed
    // meanwhile, or if a signal handler has raised an exception.
    bool await(uint64_t event) {
        const auto query = reinterpret_cast<driver::QueryEvent>(staging_.query_event);
        const TeamsInUse here(&teams_);
        uint64_t began_ns = 0, looked_ns = 0;
        for (;;) {
            const int code = query(event);
            if (code != staging_.not_ready) return check(code, kKcclStagedQuery);
            if (status_of(call_.comm) != kKcclOk) return false;
            const uint64_t waited_ns = waited_until(kccl_host_clock_ns(), began_ns, looked_ns);
            uint32_t gone = 0;
            if (kccl_host_idle(state_.idle_context, waited_ns, 0, &gone) == kKcclInterrupted) {
                fail_here(kKcclInterrupted);
                return false;
            }
            const uint64_t limit_ns =
                state_.contacted != 0 ? state_.limit_ns : state_.first_limit_ns;
            if (waited_ns > limit_ns) return fail(kKcclStagedStream);
        }
    }

    bool is_captured() {
        int status = driver::kNotCaptured;
        const auto ask = reinterpret_cast<driver::IsCapturing>(op_.op.queue->is_capturing);
        // If the driver fails to say, the first copy reports the error.
        if (ask(stream_, &status) != 0 || status == driver::kNotCaptured) return false;
        refuse(kKcclStagedCapture);
        return true;
    }

    bool check(int code, KcclStagedFunction function) {
        if (code == 0) return true;
        note(code, function);
        return fail(kKcclStagedDriver);
    }

    void note(int code, KcclStagedFunction function) {
        staging_.error = code;
        staging_.failed = function;
    }

    // Refuses a call of which nothing has been done. It can be made again.
    bool refuse(KcclStagedRefusal why) {
        if (mem::claim(&state_.status, static_cast<uint32_t>(kKcclAborted))) {
            staging_.refusal = why;
        }
        return false;
    }

    // Ends a call that has begun, and the peers' calls with it. Pieces may have been exchanged and
    // copies may be under way, so the call must not be made again before a reset.
    bool fail(KcclStagedRefusal why) {
        if (status_of(call_.comm) != kKcclOk) return false;
        staging_.refusal = why;
        staging_.has_failed = 1;
        fail_here(kKcclAborted);
        return false;
    }

    void fail_here(KcclStatus status) {
        KcclRecord record = {};
        record.status = status;
        record.rank = record.peer = teams_.rank;
        fail_all(teams_, record);
    }

    const KcclStagedOp& op_;
    KcclStaging& staging_;
    const KcclCall& call_;
    KcclState& state_;
    const KcclHostTeams& teams_;
    const uint64_t stream_;
};

}  // namespace
}  // namespace kccl::host

extern "C" void kccl_run_staged(const KcclCall* call) {
    const auto& op = *reinterpret_cast<const KcclStagedOp*>(reinterpret_cast<const uint8_t*>(call) -
                                                            offsetof(KcclStagedOp, op.op.call));
    // After a communicator is closed, its status is not ok, and the memory of its calls is gone.
    if (kccl::status_of(call->comm) != kKcclOk) return;
    kccl::host::Staged(op).make();
}
