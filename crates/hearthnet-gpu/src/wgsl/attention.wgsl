// Attention of rows over their pages (specs/canonical-arithmetic.md, section 8), in three kernels.
// `scores` has for each row and head `positions` words and one more, which `softmax` sets to 1 / Z.
struct Params {
    heads: u32, kv_heads: u32, head_dim: u32,
    q: u32, q_stride: u32,
    out: u32, out_stride: u32,
    info: u32,
    positions: u32,
    // Latest positions that a row attends to; 0: all.
    window: u32,
    scale: u32,
    // 0: none.
    softcap: u32,
    sinks: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> rows: array<u32>;
@group(0) @binding(2) var<storage, read> pages: array<u32>;
@group(0) @binding(3) var<storage, read> tables: array<u32>;
// Per row: position, first entry in `tables`, end of the visible positions or 0 for position + 1.
@group(0) @binding(4) var<storage, read> info: array<u32>;
@group(0) @binding(5) var<storage, read_write> scores: array<u32>;
@group(0) @binding(6) var<storage, read> sinks: array<u32>;

fn position_of(row: u32) -> u32 { return info[p.info + 4u * row]; }
fn first_of(row: u32) -> u32 {
    let end = position_of(row) + 1u;
    return select(0u, end - min(end, p.window), p.window != 0u);
}
fn end_of(row: u32) -> u32 {
    let end = info[p.info + 4u * row + 2u];
    return select(end, position_of(row) + 1u, end == 0u);
}
fn page_of(row: u32, head: u32, t: u32) -> u32 {
    let page = tables[info[p.info + 4u * row + 1u] + (t >> 5u)];
    return (page * p.kv_heads + head / (p.heads / p.kv_heads)) * 32u * p.head_dim;
}
fn scores_of(row: u32, head: u32) -> u32 { return (row * p.heads + head) * (p.positions + 1u); }

// A thread per position.
@compute @workgroup_size(64) fn score(@builtin(global_invocation_id) g: vec3<u32>) {
    let t = g.x;
    if (t < first_of(g.z) || t >= end_of(g.z)) { return; }
    let page = page_of(g.z, g.y, t);
    let q = p.q + g.z * p.q_stride + g.y * p.head_dim;
    var acc = 0u;
    for (var i = 0u; i < p.head_dim; i++) {
        let pair = pages[page + key_word(t & 31u, i >> 1u)];
        acc = f_fma(f16_widen((pair >> (16u * (i & 1u))) & 0xffffu), rows[q + i], acc);
    }
    var s = soft_mul(acc, p.scale);
    if (p.softcap != 0u) { s = f_softcap(s, p.softcap); }
    scores[scores_of(g.z, g.y) + t] = s;
}

var<workgroup> tops: array<i32, 64>;
var<workgroup> lanes: array<u32, 16>;

// A workgroup per head and row.
@compute @workgroup_size(64) fn softmax(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) j: u32,
) {
    let at = scores_of(w.y, w.x);
    let first = first_of(w.y);
    let end = end_of(w.y);
    // Key of -infinity.
    var top = -0x7f800000;
    for (var t = first + j; t < end; t += 64u) {
        let s = scores[at + t];
        if (!is_nan(s)) { top = max(top, f_key(s)); }
    }
    tops[j] = top;
    workgroupBarrier();
    for (var d = 32u; d > 0u; d = d >> 1u) {
        if (j < d) { tops[j] = max(tops[j], tops[j + d]); }
        workgroupBarrier();
    }
    top = tops[0];
    if (p.sinks != 0u) { top = max(top, f_key(sinks[w.x])); }
    let less = select(u32(top) | SIGN, u32(-top), top < 0);
    for (var t = first + j; t < end; t += 64u) { scores[at + t] = f_exp(f_add(scores[at + t], less)); }
    storageBarrier();
    workgroupBarrier();
    if (j < 16u) {
        var lane = 0u;
        for (var t = first + ((j - first) & 15u); t < end; t += 16u) { lane = f_add(scores[at + t], lane); }
        lanes[j] = lane;
    }
    workgroupBarrier();
    for (var d = 8u; d > 0u; d = d >> 1u) {
        if (j < d) { lanes[j] = f_add(lanes[j], lanes[j + d]); }
        workgroupBarrier();
    }
    if (j == 0u) {
        var z = lanes[0];
        if (p.sinks != 0u) { z = f_add(z, f_exp(f_add(sinks[w.x], less))); }
        scores[at + p.positions] = soft_div(ONE, z);
    }
}

// Values of sixteen positions, 64 pairs of components each.
var<workgroup> staged: array<u32, 1024>;

// A workgroup per 128 components of a head and row. All threads fetch values, 64 threads add them.
@compute @workgroup_size(128) fn mix(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) {
    let at = scores_of(w.z, w.y);
    let first = first_of(w.z);
    let end = end_of(w.z);
    let pairs = p.head_dim >> 1u;
    let pair = w.x * 64u + (l & 63u);
    var acc = vec2<u32>(0u, 0u);
    // A chunk of sixteen positions lies in one page.
    for (var begin = first & ~15u; begin < end; begin += 16u) {
        let page = page_of(w.z, w.y, begin);
        for (var k = l >> 6u; k < 16u; k += 2u) {
            if (pair < pairs) {
                staged[k * 64u + (l & 63u)] = pages[page + value_word(p.head_dim, (begin & 31u) + k, pair)];
            }
        }
        workgroupBarrier();
        if (l < 64u && pair < pairs) {
            for (var t = max(begin, first); t < min(begin + 16u, end); t++) {
                let e = scores[at + t];
                let values = staged[(t - begin) * 64u + l];
                acc.x = f_fma(f16_widen(values & 0xffffu), e, acc.x);
                acc.y = f_fma(f16_widen(values >> 16u), e, acc.y);
            }
        }
        workgroupBarrier();
    }
    if (l < 64u && pair < pairs) {
        let inverse = scores[at + p.positions];
        let to = p.out + w.z * p.out_stride + w.y * p.head_dim + 2u * pair;
        rows[to] = soft_mul(acc.x, inverse);
        rows[to + 1u] = soft_mul(acc.y, inverse);
    }
}
