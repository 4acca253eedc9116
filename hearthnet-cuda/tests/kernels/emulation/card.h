/* A graphics card for tests: what the kernels use of CUDA, on one processor core.
 *
 * A thread of the card is a fiber with a stack of its own. One runs at a time, until it waits for others
 * (__syncthreads, a shuffle, a matrix product of a warp); then the next one does. In which order threads and
 * blocks have their turns is drawn anew for every launch: a kernel that lacks a barrier gives other results.
 * Shared memory is full of NaN when a block begins. Buffers end where memory ends, so that a kernel that
 * reaches beyond one dies. A block whose threads wait for one another for ever is an error. */

#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define MAX_THREADS 1024
#define WARP 32
#define STACK_BYTES (64 * 1024)

#define __global__ static __attribute__((unused, noinline))
#define __device__
#define __forceinline__ inline __attribute__((unused, always_inline))
#define __constant__
#define __shared__ static __attribute__((section("card_shared")))

/* There is some, or the section has no beginning. */
__attribute__((used)) __shared__ char some_of_it[4];

extern char __start_card_shared[], __stop_card_shared[];

typedef struct {
    unsigned x, y, z;
} Dimensions;

static Dimensions threadIdx, blockIdx, blockDim, gridDim;

typedef struct {
    unsigned arrived, generation;
} Barrier;

typedef struct {
    jmp_buf place;
    ucontext_t context;
    char *stack;
    int started, ended;
    unsigned parity;
} Fiber;

static Fiber fibers[MAX_THREADS];
static jmp_buf scheduler;
static int progress;
static Barrier block_barrier, warp_barriers[MAX_THREADS / WARP];
static unsigned exchanged[MAX_THREADS / WARP][2][2][WARP];
static void (*body)(void);

static void fail(const char *what) {
    fprintf(stderr, "card: %s\n", what);
    exit(3);
}

static __attribute__((noinline)) void pause_fiber(void) {
    if (_setjmp(fibers[threadIdx.x].place) == 0) {
        _longjmp(scheduler, 1);
    }
}

static __attribute__((noinline)) void wait_for(Barrier *barrier, unsigned members) {
    unsigned generation = barrier->generation;
    progress = 1;
    if (++barrier->arrived == members) {
        barrier->arrived = 0;
        barrier->generation++;
    } else {
        while (barrier->generation == generation) {
            pause_fiber();
        }
    }
}

static void begin_fiber(void) {
    body();
    fibers[threadIdx.x].ended = 1;
    progress = 1;
    _longjmp(scheduler, 1);
}

static __attribute__((noinline)) void resume(Fiber *fiber) {
    if (_setjmp(scheduler) == 0) {
        if (fiber->started) {
            _longjmp(fiber->place, 1);
        }
        fiber->started = 1;
        setcontext(&fiber->context);
    }
}

static __attribute__((noinline)) void prepare(Fiber *fiber) {
    if (!fiber->stack) {
        fiber->stack = malloc(STACK_BYTES);
    }
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber->context, begin_fiber, 0);
    fiber->started = fiber->ended = 0;
    fiber->parity = 0;
}

/* Runs one block; threads have their turns in steps of an odd number. Either each goes as far as it can
 * without others, or each warp does, so that one may be at a barrier that another has not left yet. */
static void run_block(unsigned threads, unsigned step, int by_warp) {
    unsigned i, left = threads, group = by_warp && threads > WARP ? WARP : threads;
    block_barrier = (Barrier){0, 0};
    memset(warp_barriers, 0, sizeof warp_barriers);
    memset(__start_card_shared, 0xff, (size_t)(__stop_card_shared - __start_card_shared));
    for (i = 0; i < threads; i++) {
        prepare(&fibers[i]);
    }
    while (left > 0) {
        int moved = 0;
        left = 0;
        for (i = 0; i < threads / group; i++) {
            unsigned first = (i * (2 * step + 1) + step) % (threads / group) * group, j;
            do {
                progress = 0;
                for (j = 0; j < group; j++) {
                    threadIdx.x = first + (j * (2 * step + 1) + step) % group;
                    if (!fibers[threadIdx.x].ended) {
                        resume(&fibers[threadIdx.x]);
                    }
                }
                moved |= progress;
            } while (progress && group < threads);
        }
        for (i = 0; i < threads; i++) {
            left += !fibers[i].ended;
        }
        if (left > 0 && !moved) {
            fail("threads of a block wait for one another");
        }
    }
    if (block_barrier.arrived) {
        fail("a thread ended before a barrier");
    }
}

static void run_grid(void (*kernel)(void), unsigned seed) {
    unsigned blocks = gridDim.x * gridDim.y * gridDim.z, i;
    if (blockDim.x == 0 || blockDim.x > MAX_THREADS || (blockDim.x & (blockDim.x - 1))) {
        fail("a block whose threads are not a power of two");
    }
    body = kernel;
    for (i = 0; i < blocks; i++) {
        unsigned block = seed & 1 ? blocks - 1 - i : i;
        blockIdx.x = block % gridDim.x;
        blockIdx.y = block / gridDim.x % gridDim.y;
        blockIdx.z = block / gridDim.x / gridDim.y;
        run_block(blockDim.x, seed >> 1 & 0xff, seed >> 9 & 1);
    }
}

/* What threads of a block do together. */

static void __syncthreads(void) {
    wait_for(&block_barrier, blockDim.x);
}

