/* Numbers: specs/canonical-arithmetic.md, sections 1, 2 and 5, on a graphics card.
 *
 * All kernels are written in what CUDA C++ and C have in common, so that a C compiler and a header
 * that stands for the card (tests/kernels/emulation/card.h) can run the very same text on a processor.
 *
 * Every operation on floats is an intrinsic that says how it rounds. None is written with +, -, * or /,
 * which a compiler might contract or relax: a test looks for what is left in the PTX. */

#ifdef __cplusplus
extern "C" {
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL __global__ void
#define DEVICE static __device__ __forceinline__

#define ALL_LANES 0xffffffffu
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

/* Places of a row-major array, which may be more than an int has. */
DEVICE u64 at(int row, int cols, int col) {
    return (u64)row * (u64)cols + (u64)col;
}

/* The number of this thread among all along x. */
DEVICE u64 element(void) {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

DEVICE int is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

DEVICE float f16_to_f32(u16 h) {
    /* Exponent and fraction in their places are 2^-112 times the value: one exact product. */
    float scaled = __fmul_rn(__uint_as_float((u32)(h & 0x7fff) << 13), 0x1p+112f);
    u32 special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return __uint_as_float(__float_as_uint(scaled) | special | (u32)(h & 0x8000) << 16);
}

DEVICE u16 f32_to_f16(float x) {
    u32 bits = __float_as_uint(x);
    u32 magnitude = bits & 0x7fffffffu;
    u32 sign = bits >> 16 & 0x8000u;
    u32 half;
    if (magnitude >= 0x47800000u) {
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        /* Below 2^-14 the adder does the rounding, to a multiple of 2^-24. */
        half = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
    } else {
        half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    }
    return (u16)(half | sign);
}

DEVICE float bf16_to_f32(u16 b) {
    return __uint_as_float((u32)b << 16);
}

DEVICE float round_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return __uint_as_float((bits | 0x00400000u) & 0xffff0000u);
    }
    return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* Formats of the residual stream. */
#define DTYPE_F16 0
#define DTYPE_BF16 1
#define DTYPE_F32 2

DEVICE float round_to(float x, int dtype) {
    if (dtype == DTYPE_F16) {
        return f16_to_f32(f32_to_f16(x));
    }
    return dtype == DTYPE_BF16 ? round_to_bf16(x) : x;
}

/* The end of fold16: lanes 0 to 15 of the warp hold its accumulators, lane 0 gets the sum. All 32
 * threads of the warp take part; what the others hold reaches none that counts. */
DEVICE float fold16(float lane) {
    lane = __fadd_rn(lane, __shfl_down_sync(ALL_LANES, lane, 8, 32));
    lane = __fadd_rn(lane, __shfl_down_sync(ALL_LANES, lane, 4, 32));
    lane = __fadd_rn(lane, __shfl_down_sync(ALL_LANES, lane, 2, 32));
    return __fadd_rn(lane, __shfl_down_sync(ALL_LANES, lane, 1, 32));
}

DEVICE float exponential(float x) {
    float c, t, n, r, p;
    if (x < -87.0f) {
        return 0.0f;
    }
    c = x > 88.0f ? 88.0f : x;
    t = __fmaf_rn(c, 0x1.715476p+0f, 0x1.8p+23f);
    n = __fsub_rn(t, 0x1.8p+23f);
    r = __fmaf_rn(n, -0x1.62e400p-1f, c);
    r = __fmaf_rn(n, -0x1.7f7d1cp-20f, r);
    p = 0x1.6a23d0p-10f;
    p = __fmaf_rn(p, r, 0x1.123a20p-7f);
    p = __fmaf_rn(p, r, 0x1.5558f2p-5f);
    p = __fmaf_rn(p, r, 0x1.555492p-3f);
    p = __fmaf_rn(p, r, 0x1.fffffcp-2f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    /* The integer stands in the low bits of t. */
    return __fmul_rn(p, __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u));
}

/* g / (1 + exp(-x)) */
DEVICE float gated_by(float g, float x) {
    return __fdiv_rn(g, __fadd_rn(1.0f, exponential(__fsub_rn(-0.0f, x))));
}

DEVICE float silu(float g) {
    return gated_by(g, g);
}

DEVICE float gelu(float g) {
    float u = __fmul_rn(__fmaf_rn(__fmul_rn(g, g), 0x1.2444f2p-4f, 0x1.988454p+0f), g);
    return gated_by(g, u);
}

DEVICE float clamped(float g, float u) {
    g = g > 7.0f ? 7.0f : g;
    u = u > 7.0f ? 7.0f : u;
    u = u < -7.0f ? -7.0f : u;
    return __fmul_rn(__fadd_rn(u, 1.0f), gated_by(g, __fmul_rn(g, 0x1.b3b646p+0f)));
}

DEVICE float hyperbolic_tangent(float x) {
    float e = __fadd_rn(exponential(__fadd_rn(x, x)), 1.0f);
    return __fsub_rn(1.0f, __fdiv_rn(2.0f, e));
}

DEVICE float capped(float x, float cap) {
    return __fmul_rn(hyperbolic_tangent(__fdiv_rn(x, cap)), cap);
}
