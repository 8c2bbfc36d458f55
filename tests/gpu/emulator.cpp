// An emulator of NVIDIA GPUs on the CPU. It implements the functions of CUDA's driver, NVRTC, cuBLAS and
// NCCL that libgpuarray 0.7.6 calls. `emulator.py` compiles it and installs it under their names.
//
// With it, pygpu, libgpuarray and Theano take their code paths for CUDA on machines without a GPU. It
// cannot test NVIDIA's own code, speed, or asynchronous execution: all calls here are synchronous.
//
// It reports an error for mistakes whose behaviour is undefined on real devices: a call in a process
// forked after cuInit, a call without a current context, an access out of bounds, and ranks that make
// different NCCL calls.
//
// Environment variables, with their defaults:
//   EMULATED_GPUS       the number of GPUs (1)
//   EMULATED_MEGABYTES  the memory of each GPU, separate for each process (1024)
//   EMULATED_KERNELS    a folder for compiled kernels (required)
//   EMULATED_CXXFLAGS   the flags with which g++ compiles kernels (none)
//   EMULATED_NCCL       the version of NCCL (22809)
//   EMULATED_CALLS      a file to which NCCL calls are appended (none)

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace {

int number_from(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoi(value) : otherwise;
}

// ---------------------------------------------------------------------------- the driver

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
       NOT_SUPPORTED = 801 };

const size_t ALIGNMENT = 256;

struct Device {
    unsigned flags = 0;
    int retained = 0;
    size_t used = 0;
};
struct Handle {  // a stream or an event
    Device *device;
};
struct Function {
    void (*launch)(const unsigned *, const unsigned *, size_t, void **);
};

pid_t initialized = 0;
Device devices[16];
thread_local std::vector<Device *> stack;  // of contexts; each device has only one
std::map<uintptr_t, std::pair<size_t, Device *>> memory;

int complain(int code, const std::string &what) {
    fprintf(stderr, "emulated CUDA, process %d: %s\n", getpid(), what.c_str());
    return code;
}

size_t total_memory() { return size_t(number_from("EMULATED_MEGABYTES", 1024)) << 20; }
int gpus() { return number_from("EMULATED_GPUS", 1); }

// Check that this process has called cuInit.
int ready() {
    if (!initialized) return complain(NOT_INITIALIZED, "a call before cuInit");
    if (initialized != getpid()) return complain(NOT_INITIALIZED, "a call in a fork of who called cuInit");
    return SUCCESS;
}

int in_context() {
    if (int code = ready()) return code;
    if (stack.empty()) return complain(INVALID_CONTEXT, "no current context");
    return SUCCESS;
}

int check_range(const void *start, size_t size) {
    uintptr_t at = reinterpret_cast<uintptr_t>(start);
    auto after = memory.upper_bound(at);
    if (after != memory.begin()) {
        auto block = std::prev(after);
        if (at + size <= block->first + block->second.first) {
            if (block->second.second == stack.back()) return SUCCESS;
            return complain(ILLEGAL_ADDRESS, "memory of another device");
        }
    }
    return complain(ILLEGAL_ADDRESS, "memory that is not the device's, or beyond a block's end");
}

int check_stream(const Handle *stream) {
    if (int code = in_context()) return code;
    if (!stream || stream->device != stack.back())
        return complain(INVALID_HANDLE, "a stream or event of another context");
    return SUCCESS;
}

// ---------------------------------------------------------------------------- NVRTC

struct Program {
    std::string source, log, ptx;
    std::map<std::string, std::string> headers;
};

// Precedes a kernel's source, so that g++ can compile it. The headers are in EMULATED_CXXFLAGS.
const char PRELUDE[] = R"(
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
struct Emulated { unsigned x, y, z; };
static Emulated threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
static char *emulated_shared;
static ucontext_t emulated_scheduler;
static ucontext_t *emulated_thread;
static void __syncthreads() { swapcontext(emulated_thread, &emulated_scheduler); }
static void __threadfence() {}
template <class To, class From> static To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
static float __int_as_float(int value) { return emulated_bits<float>(value); }
static int __float_as_int(float value) { return emulated_bits<int>(value); }
static unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }
static double __longlong_as_double(long long value) { return emulated_bits<double>(value); }
static long long __double_as_longlong(double value) { return emulated_bits<long long>(value); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
static float __half2float(unsigned short half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent == 31 ? (fraction ? __builtin_nanf("") : __builtin_inff())
                : exponent ? std::ldexp(float(fraction + 1024), exponent - 25)
                : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}
static unsigned short __float2half_rn(float value) {
    unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return sign | 0x7e00;
    float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
    int steps = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return sign | (steps < 1024 && exponent == -14 ? steps : steps - 1024 + ((exponent + 15) << 10));
}
template <class T, class V> static T atomicAdd(T *at, V value) {
    T old = *at;
    *at += value;
    return old;
}
template <class T, class C, class V> static T atomicCAS(T *at, C compare, V value) {
    T old = *at;
    if (old == T(compare)) *at = value;
    return old;
}
template <class T, class V> static T atomicExch(T *at, V value) {
    T old = *at;
    *at = value;
    return old;
}
template <class A, class B> static auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> static auto max(A a, B b) { return a < b ? b : a; }
using std::isnan; using std::isinf; using std::signbit;
template <class... A, size_t... I>
static void emulated_call(void (*kernel)(A...), void **args, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(args[I])...);
}
template <class... A> static void emulated_call(void (*kernel)(A...), void **args) {
    emulated_call(kernel, args, std::index_sequence_for<A...>());
}
)";

