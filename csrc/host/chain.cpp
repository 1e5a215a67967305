// Makes calls of several steps, each with one of the rank's teams or by the rank alone: see
// chain.inc.
//
// Why the teams' calls match. kccl/plan/steps.py derives the steps of a call from the collective,
// the length, the type and the operator, which are the same on all ranks. So on all ranks of a team
// the steps have the same kernels. A rank makes the steps in their order. So a team's channel sees
// the same sequence of calls on all its ranks, however the calls of other teams come between them.
//
// Why ranks that make the same calls cannot deadlock. Number all steps of all calls in their order.
// The lowest step that some rank has not completed waits for no rank in an earlier step, so it
// ends.
//
// How a failure spreads. A rank whose wait fails writes a record to the peers of the team that the
// wait belongs to. The code below then writes the same record to the peers of the rank's other
// teams. A waiting rank looks for records of all its teams, so every rank that waits learns of the
// failure. Ranks on different nodes have no windows in which to write: nodes.cpp makes the steps of
// a team of several nodes, and sends its records by sockets.
#include <stddef.h>

#include "../include/kccl/reduce.cuh"
#include "../include/kccl/wait.cuh"
#include "postings.h"
#include "routes.h"

namespace kccl::host {
namespace {

// Added to the numbers of ranks in a failure record that is passed on to another team. There they
// are numbers in the communicator; the sum tells them from numbers in a team, which are smaller.
constexpr int32_t kOfCommunicator = kKcclMaxWorldSize;

// Returns the number in the communicator of a rank that a record of the team names: as a number in
// the team, or plus kOfCommunicator. A negative number means no rank, and is returned as it is.
int32_t number_of(const KcclHostTeam& team, int32_t rank) {
    if (rank < 0) return rank;
    return rank < kOfCommunicator ? team.ranks[rank] : rank - kOfCommunicator;
}

int32_t passed_on(int32_t number) { return number < 0 ? number : number + kOfCommunicator; }

KcclState* state_at(uint64_t address) { return reinterpret_cast<KcclState*>(address); }

// Returns the KcclNodes of a team of several nodes, or null if the team's ranks share memory.
KcclNodes* nodes_of(const KcclHostTeam& team) { return reinterpret_cast<KcclNodes*>(team.nodes); }

// Checks whether a peer of the team has given up. If so, fails this rank in the team with the
// peer's record, and returns true.
bool has_given_up(const KcclHostTeam& team) {
    KcclNodes* nodes = nodes_of(team);
    if (nodes == nullptr) {
        uint32_t closed = 0;
        return !nobody_gave_up(team.comm, &closed);
    }
    KcclRecord record;
    if (!hear_nodes(*nodes, &record)) return false;
    KcclState* const state = state_at(team.comm.state);
    if (mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) state->record = record;
    return true;
}

// Tells the peers of all of this rank's teams why it has failed. The peers of team `failed` know
// already, unless they are on other nodes. failed: KcclTeams; kKcclNumTeams: no team knows yet.
void tell_teams(const KcclHostTeams& teams, KcclRecord record, uint32_t failed) {
    record.rank = passed_on(record.rank);
    record.peer = passed_on(record.peer);
    for (uint32_t i = 0; i < kKcclNumTeams; ++i) {
        if (i != failed) give_up(teams.team[i].comm, record);
        if (KcclNodes* nodes = nodes_of(teams.team[i])) tell_nodes(*nodes, record);
    }
}

// Fails the communicator with the status and the record of team `failed`, and then fails its other
// teams.
KCCL_DEVICE_COLD void fail(const KcclHostTeams& teams, uint32_t failed) {
    const KcclHostTeam& team = teams.team[failed];
    const KcclState* const source = state_at(team.comm.state);
    KcclRecord record = source->record;
    record.rank = number_of(team, record.rank);
    record.peer = number_of(team, record.peer);
    KcclState* const state = state_at(teams.state);
    if (mem::claim(&state->status, source->status)) state->record = record;
    tell_teams(teams, record, failed);
    if (teams.routes != 0) tell_routes(*reinterpret_cast<KcclRoutes*>(teams.routes), record);
}

// While this thread runs a rank's chain, or waits for a rank's message: the teams of that rank.
// Otherwise null.
thread_local const KcclHostTeams* current = nullptr;

void look_at_teams() {
    if (current == nullptr) return;
    for (uint32_t i = 0; i < kKcclNumTeams; ++i) {
        const KcclHostTeam& team = current->team[i];
        if (status_of(team.comm) == kKcclOk && has_given_up(team)) fail(*current, i);
    }
    if (current->routes != 0 && state_at(current->state)->status == kKcclOk) {
        hear_routes(*reinterpret_cast<KcclRoutes*>(current->routes));
    }
}

// Sets the hook when the library is loaded, before any thread waits.
[[maybe_unused]] const bool kIsHooked = (team_hook = look_at_teams, true);

template <class From, class To>
void convert(To* out, const From* in, uint64_t count, int32_t divisor) {
    const platform::DefaultFloats floats{};
    if (divisor == 1) {
        for (uint64_t i = 0; i < count; ++i) {
            out[i] = Element<To>::narrow(Element<From>::widen(in[i]));
        }
        return;
    }
    for (uint64_t i = 0; i < count; ++i) {
        out[i] = Element<To>::narrow(Avg::finish(Element<From>::widen(in[i]), divisor));
    }
}

template <class From, class To>
void convert_of(const KcclHostStep& step) {
    const KcclCall& call = step.op.call;
    convert(output_of<To>(call), input_of<From>(call), call.count, step.divisor);
}

using Convert = void (*)(const KcclHostStep&);

// Returns the function that converts elements of KcclDtype `from` to KcclDtype `to`, or null for
// pairs that no chain needs. Chains convert short floats to float32 and back. The functions also
// divide, which makes averages of sums, so some have the same type twice.
Convert converter(uint32_t from, uint32_t to) {
    static constexpr struct {
        uint32_t from, to;
        Convert convert;
    } kKnown[] = {
        {kKcclFloat16, kKcclFloat32, convert_of<f16, float>},
        {kKcclBfloat16, kKcclFloat32, convert_of<bf16, float>},
        {kKcclFloat8E4m3fn, kKcclFloat32, convert_of<f8e4m3, float>},
        {kKcclFloat8E5m2, kKcclFloat32, convert_of<f8e5m2, float>},
        {kKcclFloat32, kKcclFloat16, convert_of<float, f16>},
        {kKcclFloat32, kKcclBfloat16, convert_of<float, bf16>},
        {kKcclFloat32, kKcclFloat8E4m3fn, convert_of<float, f8e4m3>},
        {kKcclFloat32, kKcclFloat8E5m2, convert_of<float, f8e5m2>},
        {kKcclFloat32, kKcclFloat32, convert_of<float, float>},
        {kKcclFloat64, kKcclFloat64, convert_of<double, double>},
        {kKcclComplex64, kKcclComplex64, convert_of<complex64, complex64>},
        {kKcclComplex128, kKcclComplex128, convert_of<complex128, complex128>},
    };
    for (const auto& known : kKnown) {
        if (known.from == from && known.to == to) return known.convert;
    }
    return nullptr;
}

// Makes a step of kind kKcclReduceStep: reduces the rows at the input, and stores the result in the
// output, which may be one of the rows. places: the address of each KcclPlace.
void reduce_rows_of(const KcclHostStep& step, const uint64_t* places) {
    const KcclCall& call = step.op.call;
    const platform::DefaultFloats floats{};
    const void* rows[kKcclMaxWorldSize];
    for (uint64_t i = 0; i < step.num_rows; ++i) {
        rows[i] = input_of<uint8_t>(call) + i * call.count * step.op.bytes_per_count;
    }
    if (step.last_from != kKcclBehind) {
        const uint64_t last = places[step.last_from] + step.last_offset;
        rows[step.num_rows - 1] = reinterpret_cast<const void*>(last);
    }
    rows_reducer(call.dtype, call.op)(output_of<void>(call), rows, static_cast<int>(step.num_rows),
                                      call.count);
}

// Makes a step that needs no other rank: a conversion, a reduction of this rank's rows, or a copy.
void make_alone(const KcclHostStep& step, const uint64_t* places) {
    const KcclCall& call = step.op.call;
    if (step.kind == kKcclConvertStep) {
        converter(call.dtype, step.to_dtype)(step);
    } else if (step.kind == kKcclReduceStep) {
        reduce_rows_of(step, places);
    } else if (call.output != call.input) {
        __builtin_memcpy(output_of<uint8_t>(call), input_of<uint8_t>(call), call.count);
    }
}

// Sets the timeouts of a team for a step, by the step's number. Each step gets an eighth of the
// communicator's timeout more than the step before it. So if a rank is late, the ranks that wait
// for it in an early step time out first, before ranks that wait for these in a later step.
void set_limits(KcclState* team, const KcclState* state, uint64_t number) {
    const auto set = [number](uint64_t* limit_ns, uint64_t ns) {
        const uint64_t longer = ns + ns / 8 * number;
        mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(limit_ns, longer < ns ? ns : longer);
    };
    set(&team->limit_ns, state->limit_ns);
    set(&team->first_limit_ns, state->first_limit_ns);
}

void run_chain(const KcclCall* call) {
    const auto* chain = reinterpret_cast<const KcclHostChain*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclHostOp, call));
    KcclState* const state = state_at(call->comm.state);
    const TeamsInUse here(chain->teams);
    const uint64_t places[] = {call->input, call->output, chain->teams->temporary};
    for (uint64_t i = 0; i < chain->num_steps; ++i) {
        KcclHostStep& step = chain->steps[i];
        // Stops between two steps if the communicator has failed: another thread may have called
        // abort().
        if (status_of(call->comm) != kKcclOk) return;
        step.op.call.input = places[step.from] + step.from_offset;
        step.op.call.output = places[step.to] + step.to_offset;
        if (step.kind == kKcclPostStep) {
            if (!run_posted(*chain->teams, step)) return;
            continue;
        }
        if (step.kind == kKcclMessageStep) {
            make_messages(state->idle_context, step.messages, step.offsets, step.num_messages,
                          step.op.call.input, step.op.call.output);
            continue;
        }
        if (step.kind != kKcclTeamStep && step.kind != kKcclNodesStep) {
            make_alone(step, places);
            continue;
        }
        set_limits(state_at(step.op.call.comm.state), state, step.number);
        KcclNodes* const nodes = nodes_of(chain->teams->team[step.team]);
        const uint32_t status =
            nodes == nullptr ? kccl_host_run(&step.op) : run_between_nodes(*nodes, step);
        if (status != kKcclOk) return fail(*chain->teams, step.team);
    }
    state->contacted = 1;
}

}  // namespace