/* Puts two values where the other threads of the warp find them, and says where. */
static unsigned (*exchange(unsigned first, unsigned second))[WARP] {
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    unsigned parity = fibers[threadIdx.x].parity ^= 1;
    exchanged[warp][parity][0][lane] = first;
    exchanged[warp][parity][1][lane] = second;
    wait_for(&warp_barriers[warp], WARP);
    return exchanged[warp][parity];
}

static unsigned shuffled(unsigned mask, unsigned value, unsigned lane, int width) {
    unsigned own = threadIdx.x % WARP;
    if (mask != 0xffffffffu || width != WARP) {
        fail("a shuffle that is not of a whole warp");
    }
    return exchange(value, 0)[0][lane < WARP ? lane : own];
}

static unsigned bits_of_float(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float float_of_bits(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline unsigned shuffle_unsigned(unsigned mask, unsigned value, unsigned lane, int width) {
    return shuffled(mask, value, lane, width);
}

static inline int shuffle_int(unsigned mask, int value, unsigned lane, int width) {
    return (int)shuffled(mask, (unsigned)value, lane, width);
}

static inline float shuffle_float(unsigned mask, float value, unsigned lane, int width) {
    return float_of_bits(shuffled(mask, bits_of_float(value), lane, width));
}

#define SHUFFLE(value) _Generic((value), float: shuffle_float, int: shuffle_int, unsigned: shuffle_unsigned)
#define __shfl_down_sync(mask, value, delta, width) \
    SHUFFLE(value)(mask, value, threadIdx.x % WARP + (unsigned)(delta), width)
#define __shfl_xor_sync(mask, value, lanes, width) \
    SHUFFLE(value)(mask, value, threadIdx.x % WARP ^ (unsigned)(lanes), width)

/* PTX ISA, "Matrix Fragments for mma.m8n8k16" with .s8: a thread holds of A the row `lane / 4`, columns
 * `4 (lane % 4) + i`; of B the same rows of column `lane / 4`, of C the row `lane / 4` and columns
 * `2 (lane % 4) + i`. */
static void mma_m8n8k16(int *c, unsigned a, unsigned b) {
    unsigned lane = threadIdx.x % WARP;
    unsigned(*of)[WARP] = exchange(a, b);
    for (unsigned i = 0; i < 2; i++) {
        unsigned row = lane / 4, column = 2 * (lane % 4) + i;
        for (unsigned k = 0; k < 16; k++) {
            signed char left = (signed char)(of[0][4 * row + k / 4] >> 8 * (k % 4));
            signed char right = (signed char)(of[1][4 * column + k / 4] >> 8 * (k % 4));
            c[i] += left * right;
        }
    }
}

/* What a thread does alone. */

static inline unsigned __float_as_uint(float x) {
    return bits_of_float(x);
}

static inline float __uint_as_float(unsigned bits) {
    return float_of_bits(bits);
}

static inline float __int2float_rn(int n) {
    return (float)n;
}

static inline float __fadd_rn(float a, float b) {
    return a + b;
}

static inline float __fsub_rn(float a, float b) {
    return a - b;
}

static inline float __fmul_rn(float a, float b) {
    return a * b;
}

static inline float __fdiv_rn(float a, float b) {
    return a / b;
}

static inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}

static inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}

static inline int __dp4a(int a, int b, int c) {
    for (unsigned i = 0; i < 32; i += 8) {
        c += (signed char)((unsigned)a >> i) * (signed char)((unsigned)b >> i);
    }
    return c;
}

/* Launches, as the test sends them: all numbers are 32 bits wide. */

#define MAX_ARGUMENTS 24

typedef union {
    void *buffer;
    int number;
    float value;
} Argument;

static Argument arguments[MAX_ARGUMENTS];

static void read_all(void *to, size_t bytes) {
    if (bytes > 0 && fread(to, bytes, 1, stdin) != 1) {
        exit(0);
    }
}

static unsigned read_number(void) {
    unsigned number;
    read_all(&number, sizeof number);
    return number;
}

typedef struct {
    char *memory, *data;
    size_t mapped, bytes;
} Buffer;

/* A buffer whose end is the end of memory. */
static Buffer take(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    Buffer buffer = {NULL, NULL, whole + page, bytes};
    buffer.memory = mmap(NULL, buffer.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer.memory == MAP_FAILED || mprotect(buffer.memory + whole, page, PROT_NONE)) {
        fail("no memory");
    }
    buffer.data = buffer.memory + whole - bytes;
    return buffer;
}

static void launch(unsigned kernel, unsigned seed);

int main(void) {
    for (;;) {
        unsigned kernel = read_number(), seed = read_number(), count, i, used = 0;
        Buffer buffers[MAX_ARGUMENTS];
        gridDim.x = read_number();
        gridDim.y = read_number();
        gridDim.z = read_number();
        blockDim.x = read_number();
        count = read_number();
        if (count > MAX_ARGUMENTS) {
            fail("too many arguments");
        }
        for (i = 0; i < count; i++) {
            unsigned kind = read_number(), number = read_number();
            if (kind == 0) {
                arguments[i].number = (int)number;
            } else if (kind == 1) {
                arguments[i].value = float_of_bits(number);
            } else if (kind == 2) {
                arguments[i].buffer = NULL;
            } else if (kind == 4) {
                arguments[i] = arguments[number];
            } else {
                buffers[used] = take(number);
                read_all(buffers[used].data, number);
                arguments[i].buffer = buffers[used++].data;
            }
        }
        launch(kernel, seed);
        for (i = 0; i < used; i++) {
            fwrite(buffers[i].data, 1, buffers[i].bytes, stdout);
            munmap(buffers[i].memory, buffers[i].mapped);
        }
        fflush(stdout);
    }
}
