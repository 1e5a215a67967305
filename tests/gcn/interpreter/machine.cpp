#include "machine.h"

#include <algorithm>

namespace gcn {
namespace {

constexpr int kUnits = 4;  // that issue vector instructions, in a compute unit

}  // namespace

Machine::Machine(const GcnSettings& settings)
    : settings_(settings), memory_(settings.world_size), random_(settings.seed) {
    waiting_.resize(settings.world_size);
    channel_free_.resize(settings.world_size);
    link_free_.resize(settings.world_size * settings.world_size);
}

void Machine::push(Event event) {
    event.number = next_event_++;
    events_.push(event);
}

// With a seed an access takes from half as long to a third more, sometimes four times as long, and
// seldom 30 times, as behind a queue.
Time Machine::jittered(Time time) {
    if (settings_.seed == 0) return time;
    const uint64_t kind = random_() % 16;
    std::uniform_real_distribution<double> factor(0.5, kind == 0 ? 30.0 : kind < 4 ? 4.0 : 1.3);
    return static_cast<Time>(static_cast<double>(time) * factor(random_));
}

void Machine::enqueue(std::unique_ptr<Launch> launch) {
    waiting_.at(launch->rank).push_back(launch.get());
    launches_.push_back(std::move(launch));
}

bool Machine::run() {
    try {
        for (int rank = 0; rank < settings_.world_size; ++rank) begin_next(rank, 0);
        while (!events_.empty()) {
            const Event event = events_.top();
            events_.pop();
            if (event.time > settings_.limit) throw Error("is stuck: " + stuck());
            current_ = event.wave;
            access_ = event.kind == Event::Kind::kPart ? event.access->in : nullptr;
            if (event.kind == Event::Kind::kStep)
                step(*event.wave);
            else if (event.kind == Event::Kind::kPart)
                perform(event);
            else
                finish(event.access, event.time);
        }
        for (const auto& launch : launches_) {
            if (launch->num_running != 0) throw Error("is stuck: " + stuck());
        }
    } catch (const std::exception& error) {
        finding_ = error.what();
        if (current_ != nullptr) {
            const auto& code = current_->program->code();
            const uint32_t at = current_->pc == 0 ? 0 : current_->pc - 1;
            const Instruction& in = access_ != nullptr ? *access_ : code[at];
            finding_ = current_->name() + ": " + std::string(in.line) + ": " + finding_;
        }
        return false;
    }
    return true;
}

std::string Machine::stuck() const {
    std::string out;
    for (const auto& launch : launches_) {
        for (const auto& wave : launch->waves) {
            if (wave->has_ended || out.size() > 400) continue;
            out += wave->name() + (wave->waits_at_barrier ? " at a barrier; " : "; ");
        }
    }
    return out;
}

// A kernel begins with empty caches but for what is dirty.
void Machine::begin_next(int rank, Time now) {
    if (waiting_[rank].empty()) return;
    Launch& launch = *waiting_[rank].front();
    launch.begin = now;
    const Kernel& kernel = *launch.kernel;
    const auto arguments = reinterpret_cast<uint64_t>(launch.arguments.data());
    memory_.add_region(arguments, launch.arguments.size(), rank);
    const auto& constants = launch.program->constants();
    if (!constants.empty() && with_constants_.insert(launch.program.get()).second) {
        memory_.add_region(reinterpret_cast<uint64_t>(constants.data()), constants.size(),
                           kEveryRank);
    }
    for (uint32_t number = 0; number < launch.grid; ++number) {
        auto block = std::make_unique<Block>();
        block->rank = rank;
        block->die = rank * kDies + static_cast<int>(number % kDies);
        block->number = number;
        block->level1 = memory_.add_level1();
        block->shared.resize(kernel.shared_bytes + launch.shared_bytes);
        memory_.invalidate(block->level1, block->die, Scope::kSystem);
        for (uint32_t first = 0; first < launch.block; first += kLanes) {
            auto wave = std::make_unique<Wave>();
            wave->machine = this;
            wave->program = launch.program.get();
            wave->kernel = &kernel;
            wave->block = block.get();
            wave->number = static_cast<int>(first / kLanes);
            wave->pc = kernel.entry;
            wave->now = now + (settings_.seed == 0 ? 0 : static_cast<Time>(random_() % 2000000));
            wave->v.resize(kernel.num_vectors);
            for (int i = 0; i < kLanes; ++i) wave->v[0][i] = first + i;
            wave->scratch.resize(kLanes, std::vector<uint8_t>(kernel.private_bytes));
            wave->set_pair(0, arguments);
            wave->s[2] = number;
            wave->set_pair(kExec, launch.block - first >= kLanes
                                      ? ~uint64_t{0}
                                      : (uint64_t{1} << (launch.block - first)) - 1);
            block->waves.push_back(wave.get());
            push({wave->now, 0, Event::Kind::kStep, wave.get(), nullptr, 0, 0});
            launch.waves.push_back(std::move(wave));
        }
        block->num_running = static_cast<int>(block->waves.size());
        launch.blocks.push_back(std::move(block));
    }
    launch.num_running = static_cast<int>(launch.waves.size());
}

void Machine::step(Wave& wave) {
    if (wave.has_ended || wave.waits_at_barrier || wave.waits_for_counters) return;
    const auto& code = wave.program->code();
    while (true) {
        const uint32_t at = wave.pc;
        if (at >= code.size()) throw Error("runs past the end of the code");
        const Instruction& in = code[at];
        wave.pc = at + 1;
        ++wave.executed;
        ++executed_[in.name];
        cost(wave, in);
        in.run(wave, in);
        if (in.unit == Unit::kFlow && wave.pc != at + 1)
            wave.now += settings_.branch_cycles * settings_.cycle;
        if (wave.has_ended || wave.waits_at_barrier || wave.waits_for_counters) return;
        if (!events_.empty() && events_.top().time < wave.now) break;
    }
    push({wave.now, 0, Event::Kind::kStep, &wave, nullptr, 0, 0});
}

// The time of an instruction. Vector instructions of waves on the same unit take turns.
void Machine::cost(Wave& wave, const Instruction& in) {
    const Time cycle = settings_.cycle;
    if (settings_.seed != 0 && random_() % 256 == 0)
        wave.now += static_cast<Time>(random_() % 2000000);
    if (in.unit == Unit::kScalar || in.unit == Unit::kFlow) {
        wave.now += settings_.scalar_cycles * cycle;
        return;
    }
    Time& unit = wave.block->unit_free[wave.number % kUnits];
    const Time begin = std::max(wave.now, unit);
    int cycles = settings_.vector_cycles, occupied = 4;
    if (in.unit == Unit::kSlow) cycles = occupied = settings_.slow_cycles;
    if (in.unit == Unit::kMatrix) cycles = occupied = settings_.matrix_cycles;
    if (in.unit == Unit::kMemory) cycles = settings_.memory_cycles;
    unit = begin + occupied * cycle;
    wave.now = begin + cycles * cycle;
}

void Machine::sleep(Wave& wave, int count) { wave.now += Time{64} * count * settings_.cycle; }

uint32_t Machine::nearly(double exact, uint32_t input) const {
    const auto nearest = static_cast<float>(exact);
    const auto bits = std::bit_cast<uint32_t>(nearest);
    const uint32_t exponent = bits >> 23 & 0xff;
    if (settings_.seed == 0 || exponent == 0 || exponent >= 0xfe) return bits;
    std::minstd_rand hash(static_cast<uint32_t>(settings_.seed) * 0x9e3779b9 ^ input);
    hash.discard(2);
    if (nearest == exact || hash() % 2 == 0) return bits;
    // The float on the other side of the exact value.
    return std::abs(nearest) < std::abs(exact) ? bits + 1 : bits - 1;
}

void Machine::arrive_at_barrier(Wave& wave) {
    Block& block = *wave.block;
    wave.waits_at_barrier = true;
    ++block.num_waiting;
    block.barrier_time = std::max(block.barrier_time, wave.now);
    open_barrier_if_met(block);
}

void Machine::open_barrier_if_met(Block& block) {
    if (block.num_waiting == 0 || block.num_waiting < block.num_running) return;
    const Time now = block.barrier_time + settings_.barrier_cycles * settings_.cycle;
    block.num_waiting = 0;
    block.barrier_time = 0;
    for (Wave* each : block.waves) {
        if (!each->waits_at_barrier) continue;
        each->waits_at_barrier = false;
        each->now = now;
        push({now, 0, Event::Kind::kStep, each, nullptr, 0, 0});
    }
}

void Machine::end(Wave& wave) {
    wave.has_ended = true;
    Block& block = *wave.block;
    --block.num_running;
    // The others of its block no longer wait for it.
    block.barrier_time = std::max(block.barrier_time, wave.now);
    open_barrier_if_met(block);
    Launch& launch = *waiting_[block.rank].front();
    --launch.num_running;
    end_launch_if_done(launch, wave.now);
}

// A kernel ends when its accesses have taken place, and what its dies hold is written back.
void Machine::end_launch_if_done(Launch& launch, Time now) {
    if (launch.num_running != 0 || launch.num_accesses != 0) return;
    for (int die = 0; die < kDies; ++die)
        memory_.write_back(launch.rank * kDies + die, Scope::kSystem);
    launch.end = now;
    memory_.drop_region(reinterpret_cast<uint64_t>(launch.arguments.data()));
    auto& waiting = waiting_[launch.rank];
    waiting.erase(waiting.begin());
    begin_next(launch.rank, now);
}

}  // namespace gcn
