// The ranks of a job, for host.hpp: the data that they exchange while memory is set up, and the
// file descriptors of their processes.
#pragma once

#include <cuda.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

namespace kccl::host {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Owns a file descriptor.
class Fd {
  public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    ~Fd() {
        if (fd_ >= 0) close(fd_);
    }
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    int get() const { return fd_; }

  private:
    int fd_;
};

// Collects steps that undo something, such as closing or unmapping. run() and the destructor run
// the steps, the last one first.
class Undo {
  public:
    Undo() = default;
    Undo(const Undo&) = delete;
    Undo& operator=(const Undo&) = delete;
    ~Undo() { run(); }
    void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
    void run() {
        for (; !steps_.empty(); steps_.pop_back()) steps_.back()();
    }

  private:
    std::vector<std::function<void()>> steps_;
};

// ---- The ranks ----------------------------------------------------------------------------------

// All ranks of a job, at most 8. This rank's device is that of the CUDA context that was current
// when the Team was constructed. A Team must outlive the windows and communicators that are made
// with it. The constructor, allgather(), together(), agree() and exchange() are collective.
class Team {
  public:
    // Copies `bytes` bytes of each rank to `all`, in rank order.
    using Allgather = std::function<void(const void* mine, void* all, std::size_t bytes)>;

    // Waits for the kernels that use windows and communicators, before their memory is freed.
    using WaitForKernels = std::function<void()>;

    Team(
        int rank, int world_size, Allgather allgather,
        WaitForKernels wait_for_kernels = [] { cuCtxSynchronize(); })
        : rank_(rank),
          world_size_(world_size),
          exchange_bytes_(std::move(allgather)),
          wait_for_kernels_(std::move(wait_for_kernels)) {
        together([&] {
            if (world_size > kKcclMaxWorldSize || rank < 0 || rank >= world_size) {
                throw Error(who() + " of " + std::to_string(world_size) + ": there can be " +
                            std::to_string(kKcclMaxWorldSize) + " ranks, from 0");
            }
            must("cuInit", cuInit(0));
            must("cuCtxGetCurrent", cuCtxGetCurrent(&context_));
            if (context_ == nullptr) throw Error(who() + " has no current device: cudaSetDevice()");
            must("cuCtxGetDevice", cuCtxGetDevice(&device_));
        });
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int rank() const { return rank_; }
    int world_size() const { return world_size_; }
    CUdevice device() const { return device_; }
    CUcontext context() const { return context_; }
    std::string who() const { return "rank " + std::to_string(rank_); }
    void wait_for_kernels() const { wait_for_kernels_(); }

    // Throws unless a driver function returned success.
    void must(const char* function, CUresult code, std::size_t num_bytes = 0) const {
        if (code == CUDA_SUCCESS) return;
        const char* name = nullptr;
        cuGetErrorName(code, &name);
        throw Error(std::string(function) + " failed: " + (name != nullptr ? name : "?") + " (" +
                    std::to_string(code) + ") on " + who() + ", device " + std::to_string(device_) +
                    (num_bytes != 0 ? ", " + std::to_string(num_bytes) + " bytes" : ""));
    }

    template <class T>
    std::vector<T> allgather(const T& mine) const {
        std::vector<T> all(world_size_ > 0 ? world_size_ : 1);
        exchange_bytes_(&mine, all.data(), sizeof(T));
        return all;
    }

    // Calls `local` on every rank. If it throws on one rank, all ranks throw.
    template <class Local>
    void together(Local local) const {
        std::array<char, 256> mine = {};
        try {
            local();
        } catch (const std::exception& error) {
            std::snprintf(mine.data(), mine.size(), "%s", error.what());
        }
        std::string errors;
        for (const auto& each : allgather(mine)) {
            // If several ranks give the same text, it appears only once.
            if (errors.find(each.data()) != std::string::npos) continue;
            errors += (errors.empty() ? "" : "; ") + std::string(each.data());
        }
        if (!errors.empty()) throw Error(errors);
    }

    // Throws unless the value is the same on all ranks.
    void agree(const char* name, uint64_t mine) const {
        const std::vector<uint64_t> all = allgather(mine);
        for (int peer = 1; peer < world_size_; ++peer) {
            if (all[peer] == all[0]) continue;
            throw Error(std::string(name) + " is " + std::to_string(all[0]) + " on rank 0 and " +
                        std::to_string(all[peer]) + " on rank " + std::to_string(peer));
        }
    }

    // Sends this rank's descriptor to every other rank. Returns duplicates of all ranks'
    // descriptors, in rank order; this rank's own entry is empty. timeout_s: how long a rank waits
    // for one of them.
    std::vector<Fd> exchange(const Fd& mine, double timeout_s) const;

  private:
    int rank_;
    int world_size_;
    Allgather exchange_bytes_;
    WaitForKernels wait_for_kernels_;
    CUcontext context_ = nullptr;
    CUdevice device_ = 0;
};

// ---- Descriptors from process to process --------------------------------------------------------

namespace sockets {

// A message: the sender's rank, with a descriptor attached.
struct Message {
    int rank = -1;
    iovec bytes = {&rank, sizeof(rank)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header = {nullptr, 0, &bytes, 1, control, sizeof(control), 0};
};

inline Error failed(const Team& team, const std::string& what) {
    return Error(team.who() + " cannot " + what + ": " + std::strerror(errno));
}

// Opens a socket with the abstract address `name`. A killed process leaves no such address behind.
inline Fd open(const Team& team, const std::array<char, 17>& name, sockaddr_un* address) {
    *address = {AF_UNIX, {}};
    std::snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "kccl-%s", name.data());
    Fd opened(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (opened.get() < 0) throw failed(team, "open a socket");
    return opened;
}

inline void send(const Team& team, int peer, const std::array<char, 17>& name, int fd) {
    sockaddr_un address;
    const Fd connection = open(team, name, &address);
    if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
        throw failed(team, "connect to rank " + std::to_string(peer) +
                               ", which must be on the same machine and in the same container");
    }
    Message message;
    message.rank = team.rank();
    cmsghdr* part = CMSG_FIRSTHDR(&message.header);
    *part = {CMSG_LEN(sizeof(fd)), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(part), &fd, sizeof(fd));
    if (sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) < 0) {
        throw failed(team, "send memory to rank " + std::to_string(peer));
    }
}

// Accepts a connection, and returns the sender's rank and its descriptor. The rank is -1 if the
// sender is no rank of this job, or belongs to another user.
inline std::pair<int, Fd> receive(const Team& team, const Fd& listener, const timeval& limit) {
    const Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0) throw failed(team, "get the memory of all ranks");
    ucred sender = {};
    socklen_t length = sizeof(sender);
    getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &sender, &length);
    setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    Message message;
    if (sender.uid != getuid() ||
        recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC) != sizeof(message.rank)) {
        return {-1, Fd()};
    }
    const cmsghdr* part = CMSG_FIRSTHDR(&message.header);
    if (part == nullptr || part->cmsg_type != SCM_RIGHTS) return {-1, Fd()};
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(part), sizeof(fd));
    const bool is_peer = message.rank >= 0 && message.rank < team.world_size();
    return {is_peer ? message.rank : -1, Fd(fd)};
}

}  // namespace sockets

