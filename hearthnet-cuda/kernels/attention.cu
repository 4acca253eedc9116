/* Keys and values, and attention over them (section 8). A page has 32 positions of one layer and one
 * key/value head, as in the engine (hearthnet-model/src/kernels/kv.rs): keys as [position / 16][head_dim][16],
 * then values as [position][head_dim], all binary16. `table` has the numbers of a sequence's pages among
 * the `pages` of `cells`, [kv_head][`table_pages`]. A number beyond them is read as NaN and not written. */

#define PAGE 32
#define NO_PAGE (~0ull)

/* The first cell of the page that holds a position. */
DEVICE u64 page_at(const int *table, int table_pages, int pages, int kv_head, int position, int head_dim) {
    int page;
    if (position / PAGE >= table_pages) {
        return NO_PAGE;
    }
    page = table[at(kv_head, table_pages, position / PAGE)];
    return page >= 0 && page < pages ? at(page, 2 * PAGE * head_dim, 0) : NO_PAGE;
}

DEVICE u64 key_cell(int position, int head_dim, int i) {
    int slot = position % PAGE;
    return (u64)((slot / 16 * head_dim + i) * 16 + slot % 16);
}

DEVICE u64 value_cell(int position, int head_dim, int i) {
    return (u64)((PAGE + position % PAGE) * head_dim + i);
}

/* A thread per component, rows (positions) along y: rounds keys and values into their pages. */
KERNEL store_kv(const float *keys, const float *values, int kv_heads, int head_dim, int position,
                const int *table, int table_pages, int pages, u16 *cells) {
    u64 i = element();
    int head = (int)(i / head_dim), component = (int)(i % head_dim);
    int p = position + (int)blockIdx.y;
    u64 from = (u64)blockIdx.y * kv_heads * head_dim + i;
    u64 page;
    if (i >= (u64)kv_heads * head_dim) {
        return;
    }
    page = page_at(table, table_pages, pages, head, p, head_dim);
    if (page != NO_PAGE) {
        cells[page + key_cell(p, head_dim, component)] = f32_to_f16(keys[from]);
        cells[page + value_cell(p, head_dim, component)] = f32_to_f16(values[from]);
    }
}

/* The first position that a query at `position` reads. */
DEVICE int first_of(int position, int window) {
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
}

/* A thread per position along x, heads along y, queries along z: scores as [query][head][stride]. */
KERNEL attention_scores(const float *q, int heads, int kv_heads, int head_dim, int position, int window,
                        float scale, float cap, const int *table, int table_pages, int pages,
                        const u16 *cells, int stride, float *scores) {
    u64 t = element();
    int head = blockIdx.y, p = position + (int)blockIdx.z;
    u64 query = at(blockIdx.z, heads, head);
    float score = NOT_A_NUMBER;
    u64 page;
    if (t > (u64)p || t < (u64)first_of(p, window)) {
        return;
    }
    page = page_at(table, table_pages, pages, head / (heads / kv_heads), (int)t, head_dim);
    if (page != NO_PAGE) {
        float acc = 0.0f;
        int i;
        for (i = 0; i < head_dim; i++) {
            float k = f16_to_f32(cells[page + key_cell((int)t, head_dim, i)]);
            acc = __fmaf_rn(k, q[query * head_dim + i], acc);
        }
        score = __fmul_rn(acc, scale);
        if (cap > 0.0f) {
            score = capped(score, cap);
        }
    }
    scores[query * stride + t] = score;
}

#define SOFTMAX_THREADS 256

/* A block per head (x) and query (y): scores become e[t], and `inverse` gets 1 / Z. `sinks` may be null. */
KERNEL attention_softmax(float *scores, int heads, int position, int window, const float *sinks, int stride,
                         float *inverse) {
    __shared__ float highest[SOFTMAX_THREADS];
    int head = blockIdx.x, p = position + (int)blockIdx.y;
    int start = first_of(p, window), limit = p + 1;
    u64 query = at(blockIdx.y, heads, head);
    float *row = scores + query * stride;
    float top = NEGATIVE_INFINITY;
    int t, distance;
    for (t = start + threadIdx.x; t < limit; t += SOFTMAX_THREADS) {
        top = row[t] > top ? row[t] : top;
    }
    highest[threadIdx.x] = top;
    __syncthreads();
    for (distance = SOFTMAX_THREADS / 2; distance > 0; distance /= 2) {
        if ((int)threadIdx.x < distance && highest[threadIdx.x + distance] > highest[threadIdx.x]) {
            highest[threadIdx.x] = highest[threadIdx.x + distance];
        }
        __syncthreads();
    }
    top = highest[0];
    if (sinks && sinks[head] > top) {
        top = sinks[head];
    }
    for (t = start + threadIdx.x; t < limit; t += SOFTMAX_THREADS) {
        row[t] = exponential(__fsub_rn(row[t], top));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float lane = 0.0f;
        if (threadIdx.x < 16) {
            /* A position's lane is that of its number, wherever the window begins. */
            t = start / 16 * 16 + threadIdx.x;
            for (t = t < start ? t + 16 : t; t < limit; t += 16) {
                lane = __fadd_rn(lane, row[t]);
            }
        }
        lane = fold16(lane);
        if (threadIdx.x == 0) {
            if (sinks) {
                lane = __fadd_rn(lane, exponential(__fsub_rn(sinks[head], top)));
            }
            inverse[query] = __fdiv_rn(1.0f, lane);
        }
    }
}

/* A thread per component along x, heads along y, queries along z. */
KERNEL attention_mix(const float *scores, const float *inverse, int heads, int kv_heads, int head_dim,
                     int position, int window, const int *table, int table_pages, int pages,
                     const u16 *cells, int stride, float *out) {
    u64 i = element();
    int head = blockIdx.y, p = position + (int)blockIdx.z;
    u64 query = at(blockIdx.z, heads, head);
    float acc = 0.0f;
    int t;
    if (i >= (u64)head_dim) {
        return;
    }
    for (t = first_of(p, window); t <= p; t++) {
        u64 page = page_at(table, table_pages, pages, head / (heads / kv_heads), t, head_dim);
        float v = NOT_A_NUMBER;
        if (page != NO_PAGE) {
            v = f16_to_f32(cells[page + value_cell(t, head_dim, (int)i)]);
        }
        acc = __fmaf_rn(v, scores[query * stride + t], acc);
    }
    out[query * head_dim + i] = __fmul_rn(acc, inverse[query]);
}

#ifdef __cplusplus
}
#endif
