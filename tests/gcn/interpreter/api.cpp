// What Python calls.
#include <cstring>

#include "machine.h"

namespace {

thread_local std::string error;

template <class F>
auto guarded(F body) -> decltype(body()) {
    try {
        error.clear();
        return body();
    } catch (const std::exception& caught) {
        error = caught.what();
        return {};
    }
}

}  // namespace

extern "C" {

const char* gcn_error() { return error.c_str(); }

// Null: gcn_error() says why. The program lives as long as what runs it, and its handle.
void* gcn_parse(const char* text) {
    return guarded(
        [&]() -> void* { return new std::shared_ptr<const gcn::Program>(new gcn::Program(text)); });
}
void gcn_forget(void* program) {
    delete static_cast<std::shared_ptr<const gcn::Program>*>(program);
}

void* gcn_machine(const GcnSettings* settings) {
    return guarded([&]() -> void* { return new gcn::Machine(*settings); });
}
void gcn_destroy(void* machine) { delete static_cast<gcn::Machine*>(machine); }
void gcn_add_region(void* machine, uint64_t begin, uint64_t bytes, int rank) {
    static_cast<gcn::Machine*>(machine)->memory().add_region(begin, bytes, rank);
}

// Adds a launch behind those of its rank. 0: gcn_error() says why not.
int gcn_enqueue(void* machine, void* program, const char* kernel, int rank, uint32_t grid,
                uint32_t block, uint32_t shared_bytes, const void* arguments, uint64_t num_bytes) {
    return guarded([&] {
        auto launch = std::make_unique<gcn::Launch>();
        launch->rank = rank;
        launch->program = *static_cast<std::shared_ptr<const gcn::Program>*>(program);
        launch->kernel = &launch->program->kernel(kernel);
        const gcn::Kernel& known = *launch->kernel;
        launch->grid = grid;
        launch->block = block;
        launch->shared_bytes = shared_bytes;
        if (num_bytes > known.explicit_bytes)
            throw gcn::Error("more arguments than the kernel has");
        launch->arguments.resize((known.argument_bytes + 255) / 256 * 256);
        std::memcpy(launch->arguments.data(), arguments, num_bytes);
        const auto hide = [&](const char* name, uint64_t value, int bytes) {
            const auto at = known.hidden.find(name);
            if (at != known.hidden.end())
                std::memcpy(launch->arguments.data() + at->second, &value, bytes);
        };
        hide("hidden_block_count_x", grid, 4);
        hide("hidden_block_count_y", 1, 4);
        hide("hidden_block_count_z", 1, 4);
        hide("hidden_group_size_x", block, 2);
        hide("hidden_group_size_y", 1, 2);
        hide("hidden_group_size_z", 1, 2);
        hide("hidden_grid_dims", 1, 2);
        static_cast<gcn::Machine*>(machine)->enqueue(std::move(launch));
        return 1;
    });
}

// 0: gcn_error() is the finding.
int gcn_run(void* machine) {
    auto* const self = static_cast<gcn::Machine*>(machine);
    const bool is_fine = self->run();
    error = self->finding();
    return is_fine ? 1 : 0;
}

// Picoseconds of virtual time in which launch i ran.
int64_t gcn_launch_time(void* machine, int i) {
    const auto& launch = *static_cast<gcn::Machine*>(machine)->launches().at(i);
    return launch.end - launch.begin;
}

// How often an instruction ran, of those whose names begin so.
uint64_t gcn_executed(void* machine, const char* prefix) {
    uint64_t sum = 0;
    for (const auto& [name, count] : static_cast<gcn::Machine*>(machine)->executed()) {
        if (name.starts_with(prefix)) sum += count;
    }
    return sum;
}
}
