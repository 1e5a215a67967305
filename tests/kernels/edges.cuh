// Kernels that access memory at its edges and beyond, and that end at once: test_edges.py.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

struct Eight {
    float value[8];
};
using Floats = float[8];
using Lines = kccl::mem::Line[8];
using ManyFloats = float[80000];

#define ONE \
    if (!kccl::leads(kccl::block())) return

// Plain accesses, and the library's, at element `at`.
KCCL_KERNEL void write_1(uint8_t* x, int at) {
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_2(uint16_t* x, int at) {
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_4(float* x, int at) {
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_8(uint64_t* x, int at) {
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_32(Eight* x, int at) {
    ONE;
    x[at] = x[0];
}
KCCL_KERNEL void read_1(uint8_t* x, int at) {
    ONE;
    x[0] = x[at];
}
KCCL_KERNEL void read_4(float* x, int at) {
    ONE;
    x[0] = x[at];
}
KCCL_KERNEL void read_volatile(float* x, int at) {
    ONE;
    x[0] = *(volatile float*)(x + at);
}
KCCL_KERNEL void load(uint32_t* x, int at) {
    ONE;
    x[0] = kccl::mem::load<Order::kRelaxed, Scope::kSystem>(x + at);
}
KCCL_KERNEL void store(uint32_t* x, int at) {
    ONE;
    kccl::mem::store<Order::kRelaxed, Scope::kSystem>(x + at, 1u);
}
KCCL_KERNEL void add(uint32_t* x, int at) {
    ONE;
    kccl::mem::add<Order::kRelaxed, Scope::kDevice>(x + at, 1u);
}
KCCL_KERNEL void load_packet(kccl::mem::Packet* x, int at) {
    ONE;
    x[0] = kccl::mem::load_packet<Scope::kSystem>(x + at);
}
KCCL_KERNEL void copy_68(uint8_t* x, uint8_t* y) {
    ONE;
    memcpy(y, x, 68);
}
KCCL_KERNEL void copy(uint8_t* x, uint8_t* y, uint64_t count) {
    ONE;
    memmove(y, x, count);
}
KCCL_KERNEL void fill(uint8_t* x, uint64_t count) {
    ONE;
    memset(x, 0, count);
}
KCCL_KERNEL void copy_late(uint8_t* x, uint32_t count) {
    KCCL_BLOCK_SHARED(kccl::mem::CopyBarrier, barrier);
    KCCL_BLOCK_SHARED(Lines, lines);
    ONE;
    kccl::mem::init_copies(&barrier, 1);
    kccl::mem::fence_copies();
    kccl::mem::arrive_expecting(&barrier, count);
    kccl::mem::copy_async(lines, x, count, &barrier, 0, 1);
    while (!kccl::mem::has_completed(&barrier, 0)) kccl::mem::poll_pause();
}

// Block-shared memory.
KCCL_KERNEL void write_variable(int at) {
    KCCL_BLOCK_SHARED(Floats, x);
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_dynamic(int at) {
    ONE;
    reinterpret_cast<float*>(kccl::platform::dynamic_shared())[at] = 1;
}
KCCL_KERNEL void write_large_variable(int at) {
    KCCL_BLOCK_SHARED(ManyFloats, x);
    ONE;
    x[at] = 1;
}
KCCL_KERNEL void write_both(int at) {
    KCCL_BLOCK_SHARED(Floats, x);
    ONE;
    x[at] = reinterpret_cast<float*>(kccl::platform::dynamic_shared())[0];
}
// Block 1 uses the shared memory of block 0.
KCCL_KERNEL void lend(uint32_t* flag, float** lent) {
    KCCL_BLOCK_SHARED(Floats, x);
    ONE;
    x[0] = 1;
    if (kccl::platform::block_in_grid() == 0) {
        *lent = x;
        kccl::mem::store<Order::kRelease, Scope::kDevice>(flag, 1u);
        while (kccl::mem::load<Order::kAcquire, Scope::kDevice>(flag) != 2) {
            kccl::mem::poll_pause();
        }
    } else {
        while (kccl::mem::load<Order::kAcquire, Scope::kDevice>(flag) != 1) {
            kccl::mem::poll_pause();
        }
        (*lent)[1] = 1;
        kccl::mem::store<Order::kRelease, Scope::kDevice>(flag, 2u);
    }
}

// Other memory.
KCCL_KERNEL void write_at(uint64_t address, int at) {
    ONE;
    reinterpret_cast<float*>(address)[at] = 1;
}
KCCL_KERNEL void write_behind(float** table, int at) {
    ONE;
    table[1][at] = 1;
}
KCCL_KERNEL void keep(float** kept, float* x) {
    ONE;
    kept[0] = x;
}
KCCL_KERNEL void use(float** kept, float* y) {
    ONE;
    y[0] = kept[0][0];
}
KCCL_KERNEL void use_of_peer(kccl::DeviceComm comm, float** mine, float* x) {
    if (kccl::leads(kccl::block())) mine[0] = x;
    kccl::block().sync();
    (void)kccl::broadcast<int64_t>(kccl::block(), comm, (int64_t*)mine, (int64_t*)mine, 1, 0);
    kccl::block().sync();
    if (kccl::leads(kccl::block())) mine[0][comm.rank] = 1;
    (void)kccl::barrier(kccl::block(), comm);
}
static const float kTable[4] = {1, 2, 3, 4};
static float count_of_calls;
KCCL_KERNEL void globals(float* x) {
    ONE;
    count_of_calls += 1;
    x[0] = kTable[int(x[1])] + count_of_calls;
}
KCCL_KERNEL void lend_local(float* x) {
    KCCL_BLOCK_SHARED(float*, lent);
    float local = x[0];
    if (kccl::block().index() == 0) lent = &local;
    kccl::block().sync();
    if (kccl::block().index() == 1) x[0] = *lent;
    kccl::block().sync();
    x[1 + kccl::block().index()] = local;
}

// What ends a kernel.
KCCL_KERNEL void call(uint64_t address) {
    ONE;
    reinterpret_cast<void (*)()>(address)();
}
KCCL_KERNEL void divide(int* x) {
    ONE;
    x[0] = 7 / x[1];
}
KCCL_KERNEL void assert_one(int* x) {
    ONE;
    assert(x[1] == 1);
}
KCCL_KERNEL void give_up() {
    ONE;
    abort();
}
KCCL_KERNEL void trap() {
    ONE;
    __builtin_trap();
}
__attribute__((noinline)) int depth(int n, volatile int* x) {
    volatile int y[10];
    y[n % 10] = n;
    return n == 0 ? x[0] : depth(n - 1, x) + y[n % 10];
}
KCCL_KERNEL void recurse(int* x) {
    ONE;
    x[0] = depth(x[1] + 100000, x);
}
__attribute__((noinline)) int large(int at) {
    volatile int a[100000];
    for (int i = 0; i < 100000; ++i) a[i] = i;
    return a[at];
}
KCCL_KERNEL void large_local(int* x) {
    ONE;
    x[0] = large(x[1]);
}
KCCL_KERNEL void overrun_local(int* x, int count) {
    ONE;
    volatile int a[4];
    for (int i = 0; i < count; ++i) a[i] = i;
    x[0] = a[x[1]];
}