// Code that follows the source, once per kernel.
const char LAUNCH[] = R"(
static void emulated_NAME(void **args) { emulated_call(&NAME, args); }
extern "C" void emulated_launch_NAME(
        const unsigned *grid, const unsigned *block, size_t shared, void **args) {
    struct Thread { ucontext_t context; Emulated at; bool alive; std::vector<char> stack; };
    static void **given;
    static bool *alive;
    given = args;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    unsigned count = block[0] * block[1] * block[2];
    std::vector<char> room(shared + 64);
    emulated_shared = room.data();
    std::vector<Thread> threads(HAS_BARRIER ? count : 0);
    for (unsigned b = 0; b < grid[0] * grid[1] * grid[2]; ++b) {
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        unsigned running = count;
        for (unsigned t = 0; t < count; ++t) {
            threadIdx = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
            if (!HAS_BARRIER) { emulated_NAME(args); continue; }
            Thread &thread = threads[t];
            thread.at = threadIdx;
            thread.alive = true;
            thread.stack.resize(1 << 16);
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data();
            thread.context.uc_stack.ss_size = thread.stack.size();
            thread.context.uc_link = &emulated_scheduler;
            void (*body)() = [] { emulated_NAME(given); *alive = false; };
            makecontext(&thread.context, body, 0);
        }
        while (HAS_BARRIER && running) {  // run each thread up to its next barrier
            running = 0;
            for (Thread &thread : threads) {
                if (!thread.alive) continue;
                threadIdx = thread.at;
                alive = &thread.alive;
                emulated_thread = &thread.context;
                swapcontext(&emulated_scheduler, &thread.context);
                running += thread.alive;
            }
        }
    }
}
)";

std::string replaced(const std::string &text, const char *pattern, const char *by) {
    return std::regex_replace(text, std::regex(pattern), by);
}

