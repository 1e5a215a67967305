// hipRTC for tests: compile_sim.py compiles the source for the simulator. It needs no device.
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define HIP_API extern "C" __attribute__((visibility("default")))
#define HIPRTC_MAY_FAIL() \
    if (const int told = told_to_fail(__func__); told != 0) return told

extern char** environ;

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidProgram = 4;
constexpr int kCompilation = 6;
constexpr int kNameNotValid = 10;

struct Program {
    std::string name, source, log, code;
    std::vector<std::string> kernels;
    std::map<std::string, std::string> lowered;
};

std::mutex mutex;
std::map<std::string, int>& codes() {
    static auto& all = *new std::map<std::string, int>;
    return all;
}

int told_to_fail(const char* name) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = codes().find(name);
    return found == codes().end() ? 0 : found->second;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Runs compile_sim.py in a folder that has its arguments as files. Returns its exit code.
int compile_in(const std::string& folder) {
    const char* const words[] = {HIP_RUNTIME_PYTHON, HIP_RUNTIME_COMPILER, folder.c_str(), nullptr};
    pid_t pid = 0;
    if (posix_spawn(&pid, words[0], nullptr, nullptr, const_cast<char**>(words), environ) != 0) {
        return -1;
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

HIP_API void hip_runtime_fail(const char* name, int code) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (code == 0) {
        codes().erase(name);
    } else {
        codes()[name] = code;
    }
}

HIP_API int hiprtcVersion(int* major, int* minor) {
    HIPRTC_MAY_FAIL();
    *major = 7;
    *minor = 15;
    return kSuccess;
}

HIP_API int hiprtcCreateProgram(Program** program, const char* source, const char* name, int,
                                const char* const*, const char* const*) {
    HIPRTC_MAY_FAIL();
    *program = new Program{name, source, {}, {}, {}, {}};
    return kSuccess;
}

HIP_API int hiprtcAddNameExpression(Program* program, const char* expression) {
    HIPRTC_MAY_FAIL();
    program->kernels.push_back(expression);
    return kSuccess;
}

HIP_API int hiprtcCompileProgram(Program* program, int num_options, const char* const* options) {
    HIPRTC_MAY_FAIL();
    char folder[] = "/tmp/hiprtc-XXXXXX";
    if (mkdtemp(folder) == nullptr) return kCompilation;
    const std::string at = folder;
    std::ofstream(at + "/source") << program->source;
    std::ofstream(at + "/name") << program->name;
    std::ofstream kernels(at + "/kernels"), given(at + "/options");
    for (const std::string& each : program->kernels) kernels << each << '\n';
    for (int i = 0; i < num_options; ++i) given << options[i] << '\n';
    kernels.close();
    given.close();
    const int status = compile_in(at);
    program->log = read_file(at + "/log");
    program->code = read_file(at + "/code");
    for (const char* file : {"source", "name", "kernels", "options", "log", "code"}) {
        unlink((at + "/" + file).c_str());
    }
    rmdir(folder);
    for (size_t i = 0; i < program->kernels.size(); ++i) {
        program->lowered[program->kernels[i]] = "kccl_sim_entry_" + std::to_string(i);
    }
    return status == 0 ? kSuccess : kCompilation;
}

HIP_API int hiprtcGetLoweredName(Program* program, const char* expression, const char** name) {
    HIPRTC_MAY_FAIL();
    const auto found = program->lowered.find(expression);
    if (found == program->lowered.end()) return kNameNotValid;
    *name = found->second.c_str();
    return kSuccess;
}

HIP_API int hiprtcGetProgramLogSize(Program* program, size_t* size) {
    HIPRTC_MAY_FAIL();
    *size = program->log.size() + 1;
    return kSuccess;
}

HIP_API int hiprtcGetProgramLog(Program* program, char* log) {
    HIPRTC_MAY_FAIL();
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return kSuccess;
}

HIP_API int hiprtcGetCodeSize(Program* program, size_t* size) {
    HIPRTC_MAY_FAIL();
    *size = program->code.size();
    return *size != 0 ? kSuccess : kInvalidProgram;
}

HIP_API int hiprtcGetCode(Program* program, char* code) {
    HIPRTC_MAY_FAIL();
    memcpy(code, program->code.data(), program->code.size());
    return kSuccess;
}

HIP_API int hiprtcDestroyProgram(Program** program) {
    HIPRTC_MAY_FAIL();
    delete *program;
    *program = nullptr;
    return kSuccess;
}