TeamsInUse::TeamsInUse(const KcclHostTeams* teams) : before_(current) { current = teams; }
TeamsInUse::~TeamsInUse() { current = before_; }

void fail_all(const KcclHostTeams& teams, const KcclRecord& record) {
    KcclState* const state = state_at(teams.state);
    if (!mem::claim(&state->status, record.status)) return;
    state->record = record;
    pass_on(teams);
    if (teams.routes != 0) tell_routes(*reinterpret_cast<KcclRoutes*>(teams.routes), record);
}

void pass_on(const KcclHostTeams& teams) {
    tell_teams(teams, state_at(teams.state)->record, kKcclNumTeams);
}

}  // namespace kccl::host

extern "C" {

int kccl_host_bind_chain(KcclHostChain* chain) {
    for (uint64_t i = 0; i < chain->num_steps; ++i) {
        KcclHostStep& step = chain->steps[i];
        if (step.kind == kKcclTeamStep && kccl_host_bind(&step.op) != 0) return -1;
        if (step.kind == kKcclConvertStep &&
            kccl::host::converter(step.op.call.dtype, step.to_dtype) == nullptr) {
            return -1;
        }
        if (step.kind == kKcclReduceStep &&
            kccl::host::rows_reducer(step.op.call.dtype, step.op.call.op) == nullptr) {
            return -1;
        }
    }
    chain->op.kernel = kccl::host::run_chain;
    return 0;
}

void kccl_host_abort_teams(KcclHostTeams* teams) {
    KcclRecord record = {};
    record.status = kKcclAborted;
    record.rank = record.peer = teams->rank;
    kccl::host::fail_all(*teams, record);
}

}  // extern "C"