std::string for_gxx(const std::string &text) {
    std::string dynamic = replaced(text, R"(extern\s+__shared__\s+(\w+)\s+(\w+)\s*\[\s*\])",
                                   "$1 *$2 = ($1 *)emulated_shared");
    std::string up =
        replaced(dynamic, R"(asm\("\{ cvt\.f32\.f16[^;]*;[^;]*;)", "r = __half2float(h.data);");
    return replaced(up, R"(asm\("\{ cvt\.rn\.f16\.f32[^;]*;[^;]*;)", "r.data = __float2half_rn(f);");
}

std::string read_all(const std::string &path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

int compile(Program *program) {
    std::string text = PRELUDE + for_gxx(program->source);
    bool barrier = text.find("local_barrier", sizeof PRELUDE) != std::string::npos ||
                   text.find("__syncthreads", sizeof PRELUDE) != std::string::npos;
    std::string source = replaced(program->source, R"(#define[^\n]*)", "");
    std::regex kernels(R"((?:KERNEL|__global__)\s[^;{}]*?\bvoid\s+(\w+)\s*\()");
    for (std::sregex_iterator one(source.begin(), source.end(), kernels), end; one != end; ++one) {
        std::string launch = replaced(LAUNCH, "NAME", (*one)[1].str().c_str());
        text += replaced(launch, "HAS_BARRIER", barrier ? "true" : "false");
    }
    const char *folder = getenv("EMULATED_KERNELS");
    if (!folder) return complain(6, "EMULATED_KERNELS names no folder");
    std::string all = text;
    for (auto &header : program->headers) all += header.second;
    std::string stem = std::string(folder) + "/" + std::to_string(std::hash<std::string>()(all));
    std::string library = stem + ".so";
    auto finish = [&] {  // libgpuarray caches the result on disk, so it must be self-contained
        std::string code = read_all(library);
        size_t size = code.size();
        program->ptx = std::string(reinterpret_cast<char *>(&size), sizeof size) + code;
        return 0;
    };
    // One rank compiles a kernel; the others wait for it.
    int lock = open((stem + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    struct Unlock {
        int descriptor;
        ~Unlock() { close(descriptor); }
    } unlock{lock};
    flock(lock, LOCK_EX);
    if (access(library.c_str(), R_OK) == 0) return finish();
    std::string own = stem + "-" + std::to_string(getpid());
    mkdir(own.c_str(), 0700);
    for (auto &header : program->headers)
        std::ofstream(own + "/" + header.first) << for_gxx(header.second);
    std::ofstream(own + "/kernel.cpp") << text;
    const char *flags = getenv("EMULATED_CXXFLAGS");
    std::string command = std::string("g++ ") + (flags ? flags : "") + " -w -shared -I" + own + " " +
                          own + "/kernel.cpp -o " + own + "/kernel.so 2>" + own + "/log";
    int status = system(command.c_str());
    program->log = read_all(own + "/log");
    if (status) return 6;  // NVRTC_ERROR_COMPILATION
    return rename((own + "/kernel.so").c_str(), library.c_str()) ? 6 : finish();
}

// ---------------------------------------------------------------------------- NCCL

enum { NCCL_SUCCESS = 0, NCCL_SYSTEM = 2, NCCL_INTERNAL = 3, NCCL_ARGUMENT = 4, NCCL_USAGE = 5 };
enum Kind { REDUCE, ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER };
const char *const KINDS[] = {"reduce", "all_reduce", "reduce_scatter", "broadcast", "all_gather"};
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};  // sizes of NCCL's data types

struct Comm {
    int rank, size;
    Device *device;
    std::vector<int> sockets;  // on rank 0: to all other ranks; on the others: to rank 0
};
struct Call {
    int kind, type, op, root;
    size_t count;
};
struct Member {
    int rank, size;
    long device;
    char host[64];
};

std::map<std::string, int> listeners;

bool send_all(int socket, const void *data, size_t size) {
    const char *at = static_cast<const char *>(data);
    while (size) {
        ssize_t sent = send(socket, at, size, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        at += sent;
        size -= sent;
    }
    return true;
}

bool receive_all(int socket, void *data, size_t size) {
    char *at = static_cast<char *>(data);
    while (size) {
        ssize_t got = recv(socket, at, size, MSG_WAITALL);
        if (got <= 0) return false;
        at += got;
        size -= got;
    }
    return true;
}

sockaddr_un address_of(const std::string &name) {  // an abstract address, so that no file is left
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name.data(), name.size());
    return address;
}

int limited(int socket) {
    timeval limit = {60, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return socket;
}

float from_half(unsigned short half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent ? std::ldexp(float(fraction + 1024), exponent - 25)
                           : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}

unsigned short to_half(float value) {
    unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return sign | 0x7e00;
    float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
    int steps = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return sign | (steps < 1024 && exponent == -14 ? steps : steps - 1024 + ((exponent + 15) << 10));
}

template <class T> T combined(T a, T b, int op) {
    switch (op) {
        case 0: return a + b;
        case 1: return a * b;
        case 2: return b > a || b != b ? b : a;
        default: return b < a || b != b ? b : a;
    }
}

template <class T> void combine(void *into, const void *other, size_t count, int op) {
    T *a = static_cast<T *>(into);
    const T *b = static_cast<const T *>(other);
    for (size_t i = 0; i < count; ++i) a[i] = combined(a[i], b[i], op);
}

void combine_halves(void *into, const void *other, size_t count, int op) {
    auto *a = static_cast<unsigned short *>(into);
    auto *b = static_cast<const unsigned short *>(other);
    for (size_t i = 0; i < count; ++i) a[i] = to_half(combined(from_half(a[i]), from_half(b[i]), op));
}

void combine(int type, void *a, const void *b, size_t count, int op) {
    switch (type) {
        case 0: return combine<int8_t>(a, b, count, op);
        case 1: return combine<uint8_t>(a, b, count, op);
        case 2: return combine<int32_t>(a, b, count, op);
        case 3: return combine<uint32_t>(a, b, count, op);
        case 4: return combine<int64_t>(a, b, count, op);
        case 5: return combine<uint64_t>(a, b, count, op);
        case 6: return combine_halves(a, b, count, op);
        case 7: return combine<float>(a, b, count, op);
        case 8: return combine<double>(a, b, count, op);
    }
}

void note(const Comm *comm, const Call &call) {
    const char *path = getenv("EMULATED_CALLS");
    if (!path) return;
    std::string line = std::to_string(comm->rank) + " " + KINDS[call.kind] + " " +
                       std::to_string(call.count) + " " + std::to_string(call.type) + "\n";
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, line.data(), line.size()) < 0) perror(path);
    close(file);
}

// Run a collective: rank 0 receives all arrays, and sends the result to each rank.
int run(Comm *comm, Call call, const void *from, void *to, Handle *stream) {
    if (check_stream(stream) || !comm || comm->device != stack.back()) return NCCL_ARGUMENT;
    if (call.type < 0 || call.type > 8 || call.op < 0 || call.op > 3 || call.root < 0 ||
        call.root >= comm->size)
        return complain(NCCL_ARGUMENT, std::string(KINDS[call.kind]) + ": a wrong type, op or root");
    size_t bytes = call.count * SIZES[call.type];
    bool many_in = call.kind == REDUCE_SCATTER, many_out = call.kind == ALL_GATHER;
    size_t sent = many_in ? bytes * comm->size : bytes, returned = many_out ? bytes * comm->size : bytes;
    bool gives = call.kind != BROADCAST || comm->rank == call.root;
    bool gets = (call.kind != REDUCE && call.kind != BROADCAST) ||
                (call.kind == REDUCE ? comm->rank == call.root : comm->rank != call.root);
    if ((gives && check_range(from, sent)) || (gets && check_range(to, returned))) return NCCL_ARGUMENT;
    note(comm, call);
    std::vector<char> own(sent);
    if (gives) memcpy(own.data(), from, sent);
    int verdict = NCCL_SUCCESS;
    if (comm->rank) {
        int root = comm->sockets[0];
        std::vector<char> result(returned);
        if (!send_all(root, &call, sizeof call) || !send_all(root, own.data(), sent) ||
            !receive_all(root, &verdict, sizeof verdict) ||
            (!verdict && !receive_all(root, result.data(), returned)))
            return complain(NCCL_SYSTEM, "NCCL: rank 0 is gone");
        if (!verdict && gets) memcpy(to, result.data(), returned);
        return verdict;
    }
    std::vector<std::vector<char>> by_rank(comm->size, std::vector<char>(sent));
    by_rank[0] = own;
    for (int rank = 1; rank < comm->size; ++rank) {
        Call other = {};
        if (!receive_all(comm->sockets[rank - 1], &other, sizeof other))
            return complain(NCCL_SYSTEM, "NCCL: rank " + std::to_string(rank) + " is gone");
        if (memcmp(&other, &call, sizeof call)) {
            verdict = complain(NCCL_ARGUMENT, "NCCL: ranks make different calls");
            break;  // the rest of the data in the socket can no longer be interpreted
        }
        if (!receive_all(comm->sockets[rank - 1], by_rank[rank].data(), sent)) return NCCL_SYSTEM;
    }
    std::vector<char> result;
    if (call.kind == ALL_GATHER) {
        for (auto &one : by_rank) result.insert(result.end(), one.begin(), one.end());
    } else if (call.kind == BROADCAST) {
        result = by_rank[call.root];
    } else {
        result = by_rank[0];
        for (int rank = 1; rank < comm->size; ++rank)
            combine(call.type, result.data(), by_rank[rank].data(), sent / SIZES[call.type], call.op);
    }
    for (int rank = 0; rank < comm->size; ++rank) {
        const char *part = result.data() + (many_in ? rank * bytes : 0);
        if (rank == 0) {
            if (!verdict && gets) memcpy(to, part, returned);
        } else {
            int socket = comm->sockets[rank - 1];
            if (!send_all(socket, &verdict, sizeof verdict) ||
                (!verdict && !send_all(socket, part, returned)))
                return NCCL_SYSTEM;
        }
    }
    return verdict;
}

Member self(int rank, int size) {
    Member member = {};
    member.rank = rank;
    member.size = size;
    member.device = stack.back() - devices;
    const char *host = getenv("NCCL_HOSTID");
    snprintf(member.host, sizeof member.host, "%s", host ? host : "this host");
    return member;
}

int judge(const std::vector<Member> &members) {
    bool may_share = number_from("EMULATED_NCCL", 22809) >= 23000 &&
                     number_from("NCCL_MULTI_RANK_GPU_ENABLE", 0);
    for (auto &a : members)
        for (auto &b : members) {
            if (&a == &b) continue;
            if (a.rank == b.rank || a.size != b.size) return NCCL_ARGUMENT;
            if (a.device == b.device && !strcmp(a.host, b.host) && !may_share)
                return complain(NCCL_USAGE, "NCCL: two ranks on one GPU");
        }
    return NCCL_SUCCESS;
}

int join(Comm *comm, const std::string &name) {
    Member own = self(comm->rank, comm->size);
    sockaddr_un address = address_of(name);
    auto *generic = reinterpret_cast<sockaddr *>(&address);
    if (comm->rank) {
        int to_root = limited(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)), verdict;
        comm->sockets.push_back(to_root);
        if (connect(to_root, generic, sizeof address) || !send_all(to_root, &own, sizeof own) ||
            !receive_all(to_root, &verdict, sizeof verdict))
            return complain(NCCL_SYSTEM, "NCCL: rank 0 cannot be reached");
        return verdict;
    }
    if (!listeners.count(name)) return complain(NCCL_USAGE, "NCCL: the name is not from rank 0");
    std::vector<Member> members = {own};
    for (int rank = 1; rank < comm->size; ++rank) {
        int accepted = accept4(listeners[name], nullptr, nullptr, SOCK_CLOEXEC);
        Member other;
        if (accepted < 0 || !receive_all(limited(accepted), &other, sizeof other)) return NCCL_SYSTEM;
        members.push_back(other);
        comm->sockets.resize(comm->size - 1);
        if (other.rank < 1 || other.rank >= comm->size) return NCCL_ARGUMENT;
        comm->sockets[other.rank - 1] = accepted;
    }
    int verdict = judge(members);
    for (int one : comm->sockets)
        if (!send_all(one, &verdict, sizeof verdict)) return NCCL_SYSTEM;
    return verdict;
}

// ---------------------------------------------------------------------------- cuBLAS

template <class T> struct Matrix {  // in column-major order
    const T *data;
    int lead, turned;
    T operator()(int row, int column) const {
        return turned ? data[row * size_t(lead) + column] : data[column * size_t(lead) + row];
    }
};

template <class T>
int gemm(int ta, int tb, int m, int n, int k, const T *alpha, const T *a, int lda, const T *b, int ldb,
         const T *beta, T *c, int ldc) {
    Matrix<T> left = {a, lda, ta}, right = {b, ldb, tb};
    for (int row = 0; row < m; ++row)
        for (int column = 0; column < n; ++column) {
            T sum = 0, &out = c[column * size_t(ldc) + row];
            for (int i = 0; i < k; ++i) sum += left(row, i) * right(i, column);
            out = *alpha * sum + (*beta == 0 ? T(0) : *beta * out);
        }
    return 0;
}

template <class T>
int gemv(int turned, int m, int n, const T *alpha, const T *a, int lda, const T *x, int incx,
         const T *beta, T *y, int incy) {
    Matrix<T> matrix = {a, lda, turned};
    for (int row = 0; row < (turned ? n : m); ++row) {
        T sum = 0, &out = y[row * incy];
        for (int i = 0; i < (turned ? m : n); ++i) sum += matrix(row, i) * x[i * incx];
        out = *alpha * sum + (*beta == 0 ? T(0) : *beta * out);
    }
    return 0;
}

template <class T>
int ger(int m, int n, const T *alpha, const T *x, int incx, const T *y, int incy, T *a, int lda) {
    for (int column = 0; column < n; ++column)
        for (int row = 0; row < m; ++row)
            a[column * size_t(lda) + row] += *alpha * x[row * incx] * y[column * incy];
    return 0;
}

template <class T> int dot(int n, const T *x, int incx, const T *y, int incy, T *result) {
    *result = 0;
    for (int i = 0; i < n; ++i) *result += x[i * incx] * y[i * incy];
    return 0;
}

}  // namespace

extern "C" {

int cuInit(int) {
    if (initialized && initialized != getpid()) return ready();
    initialized = getpid();
    return SUCCESS;
}
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuGetErrorName(int code, const char **name) {
    static std::map<int, std::string> texts;
    std::string &text = texts[code];
    text = "emulated error " + std::to_string(code);
    return *name = text.c_str(), SUCCESS;
}
int cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

int cuDeviceGet(int *device, int number) {
    if (int code = ready()) return code;
    return number < 0 || number >= gpus() ? INVALID_DEVICE : (*device = number, SUCCESS);
}
int cuDeviceGetCount(int *count) {
    if (int code = ready()) return code;
    return *count = gpus(), SUCCESS;
}
int cuDeviceGetName(char *name, int length, int device) {
    return snprintf(name, length, "Emulated GPU %d", device), SUCCESS;
}
int cuDeviceGetPCIBusId(char *id, int length, int device) {
    return snprintf(id, length, "0000:%02x:00.0", device), SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
    static const std::map<int, int> values = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152},
        {10, 32}, {16, 2}, {41, 1}, {75, 9}, {76, 0}};
    auto found = values.find(attribute);
    if (found == values.end()) return complain(INVALID_VALUE, "attribute " + std::to_string(attribute));
    return *value = found->second, SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = devices[device].flags;
    return *active = devices[device].retained > 0, SUCCESS;
}
int cuDevicePrimaryCtxSetFlags(int device, unsigned flags) {
    return devices[device].flags = flags, SUCCESS;
}
int cuDevicePrimaryCtxRetain(Device **context, int device) {
    if (int code = ready()) return code;
    ++devices[device].retained;
    return *context = &devices[device], SUCCESS;
}
int cuDevicePrimaryCtxRelease(int device) {
    if (--devices[device].retained < 0) return complain(INVALID_CONTEXT, "released once too often");
    return SUCCESS;
}
int cuCtxGetDevice(int *device) {
    if (int code = in_context()) return code;
    return *device = stack.back() - devices, SUCCESS;
}
int cuCtxGetCurrent(Device **context) {
    if (int code = ready()) return code;
    return *context = stack.empty() ? nullptr : stack.back(), SUCCESS;
}
int cuCtxSetCurrent(Device *context) {
    if (int code = ready()) return code;
    if (!stack.empty()) stack.pop_back();
    return stack.push_back(context), SUCCESS;
}
int cuCtxPushCurrent_v2(Device *context) {
    if (int code = ready()) return code;
    return stack.push_back(context), SUCCESS;
}
int cuCtxPopCurrent_v2(Device **context) {
    if (int code = in_context()) return code;
    if (context) *context = stack.back();
    return stack.pop_back(), SUCCESS;
}

