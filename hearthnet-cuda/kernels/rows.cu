/* Rows: normalisation, quantisation of activations, rotation, gates, sums (sections 3 to 7). */

/* A block per row: y = norm(x, w). y may be x. */
KERNEL rms_norm(const float *x, const float *w, float eps, int cols, float *y) {
    __shared__ float scale;
    u64 row = at(blockIdx.x, cols, 0);
    int i;
    if (threadIdx.x < 32) {
        float lane = 0.0f;
        if (threadIdx.x < 16) {
            for (i = threadIdx.x; i < cols; i += 16) {
                lane = __fmaf_rn(x[row + i], x[row + i], lane);
            }
        }
        lane = fold16(lane);
        if (threadIdx.x == 0) {
            float mean = __fdiv_rn(lane, __int2float_rn(cols));
            scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        }
    }
    __syncthreads();
    for (i = threadIdx.x; i < cols; i += blockDim.x) {
        y[row + i] = __fmul_rn(__fmul_rn(x[row + i], scale), w[i]);
    }
}

/* A warp per 32 activations: quants, their scale, and the sums of the first and the second 16. */
KERNEL quantise(const float *x, int blocks, signed char *quants, float *scales, int *sums) {
    u64 block = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    float y, m;
    u32 magnitude;
    int distance, q, sum;
    if (block >= (u64)blocks) {
        return;
    }
    y = x[32 * block + lane];
    /* Magnitudes compare as their bits do; those of infinities and NaN are the largest. */
    magnitude = __float_as_uint(y) & 0x7fffffffu;
    for (distance = 16; distance > 0; distance /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, magnitude, distance, 32);
        magnitude = other > magnitude ? other : magnitude;
    }
    m = __uint_as_float(magnitude);
    q = 0;
    if (magnitude < 0x7f800000u && m >= 1e-30f) {
        float t = __fmaf_rn(y, __fdiv_rn(127.0f, m), 0x1.8p+23f);
        q = (int)(__float_as_uint(t) - 0x4b400000u);
    }
    sum = q;
    for (distance = 8; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, distance, 32);
    }
    quants[32 * block + lane] = (signed char)q;
    if (lane % 16 == 0) {
        sums[2 * block + lane / 16] = sum;
    }
    if (lane == 0) {
        float scale = m < 1e-30f ? 0.0f : __fdiv_rn(m, 127.0f);
        scales[block] = magnitude < 0x7f800000u ? scale : NOT_A_NUMBER;
    }
}

#define ROPE_INTERLEAVED 0
#define ROPE_HALVES 1

/* A thread per pair, rows along y: turns the heads of a row by the angles of its position. */
KERNEL rope(float *x, const float *cosines, const float *sines, int kind, int heads, int head_dim,
            int pairs, int position) {
    u64 i = element();
    int head = (int)(i / pairs), pair = (int)(i % pairs);
    u64 angle = at(position + (int)blockIdx.y, pairs, pair);
    u64 first, second;
    float a, b, c, s;
    if (i >= (u64)heads * pairs) {
        return;
    }
    first = at(blockIdx.y, heads * head_dim, head * head_dim);
    second = first;
    first += kind == ROPE_HALVES ? pair : 2 * pair;
    second += kind == ROPE_HALVES ? pair + pairs : 2 * pair + 1;
    a = x[first];
    b = x[second];
    c = cosines[angle];
    s = sines[angle];
    x[first] = __fmaf_rn(a, c, -__fmul_rn(b, s));
    x[second] = __fmaf_rn(a, s, __fmul_rn(b, c));
}

#define GATE_SILU 0
#define GATE_GELU 1
#define GATE_CLAMPED 2

/* g = act(g) * u */
KERNEL gate(float *g, const float *u, int kind, int n) {
    u64 i = element();
    if (i >= (u64)n) {
        return;
    }
    if (kind == GATE_CLAMPED) {
        g[i] = clamped(g[i], u[i]);
    } else {
        g[i] = __fmul_rn(kind == GATE_GELU ? gelu(g[i]) : silu(g[i]), u[i]);
    }
}

/* x = round(x + y); y begins again after `cols` values (a bias; else cols is n). */
KERNEL add_round(float *x, const float *y, int dtype, int cols, int n) {
    u64 i = element();
    if (i < (u64)n) {
        x[i] = round_to(__fadd_rn(x[i], y[i % cols]), dtype);
    }
}

/* x = round(x * factor) */
KERNEL multiply(float *x, float factor, int dtype, int n) {
    u64 i = element();
    if (i < (u64)n) {
        x[i] = round_to(__fmul_rn(x[i], factor), dtype);
    }
}

/* x = x / divisor */
KERNEL divide(float *x, float divisor, int n) {
    u64 i = element();
    if (i < (u64)n) {
        x[i] = __fdiv_rn(x[i], divisor);
    }
}

/* x = tanh(x / cap) * cap */
KERNEL softcap(float *x, float cap, int n) {
    u64 i = element();
    if (i < (u64)n) {
        x[i] = capped(x[i], cap);
    }
}

/* sum = fma(x, factor, sum): the output of one expert. */
KERNEL add_scaled(float *sum, const float *x, float factor, int n) {
    u64 i = element();
    if (i < (u64)n) {
        sum[i] = __fmaf_rn(x[i], factor, sum[i]);
    }
}

/* Marks the rows that have an infinity or a NaN. Threads that write the same place write the same. */
KERNEL mark_overflow(const float *x, int cols, int n, int *marks) {
    u64 i = element();
    if (i < (u64)n && !is_finite(x[i])) {
        marks[i / cols] = 1;
    }
}
