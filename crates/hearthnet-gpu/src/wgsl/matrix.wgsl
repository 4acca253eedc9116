// Products of two panels of 16 outputs of a quantised matrix with ROWS rows of activations
// (specs/gpu-arithmetic.md, section 7). `weights.wgsl` stands before this text.
// A thread takes OWN blocks of an output of each panel at a time, a workgroup CHUNK.
const OWN: u32 = select(1u, 4u, ROWS == 1u);
const SLOTS: u32 = select(8u, 4u, ROWS == 1u);
const CHUNK: u32 = OWN * SLOTS;

// [row][slot][own block][panel][lane]: factors of the steps. Those of the last step are f32(I) and a
// product of scales. Types with a minimum have a step before it, of the minimum and its factor.
alias Steps = array<vec2<u32>, FIELDS>;
var<workgroup> terms: array<array<array<array<array<Steps, 16>, 2>, OWN>, SLOTS>, ROWS>;
// Not 0 if the thread has seen a marked block of activations.
var<private> seen: u32;

// Writes the terms of a row and an output.
fn term(
    w: Weights, head: vec4<u32>, x: Quants, r: u32, i: u32, panel: u32, t: Thread, careful: bool,
) {
    let halves = sums_of(head);
    var start = -OFFSET * halves;
    if (SIGNED) { start.y += 8 * halves.y; }
    var integer = 0;
    if (SUB < 3u) {
        integer = start.x + start.y;
        if (SIGNED) { integer = dot16(w.q.second, x.second, 16 * integer) >> 4u; }
        else { integer = dot16(w.q.second, x.second, integer); }
        integer = dot16(w.q.first, x.first, integer);
    } else {
        let first = dot16(w.q.first, x.first, start.x);
        let second = dot16(w.q.second, x.second, start.y);
        integer = scaled_halves(first, second, w.sub_scale);
    }
    let scale = t_mul(w.scale, head.x, careful);
    if (FIELDS == 2u) {
        let sum = minimum_factor(w.sub_scale, head, careful);
        terms[r][t.slot][i][panel][t.lane][0] = vec2<u32>(w.minimum, sum);
    }
    terms[r][t.slot][i][panel][t.lane][FIELDS - 1u] = vec2<u32>(f_int(integer), scale);
}
// Writes the terms of block `i` of the thread's.
fn block(i: u32, act: u32, skip: u32, t: Thread, careful: bool) {
    let one = weights_of(i, skip, t, careful);
    let two = weights_of(i, skip + panel_length(), t, careful);
    row(0u, i, act, one, two, t, careful);
    if (ROWS == 4u) {
        row(1u, i, act, one, two, t, careful);
        row(2u, i, act, one, two, t, careful);
        row(3u, i, act, one, two, t, careful);
    }
}
fn row(r: u32, i: u32, act: u32, one: Weights, two: Weights, t: Thread, careful: bool) {
    // Rows beyond the last one repeat it.
    let at = act + 3u * (i + min(r, t.rows) * p.blocks);
    let head = acts[at];
    let x = Quants(acts[at + 1u], acts[at + 2u]);
    term(one, head, x, r, i, 0u, t, careful);
    term(two, head, x, r, i, 1u, t, careful);
    seen |= head.w;
}

// Terms of block k of the chunk for thread l < 32 ROWS, which has output l mod 32 and row l / 32.
fn terms_of(k: u32, l: u32) -> Steps {
    return terms[l >> 5u][k / OWN][k % OWN][(l >> 4u) & 1u][l & 15u];
}
fn step(acc: u32, t: Steps, careful: bool) -> u32 {
    let sum = t_fma(t[0].x, t[0].y, acc, careful);
    if (FIELDS == 1u) { return sum; }
    return t_fma(t[FIELDS - 1u].x, t[FIELDS - 1u].y, sum, careful);
}
fn steps(acc: u32, k: u32, l: u32) -> u32 {
    let a = terms_of(k, l);
    let b = terms_of(k + 1u, l);
    let c = terms_of(k + 2u, l);
    let d = terms_of(k + 3u, l);
    return step(step(step(step(acc, a, false), b, false), c, false), d, false);
}
fn products(l: u32, t: Thread, careful: bool) -> u32 {
    // Blocks that need no operations on the bits.
    let plain = select(0u, p.blocks, UNGUARDED && !careful);
    var acc = 0u;
    var skip = 0u;
    for (var begin = 0u; begin < p.blocks; begin += CHUNK) {
        let act = t.acts + 3u * begin;
        if (UNGUARDED && begin + CHUNK <= plain) {
            block(0u, act, skip, t, false);
            if (OWN == 4u) {
                block(1u, act, skip, t, false);
                block(2u, act, skip, t, false);
                block(3u, act, skip, t, false);
            }
            workgroupBarrier();
            if (l < 32u * ROWS) {
                acc = steps(steps(acc, 0u, l), 4u, l);
                if (CHUNK == 16u) { acc = steps(steps(acc, 8u, l), 12u, l); }
            }
        } else {
            let left = p.blocks - min(begin + OWN * t.slot, p.blocks);
            for (var i = 0u; i < min(OWN, left); i++) { block(i, act, skip, t, careful); }
            workgroupBarrier();
            if (l < 32u * ROWS) {
                for (var k = 0u; k < min(CHUNK, p.blocks - begin); k++) {
                    acc = step(acc, terms_of(k, l), careful);
                }
            }
        }
        skip += CHUNK / RECORD_BLOCKS * RECORD;
        workgroupBarrier();
    }
    return acc;
}

@compute @workgroup_size(16u * SLOTS) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) {
    var first_row = w.y * ROWS;
    var panel = p.panel + 2u * w.x;
    if (PAIRED) {
        panel += pairs[2u * w.y + 1u];
        first_row = pairs[2u * w.y];
        if (panel >= p.panels) { return; }
    }
    prepare(l, 16u * SLOTS);
    let lane = l & 15u;
    let slot = (l >> 4u) % SLOTS;
    let act = 3u * (first_row * p.blocks + OWN * slot);
    let thread = thread_of(panel, lane, slot, act, p.rows - 1u - first_row);
    var careful = CAREFUL;
    var acc = 0u;
    loop {
        acc = products(l, thread, careful);
        if (!UNGUARDED || careful) { break; }
        // Chains with small scales again, on the bits. The first term serves as a flag.
        if (l == 0u) { terms[0][0][0][0][0][0].x = 0u; }
        workgroupBarrier();
        if (seen != 0u) { terms[0][0][0][0][0][0].x = 1u; }
        careful = workgroupUniformLoad(&terms[0][0][0][0][0][0]).x != 0u;
        if (!careful) { break; }
    }
    let column = w.x * 32u + (l & 31u);
    var row = first_row + (l >> 5u);
    if (l < 32u * ROWS && row < p.rows && column < p.outputs) {
        if (PAIRED) { row = w.y; }
        out[p.out + row * p.out_stride + p.column + column] = acc;
    }
}