int cuLinkCreate(unsigned, void *, void *, std::string **state) {
    return *state = new std::string, SUCCESS;
}
int cuLinkAddData(std::string *state, int, void *data, size_t size, const char *, unsigned, void *,
                  void *) {
    return state->assign(static_cast<char *>(data), size), SUCCESS;
}
int cuLinkComplete(std::string *state, void **data, size_t *size) {
    *data = &(*state)[0];
    return *size = state->size(), SUCCESS;
}
int cuLinkDestroy(std::string *state) { return delete state, SUCCESS; }
int cuModuleLoadData(void **module, const void *image) {
    if (int code = in_context()) return code;
    size_t size;
    memcpy(&size, image, sizeof size);
    std::string path = std::string(getenv("EMULATED_KERNELS")) + "/loaded-XXXXXX";
    int file = mkstemp(&path[0]);
    ssize_t written = write(file, static_cast<const char *>(image) + sizeof size, size);
    close(file);
    *module = written == ssize_t(size) ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path.c_str());
    return *module ? SUCCESS : complain(INVALID_VALUE, dlerror());
}
int cuModuleLoadDataEx(void **module, const void *image, unsigned, void *, void *) {
    return cuModuleLoadData(module, image);
}
int cuModuleUnload(void *module) { return dlclose(module), SUCCESS; }
int cuModuleGetFunction(Function **function, void *module, const char *name) {
    void *found = dlsym(module, ("emulated_launch_" + std::string(name)).c_str());
    if (!found) return complain(NOT_FOUND, std::string("no kernel ") + name);
    *function = new Function{reinterpret_cast<decltype(Function::launch)>(found)};
    return SUCCESS;
}
int cuFuncGetAttribute(int *value, int, Function *) { return *value = 1024, SUCCESS; }
int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, Handle *stream, void **args, void **) {
    if (int code = check_stream(stream)) return code;
    unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    size_t threads = size_t(bx) * by * bz;
    if (!gx || !gy || !gz || !threads || threads > 1024 || shared > 49152)
        return complain(INVALID_VALUE, "a grid or block that no device has");
    return function->launch(grid, block, shared, args), SUCCESS;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (int code = in_context()) return code;
    *free = total_memory() - stack.back()->used;
    return *total = total_memory(), SUCCESS;
}
int cuMemAlloc_v2(uintptr_t *at, size_t size) {
    if (int code = in_context()) return code;
    if (!size) return INVALID_VALUE;
    if (stack.back()->used + size > total_memory()) return OUT_OF_MEMORY;
    void *room = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!room) return OUT_OF_MEMORY;
    memset(room, 0xff, size);  // NaN, so that no test relies on memory being zero
    *at = reinterpret_cast<uintptr_t>(room);
    memory[*at] = {size, stack.back()};
    return stack.back()->used += size, SUCCESS;
}
int cuMemFree_v2(uintptr_t at) {
    if (int code = ready()) return code;
    auto found = memory.find(at);
    if (found == memory.end()) return complain(INVALID_VALUE, "freed, but not allocated");
    found->second.second->used -= found->second.first;
    memory.erase(found);
    return free(reinterpret_cast<void *>(at)), SUCCESS;
}
int cuMemAllocHost_v2(void **at, size_t size) {
    if (int code = in_context()) return code;
    return *at = malloc(size), SUCCESS;
}
int cuMemFreeHost(void *at) { return free(at), SUCCESS; }
int cuMemAllocManaged(uintptr_t *, size_t, unsigned) { return NOT_SUPPORTED; }
int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t size) {
    if (int code = in_context()) return code;
    if (int code = check_range(reinterpret_cast<void *>(to), size)) return code;
    return memcpy(reinterpret_cast<void *>(to), from, size), SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, Handle *stream) {
    if (int code = check_stream(stream)) return code;
    return cuMemcpyHtoD_v2(to, from, size);
}
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, Handle *stream) {
    if (int code = check_stream(stream)) return code;
    if (int code = check_range(reinterpret_cast<void *>(from), size)) return code;
    return memcpy(to, reinterpret_cast<void *>(from), size), SUCCESS;
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, Handle *stream) {
    if (int code = check_stream(stream)) return code;
    if (int code = check_range(reinterpret_cast<void *>(from), size)) return code;
    if (int code = check_range(reinterpret_cast<void *>(to), size)) return code;
    return memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size), SUCCESS;
}
int cuMemcpyPeerAsync(uintptr_t, void *, uintptr_t, void *, size_t, void *) { return NOT_SUPPORTED; }
int cuMemsetD8Async(uintptr_t at, unsigned char value, size_t size, Handle *stream) {
    if (int code = check_stream(stream)) return code;
    if (int code = check_range(reinterpret_cast<void *>(at), size)) return code;
    return memset(reinterpret_cast<void *>(at), value, size), SUCCESS;
}

