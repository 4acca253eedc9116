/* Matrices (section 6), from the panels of 16 outputs in which the engine keeps weights in memory
 * (hearthnet-model/src/kernels/pack.rs), as they are. */

/* Weight types with quantised activations. The places of their names in `MatrixKernels`. */
#define TYPE_Q8_0 0
#define TYPE_Q6_K 1
#define TYPE_Q5_1 2
#define TYPE_Q5_K 3
#define TYPE_Q5_0 4
#define TYPE_Q4_1 5
#define TYPE_Q4_K 6
#define TYPE_Q4_0 7
#define TYPE_IQ4_NL 8
#define TYPE_IQ4_XS 9
#define TYPE_MXFP4 10
#define TYPE_Q3_K 11
#define TYPE_Q2_K 12
/* And with plain ones. */
#define TYPE_F32 13
#define TYPE_F16 14
#define TYPE_BF16 15

/* What each 32 weights have of their own beside their quants. */
#define STEP_NONE 0
#define STEP_SCALE 1
#define STEP_SCALE_MIN 2
#define STEP_HALVES 3
#define STEP_HALVES_MIN 4

static __device__ __constant__ const signed char NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                  1, 13, 25, 38, 53, 69, 89, 113};
static __device__ __constant__ const signed char E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

/* `type` is a constant wherever these are called, so that they are, too. */
DEVICE int blocks_of(int type) {
    switch (type) {
    case TYPE_Q2_K: case TYPE_Q3_K: case TYPE_Q4_K: case TYPE_Q5_K: case TYPE_Q6_K: case TYPE_IQ4_XS:
        return 8;
    default:
        return 1;
    }
}

DEVICE int bits_of(int type) {
    switch (type) {
    case TYPE_Q8_0: return 8;
    case TYPE_Q6_K: return 6;
    case TYPE_Q5_0: case TYPE_Q5_1: case TYPE_Q5_K: return 5;
    case TYPE_Q3_K: return 3;
    case TYPE_Q2_K: return 2;
    default: return 4;
    }
}

DEVICE int step_of(int type) {
    switch (type) {
    case TYPE_IQ4_XS: return STEP_SCALE;
    case TYPE_Q4_K: case TYPE_Q5_K: return STEP_SCALE_MIN;
    case TYPE_Q3_K: case TYPE_Q6_K: return STEP_HALVES;
    case TYPE_Q2_K: return STEP_HALVES_MIN;
    default: return STEP_NONE;
    }
}

DEVICE int has_minimum(int type) {
    return type == TYPE_Q4_1 || type == TYPE_Q5_1 || type == TYPE_Q4_K || type == TYPE_Q5_K || type == TYPE_Q2_K;
}

DEVICE int offset_of(int type) {
    switch (type) {
    case TYPE_Q4_0: return 8;
    case TYPE_Q5_0: return 16;
    case TYPE_Q6_K: return 32;
    case TYPE_Q3_K: return 4;
    default: return 0;
    }
}

/* Bytes of the steps of a row. */
DEVICE int step_bytes(int type) {
    return step_of(type) == STEP_NONE ? 0 : step_of(type) == STEP_SCALE ? 1 : 2;
}

/* Bytes of the fields, of 32 weights, and of a record; of 16 rows. */
DEVICE int head_bytes(int type) {
    return has_minimum(type) ? 64 : 32;
}

DEVICE int block_bytes(int type) {
    return 16 * (step_bytes(type) + 4 * bits_of(type));
}

DEVICE int record_bytes(int type) {
    return head_bytes(type) + blocks_of(type) * block_bytes(type);
}