inline std::vector<Fd> Team::exchange(const Fd& mine, double timeout_s) const {
    const auto seconds = static_cast<time_t>(timeout_s);
    const timeval limit = {seconds, static_cast<suseconds_t>((timeout_s - seconds) * 1e6)};
    std::array<char, 17> name = {};
    Fd listener;
    together([&] {
        if (!(timeout_s >= 0.001)) throw Error("timeout_s must be at least 0.001");
        uint64_t random = 0;
        if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
            throw sockets::failed(*this, "get random bytes");
        }
        std::snprintf(name.data(), name.size(), "%016llx", static_cast<unsigned long long>(random));
        sockaddr_un address;
        listener = sockets::open(*this, name, &address);
        setsockopt(listener.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
            listen(listener.get(), kKcclMaxWorldSize) != 0) {
            throw sockets::failed(*this, "listen");
        }
    });
    const auto names = allgather(name);
    std::vector<Fd> fds(world_size_);
    together([&] {
        // connect() does not wait for the peer to accept, so the order does not matter.
        for (int peer = 0; peer < world_size_; ++peer) {
            if (peer != rank_) sockets::send(*this, peer, names[peer], mine.get());
        }
        for (int missing = world_size_ - 1; missing > 0;) {
            auto [peer, fd] = sockets::receive(*this, listener, limit);
            if (peer < 0 || peer == rank_ || fds[peer].get() >= 0) continue;
            fds[peer] = std::move(fd);
            --missing;
        }
    });
    return fds;
}

}  // namespace kccl::host