int cuEventCreate(Handle **event, unsigned) {
    if (int code = in_context()) return code;
    return *event = new Handle{stack.back()}, SUCCESS;
}
int cuEventRecord(Handle *event, Handle *) {  // a null stream is the default stream
    if (int code = in_context()) return code;
    return event ? SUCCESS : complain(INVALID_HANDLE, "no event");
}
int cuEventSynchronize(Handle *event) { return event ? ready() : INVALID_HANDLE; }
int cuEventDestroy_v2(Handle *event) { return delete event, SUCCESS; }
int cuStreamCreate(Handle **stream, unsigned flags) { return cuEventCreate(stream, flags); }
int cuStreamWaitEvent(Handle *stream, Handle *event, unsigned) { return cuEventRecord(event, stream); }
int cuStreamSynchronize(Handle *stream) { return cuEventSynchronize(stream); }
int cuStreamDestroy_v2(Handle *stream) { return cuEventDestroy_v2(stream); }
int cuIpcGetMemHandle(void *, uintptr_t) { return NOT_SUPPORTED; }
int cuIpcCloseMemHandle(uintptr_t) { return NOT_SUPPORTED; }
struct IpcHandle { char bytes[64]; };
int cuIpcOpenMemHandle(uintptr_t *, IpcHandle, unsigned) { return NOT_SUPPORTED; }