/* A field of row `lane`: 0 the scale, 1 the minimum. */
DEVICE float field(int type, const u8 *record, int number, int lane) {
    u16 bits = ((const u16 *)record)[16 * number + lane];
    return type == TYPE_MXFP4 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

/* The four quants of group `g` (inputs 4 g to 4 g + 3) of row `lane`, a byte each. */
DEVICE u32 quants_of(int type, const u32 *runs, int lane, int g) {
    u32 low = 0;
    switch (bits_of(type)) {
    case 8:
        return runs[16 * g + lane];
    case 4: case 5: case 6:
        low = runs[16 * (g % 4) + lane] >> 4 * (g / 4) & 0x0f0f0f0fu;
        break;
    default:
        low = runs[16 * (g / 4) + lane] >> 2 * (g % 4) & 0x03030303u;
    }
    switch (bits_of(type)) {
    case 3: return low | (runs[16 * 2 + lane] >> g & 0x01010101u) << 2;
    case 5: return low | (runs[16 * 4 + lane] >> g & 0x01010101u) << 4;
    case 6: return low | (runs[16 * (4 + g / 4) + lane] >> 2 * (g % 4) & 0x03030303u) << 4;
    default: return low;
    }
}

DEVICE u32 looked_up(const signed char *table, u32 places) {
    u32 i, weights = 0;
    for (i = 0; i < 32; i += 8) {
        weights |= (u32)(u8)table[places >> i & 15] << i;
    }
    return weights;
}

/* The same as integer weights, signed bytes. */
DEVICE u32 weights_of(int type, const u32 *runs, int lane, int g) {
    u32 quants = quants_of(type, runs, lane, g);
    switch (type) {
    case TYPE_IQ4_NL: case TYPE_IQ4_XS:
        return looked_up(NON_LINEAR, quants);
    case TYPE_MXFP4:
        return looked_up(E2M1, quants);
    case TYPE_Q8_0:
        return quants ^ 0x80808080u;
    default:
        /* With the high bit set no byte borrows from its neighbour. */
        return ((quants | 0x80808080u) - 0x01010101u * (u32)offset_of(type)) ^ 0x80808080u;
    }
}

/* What 32 weights and 32 activations give to the accumulator, in one or two steps. */
typedef struct {
    float integer, scale;
    float minimum, sum;
} Term;

DEVICE float accumulate(int type, Term term, float acc) {
    if (has_minimum(type)) {
        acc = __fmaf_rn(term.minimum, term.sum, acc);
    }
    return __fmaf_rn(term.integer, term.scale, acc);
}

/* Of row `lane`: `dots` are the sums of w[j] q[j] of the first and the second 16, `d` and `sums` those
 * of the activations. Integers are exact, so nothing hangs on where they were added. */
DEVICE Term term_of(int type, const u8 *record, const u8 *steps, int lane, const int *dots, float d, const int *sums) {
    float scale = field(type, record, 0, lane);
    const u8 *own = steps + lane * step_bytes(type);
    int integer = dots[0] + dots[1];
    Term term = {0.0f, 0.0f, 0.0f, 0.0f};
    switch (step_of(type)) {
    case STEP_SCALE:
        scale = __fmul_rn(scale, __int2float_rn((signed char)own[0]));
        break;
    case STEP_SCALE_MIN:
        scale = __fmul_rn(scale, __int2float_rn(own[0]));
        break;
    case STEP_HALVES:
        integer = (signed char)own[0] * dots[0] + (signed char)own[1] * dots[1];
        break;
    case STEP_HALVES_MIN:
        integer = (own[0] & 15) * dots[0] + (own[1] & 15) * dots[1];
        break;
    }
    term.integer = __int2float_rn(integer);
    term.scale = __fmul_rn(scale, d);
    if (has_minimum(type)) {
        int sum = sums[0] + sums[1];
        term.minimum = field(type, record, 1, lane);
        if (step_of(type) == STEP_SCALE_MIN) {
            term.minimum = -__fmul_rn(term.minimum, __int2float_rn(own[1]));
        } else if (step_of(type) == STEP_HALVES_MIN) {
            sum = (own[0] >> 4) * sums[0] + (own[1] >> 4) * sums[1];
            term.minimum = -term.minimum;
        }
        term.sum = __fmul_rn(d, __int2float_rn(sum));
    }
    return term;
}

/* Blocks of activations whose terms stand in shared memory together. */
#define CHUNK 32

/* A block per panel, rows of activations along y. A warp takes every eighth block of 32 inputs: its
 * threads 0 to 15 an output's first 16 inputs, the others the second 16. Then threads 0 to 15 of the
 * whole block add the terms of an output each, in ascending order. */
DEVICE void matvec(int type, const u8 *weights, const signed char *quants, const float *scales, const int *sums,
                   int blocks, int outputs, float *out) {
    __shared__ Term terms[CHUNK][16];
    const u8 *panel = weights + (u64)blockIdx.x * (u64)(blocks / blocks_of(type)) * (u64)record_bytes(type);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int lane = threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    int output = 16 * blockIdx.x + lane;
    int begin, b;
    float acc = 0.0f;
    for (begin = 0; begin < blocks; begin += CHUNK) {
        int end = begin + CHUNK < blocks ? begin + CHUNK : blocks;
        for (b = begin + warp; b < end; b += warps) {
            const u8 *record = panel + (u64)(b / blocks_of(type)) * (u64)record_bytes(type);
            const u8 *steps = record + head_bytes(type) + b % blocks_of(type) * block_bytes(type);
            const u32 *runs = (const u32 *)(steps + 16 * step_bytes(type));
            u64 activations = at(blockIdx.y, blocks, b);
            const u32 *q = (const u32 *)(quants + 32 * activations);
            int dot = 0, other, g;
            for (g = 4 * half; g < 4 * half + 4; g++) {
                dot = __dp4a((int)weights_of(type, runs, lane, g), (int)q[g], dot);
            }
            other = __shfl_xor_sync(ALL_LANES, dot, 16, 32);
            if (half == 0) {
                int dots[2];
                dots[0] = dot;
                dots[1] = other;
                terms[b - begin][lane] =
                    term_of(type, record, steps, lane, dots, scales[activations], sums + 2 * activations);
            }
        }
        __syncthreads();
        if (threadIdx.x < 16) {
            for (b = 0; b < end - begin; b++) {
                acc = accumulate(type, terms[b][lane], acc);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 16 && output < outputs) {
        out[at(blockIdx.y, outputs, output)] = acc;
    }
}

#ifdef __CUDACC__
/* c += a b of 8 x 16 and 16 x 8 signed bytes; who holds what: PTX ISA, "Matrix Fragments for
 * mma.m8n8k16". */
DEVICE void mma_m8n8k16(int *c, u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a), "r"(b));
}
#endif

/* A warp per 8 outputs and 8 rows of activations; the warps of a block take neighbouring rows. The
 * tensor cores give the integers of 16 inputs; the thread that holds an output's adds its terms. */
DEVICE void matmul(int type, const u8 *weights, const signed char *quants, const float *scales, const int *sums,
                   int blocks, int outputs, int rows, float *out) {
    const u8 *panel = weights + (u64)(blockIdx.x / 2) * (u64)(blocks / blocks_of(type)) * (u64)record_bytes(type);
    int first = 8 * (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32);
    int group = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
    int lane = 8 * (blockIdx.x % 2) + group;
    int output = 8 * blockIdx.x + group;
    float acc[2] = {0.0f, 0.0f};
    int b, i, half;
    for (b = 0; b < blocks; b++) {
        const u8 *record = panel + (u64)(b / blocks_of(type)) * (u64)record_bytes(type);
        const u8 *steps = record + head_bytes(type) + b % blocks_of(type) * block_bytes(type);
        const u32 *runs = (const u32 *)(steps + 16 * step_bytes(type));
        int integers[2][2] = {{0, 0}, {0, 0}};
        for (half = 0; half < 2; half++) {
            u32 q = 0;
            if (first + group < rows) {
                q = ((const u32 *)(quants + 32 * at(first + group, blocks, b)))[4 * half + place];
            }
            mma_m8n8k16(integers[half], weights_of(type, runs, lane, 4 * half + place), q);
        }
        for (i = 0; i < 2; i++) {
            int row = first + 2 * place + i;
            if (row < rows) {
                u64 activations = at(row, blocks, b);
                int dots[2];
                dots[0] = integers[0][i];
                dots[1] = integers[1][i];
                acc[i] = accumulate(
                    type, term_of(type, record, steps, lane, dots, scales[activations], sums + 2 * activations), acc[i]);
            }
        }
    }
    for (i = 0; i < 2; i++) {
        int row = first + 2 * place + i;
        if (row < rows && output < outputs) {
            out[at(row, outputs, output)] = acc[i];
        }
    }
}

DEVICE float plain_weight(int type, const u8 *panel, int input, int lane) {
    u64 place = at(input, 16, lane);
    if (type == TYPE_F32) {
        return ((const float *)panel)[place];
    }
    return type == TYPE_F16 ? f16_to_f32(((const u16 *)panel)[place]) : bf16_to_f32(((const u16 *)panel)[place]);
}

/* A thread per output, rows of activations along y. */
DEVICE void plain(int type, const u8 *weights, const float *x, int cols, int outputs, float *out) {
    u64 output = element();
    const u8 *panel = weights + output / 16 * (u64)cols * (type == TYPE_F32 ? 64 : 32);
    float acc = 0.0f;
    int k;
    if (output >= (u64)outputs) {
        return;
    }
    for (k = 0; k < cols; k++) {
        acc = __fmaf_rn(plain_weight(type, panel, k, (int)(output % 16)), x[at(blockIdx.y, cols, k)], acc);
    }
    out[at(blockIdx.y, outputs, (int)output)] = acc;
}

/* A thread per value, tokens along y: rows of the embedding matrix. A token that the matrix does not have
 * gives NaN. */
DEVICE void embed(int type, const u8 *weights, const int *tokens, int vocabulary, int cols, float *out) {
    u64 col = element();
    int token = tokens[blockIdx.y];
    int lane = token % 16;
    float value = NOT_A_NUMBER;
    if (col >= (u64)cols) {
        return;
    }
    if (token >= 0 && token < vocabulary) {
        if (type >= TYPE_F32) {
            u64 bytes = (u64)cols * (type == TYPE_F32 ? 64 : 32);
            value = plain_weight(type, weights + (u64)(token / 16) * bytes, (int)col, lane);
        } else {
            int b = (int)(col / 32), input = (int)(col % 32);
            u64 records = (u64)(cols / 32 / blocks_of(type));
            const u8 *record = weights + ((u64)(token / 16) * records + b / blocks_of(type)) * (u64)record_bytes(type);
            const u8 *steps = record + head_bytes(type) + b % blocks_of(type) * block_bytes(type);
            const u8 *own = steps + lane * step_bytes(type);
            u32 four = weights_of(type, (const u32 *)(steps + 16 * step_bytes(type)), lane, input / 4);
            int half = input / 16;
            float scale = field(type, record, 0, lane), minimum = 0.0f;
            if (has_minimum(type)) {
                minimum = field(type, record, 1, lane);
            }
            switch (step_of(type)) {
            case STEP_SCALE:
                scale = __fmul_rn(scale, __int2float_rn((signed char)own[0]));
                break;
            case STEP_SCALE_MIN:
                scale = __fmul_rn(scale, __int2float_rn(own[0]));
                minimum = -__fmul_rn(minimum, __int2float_rn(own[1]));
                break;
            case STEP_HALVES:
                scale = __fmul_rn(scale, __int2float_rn((signed char)own[half]));
                break;
            case STEP_HALVES_MIN:
                scale = __fmul_rn(scale, __int2float_rn(own[half] & 15));
                minimum = -__fmul_rn(minimum, __int2float_rn(own[half] >> 4));
                break;
            }
            value = __fmul_rn(scale, __int2float_rn((signed char)(four >> 8 * (input % 4))));
            if (has_minimum(type)) {
                value = __fadd_rn(value, minimum);
            }
        }
    }
    out[at(blockIdx.y, cols, (int)col)] = value;
}

#define QUANTISED_KERNELS(TYPE)                                                                                  \
    KERNEL matvec_##TYPE(const u8 *weights, const signed char *quants, const float *scales, const int *sums,     \
                         int blocks, int outputs, float *out) {                                                  \
        matvec(TYPE_##TYPE, weights, quants, scales, sums, blocks, outputs, out);                                \
    }                                                                                                            \
    KERNEL matmul_##TYPE(const u8 *weights, const signed char *quants, const float *scales, const int *sums,     \
                         int blocks, int outputs, int rows, float *out) {                                        \
        matmul(TYPE_##TYPE, weights, quants, scales, sums, blocks, outputs, rows, out);                          \
    }

#define PLAIN_KERNELS(TYPE)                                                                                      \
    KERNEL plain_##TYPE(const u8 *weights, const float *x, int cols, int outputs, float *out) {                  \
        plain(TYPE_##TYPE, weights, x, cols, outputs, out);                                                      \
    }

#define EMBED_KERNEL(TYPE)                                                                                       \
    KERNEL embed_##TYPE(const u8 *weights, const int *tokens, int vocabulary, int cols, float *out) {            \
        embed(TYPE_##TYPE, weights, tokens, vocabulary, cols, out);                                              \
    }

QUANTISED_KERNELS(Q8_0)
QUANTISED_KERNELS(Q6_K)
QUANTISED_KERNELS(Q5_1)
QUANTISED_KERNELS(Q5_K)
QUANTISED_KERNELS(Q5_0)
QUANTISED_KERNELS(Q4_1)
QUANTISED_KERNELS(Q4_K)
QUANTISED_KERNELS(Q4_0)
QUANTISED_KERNELS(IQ4_NL)
QUANTISED_KERNELS(IQ4_XS)
QUANTISED_KERNELS(MXFP4)
QUANTISED_KERNELS(Q3_K)
QUANTISED_KERNELS(Q2_K)
PLAIN_KERNELS(F32)
PLAIN_KERNELS(F16)
PLAIN_KERNELS(BF16)
EMBED_KERNEL(Q8_0)
EMBED_KERNEL(Q6_K)
EMBED_KERNEL(Q5_1)
EMBED_KERNEL(Q5_K)
EMBED_KERNEL(Q5_0)
EMBED_KERNEL(Q4_1)
EMBED_KERNEL(Q4_K)
EMBED_KERNEL(Q4_0)
EMBED_KERNEL(IQ4_NL)
EMBED_KERNEL(IQ4_XS)
EMBED_KERNEL(MXFP4)
EMBED_KERNEL(Q3_K)
EMBED_KERNEL(Q2_K)
EMBED_KERNEL(F32)
EMBED_KERNEL(F16)
EMBED_KERNEL(BF16)