const char *nvrtcGetErrorString(int code) { return code == 6 ? "compilation" : "an error"; }
int nvrtcCreateProgram(Program **program, const char *source, const char *, int number,
                       const char *const *headers, const char *const *names) {
    *program = new Program{source, "", "", {}};
    for (int i = 0; i < number; ++i) (*program)->headers[names[i]] = headers[i];
    return 0;
}
int nvrtcCompileProgram(Program *program, int, const char *const *) { return compile(program); }
int nvrtcDestroyProgram(Program **program) { return delete *program, 0; }
int nvrtcGetPTXSize(Program *program, size_t *size) { return *size = program->ptx.size(), 0; }
int nvrtcGetPTX(Program *program, char *ptx) {
    return memcpy(ptx, program->ptx.data(), program->ptx.size()), 0;
}
int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    return *size = program->log.size() + 1, 0;
}
int nvrtcGetProgramLog(Program *program, char *log) { return strcpy(log, program->log.c_str()), 0; }

struct ncclUniqueId { char internal[128]; };
int ncclGetVersion(int *version) { return *version = number_from("EMULATED_NCCL", 22809), 0; }
const char *ncclGetErrorString(int code) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error",
                                        "internal error", "invalid argument", "invalid usage"};
    return code >= 0 && code < 6 ? texts[code] : "unknown result code";
}
int ncclGroupStart() { return NCCL_SUCCESS; }
int ncclGroupEnd() { return NCCL_SUCCESS; }
int ncclGetUniqueId(ncclUniqueId *id) {
    std::random_device random;
    std::string name = "emulated-nccl-" + std::to_string(random()) + std::to_string(random());
    sockaddr_un address = address_of(name);
    int listener = limited(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (bind(listener, reinterpret_cast<sockaddr *>(&address), sizeof address) || listen(listener, 64))
        return NCCL_SYSTEM;
    listeners[name] = listener;
    memset(id, 0, sizeof *id);
    return strcpy(id->internal, name.c_str()), NCCL_SUCCESS;
}
int ncclCommInitRank(Comm **comm, int size, ncclUniqueId id, int rank) {
    if (in_context()) return NCCL_ARGUMENT;
    if (size < 1 || rank < 0 || rank >= size) return NCCL_ARGUMENT;
    Comm *made = new Comm{rank, size, stack.back(), {}};
    if (int code = join(made, id.internal)) return code;
    return *comm = made, NCCL_SUCCESS;
}
int ncclCommDestroy(Comm *comm) {
    if (in_context()) return NCCL_ARGUMENT;
    for (int one : comm->sockets) close(one);
    return delete comm, NCCL_SUCCESS;
}
int ncclCommCount(Comm *comm, int *count) { return *count = comm->size, NCCL_SUCCESS; }
int ncclCommUserRank(Comm *comm, int *rank) { return *rank = comm->rank, NCCL_SUCCESS; }
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm,
               Handle *stream) {
    return run(comm, {REDUCE, type, op, root, count}, from, to, stream);
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm,
                  Handle *stream) {
    return run(comm, {ALL_REDUCE, type, op, 0, count}, from, to, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm,
                      Handle *stream) {
    return run(comm, {REDUCE_SCATTER, type, op, 0, count}, from, to, stream);
}
int ncclBcast(void *at, size_t count, int type, int root, Comm *comm, Handle *stream) {
    return run(comm, {BROADCAST, type, 0, root, count}, at, at, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Handle *stream) {
    return run(comm, {ALL_GATHER, type, 0, 0, count}, from, to, stream);
}

int cublasCreate_v2(void **handle) { return *handle = malloc(1), in_context() ? 1 : 0; }
int cublasDestroy_v2(void *handle) { return free(handle), 0; }
int cublasSetStream_v2(void *, Handle *) { return 0; }
int cublasSetPointerMode_v2(void *, int) { return 0; }
int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0; }
int cublasSetAtomicsMode(void *, int) { return 0; }

#define FOR_EACH_TYPE(T, L)                                                                             \
    int cublas##L##dot_v2(void *, int n, const T *x, int incx, const T *y, int incy, T *result) {       \
        return dot(n, x, incx, y, incy, result);                                                        \
    }                                                                                                   \
    int cublas##L##gemm_v2(void *, int ta, int tb, int m, int n, int k, const T *alpha, const T *a,     \
                           int lda, const T *b, int ldb, const T *beta, T *c, int ldc) {                \
        return gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                              \
    }                                                                                                   \
    int cublas##L##gemv_v2(void *, int t, int m, int n, const T *alpha, const T *a, int lda,            \
                           const T *x, int incx, const T *beta, T *y, int incy) {                       \
        return gemv(t, m, n, alpha, a, lda, x, incx, beta, y, incy);                                    \
    }                                                                                                   \
    int cublas##L##ger_v2(void *, int m, int n, const T *alpha, const T *x, int incx, const T *y,       \
                          int incy, T *a, int lda) {                                                    \
        return ger(m, n, alpha, x, incx, y, incy, a, lda);                                              \
    }                                                                                                   \
    int cublas##L##gemmBatched(void *, int ta, int tb, int m, int n, int k, const T *alpha,             \
                               const T *const *a, int lda, const T *const *b, int ldb, const T *beta,   \
                               T *const *c, int ldc, int count) {                                       \
        for (int i = 0; i < count; ++i)                                                                 \
            gemm(ta, tb, m, n, k, alpha, a[i], lda, b[i], ldb, beta, c[i], ldc);                        \
        return 0;                                                                                       \
    }

FOR_EACH_TYPE(float, S)
FOR_EACH_TYPE(double, D)

}  // extern "C"
