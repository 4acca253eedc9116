// Products of two panels of 16 outputs of a quantised matrix with ROWS rows of activations
// (specs/gpu-arithmetic.md, sections 5 and 7). The constants of the weight type stand before this
// text.
struct Params {
    rows: u32,
    // Blocks of 32 inputs.
    blocks: u32,
    outputs: u32,
    // First panel in the buffer, and its first column in `out`.
    panel: u32, column: u32,
    // Panels in the buffer. Pairs with another panel are those of another buffer.
    panels: u32,
    out: u32, out_stride: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> acts: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read> pairs: array<u32>;
// The same memory as `weights`.
@group(0) @binding(5) var<storage, read> words: array<u32>;

// Blocks of a record, which may share their fields, and half words of an output's fields in it.
const RECORD_BLOCKS: u32 = select(4u, 8u, SHARED);
const FIELD_HALVES: u32 = select(4u * FIELDS, FIELDS, SHARED);
// Lengths in vec4: of what lies before the quants, of the quants of a block, of a record.
const QUANTS: u32 = 2u * FIELD_HALVES + RECORD_BLOCKS * SUB_BYTES;
const BLOCK: u32 = 4u * BITS;
const RECORD: u32 = QUANTS + RECORD_BLOCKS * BLOCK;
// A thread takes OWN blocks of an output of each panel at a time, a workgroup CHUNK.
const OWN: u32 = select(1u, 4u, ROWS == 1u);
const SLOTS: u32 = select(8u, 4u, ROWS == 1u);
const CHUNK: u32 = OWN * SLOTS;
// Slots that share a record.
const UNITS: u32 = RECORD_BLOCKS / OWN;

// Quants of a block: words of four signed bytes.
struct Quants { first: vec4<u32>, second: vec4<u32> }

fn bytes(x: u32) -> vec4<u32> { return vec4<u32>(x * 0x01010101u); }
// Quants of an output: its 16 bytes are at `at`. Runs of single words begin with word `rest`.
fn quants(at: u32, rest: u32) -> Quants {
    if (BITS == 8u) { return Quants(weights[at], weights[at + 16u]); }
    if (BITS == 2u || BITS == 3u) {
        let by = vec4<u32>(0u, 2u, 4u, 6u);
        var q = Quants(
            (vec4<u32>(words[rest]) >> by) & bytes(3u),
            (vec4<u32>(words[rest + 16u]) >> by) & bytes(3u),
        );
        if (BITS == 3u) {
            let high = vec4<u32>(words[rest + 32u]);
            let left = high << vec4<u32>(2u, 1u, 0u, 0u);
            q.first |= (left >> vec4<u32>(0u, 0u, 0u, 1u)) & bytes(4u);
            q.second |= (high >> vec4<u32>(2u, 3u, 4u, 5u)) & bytes(4u);
        }
        return q;
    }
    let both = weights[at];
    if (SIGNED) { return Quants(both & bytes(15u), both & bytes(0xf0u)); }
    var q = Quants(both & bytes(15u), (both >> vec4<u32>(4u)) & bytes(15u));
    if (BITS == 5u) {
        let high = vec4<u32>(words[rest]);
        q.first |= (high << vec4<u32>(4u, 3u, 2u, 1u)) & bytes(16u);
        q.second |= (high >> vec4<u32>(0u, 1u, 2u, 3u)) & bytes(16u);
    }
    if (BITS == 6u) {
        let left = vec4<u32>(4u, 2u, 0u, 0u);
        let right = vec4<u32>(0u, 0u, 0u, 2u);
        q.first |= ((vec4<u32>(words[rest]) << left) >> right) & bytes(48u);
        q.second |= ((vec4<u32>(words[rest + 16u]) << left) >> right) & bytes(48u);
    }
    if (HAS_TABLE) { return Quants(look_up4(q.first), look_up4(q.second)); }
    return q;
}
// Bytes of a table at the indices in the bytes of q.
fn look_up(q: u32) -> u32 {
    let low = select(TABLE[0], TABLE[1], (q & 4u) != 0u);
    let high = select(TABLE[2], TABLE[3], (q & 4u) != 0u);
    return (select(low, high, (q & 8u) != 0u) >> (8u * (q & 3u))) & 0xffu;
}
fn look_up_word(q: u32) -> u32 {
    return look_up(q & 15u) | (look_up((q >> 8u) & 15u) << 8u) | (look_up((q >> 16u) & 15u) << 16u)
        | (look_up((q >> 24u) & 15u) << 24u);
}
fn look_up4(q: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(look_up_word(q.x), look_up_word(q.y), look_up_word(q.z), look_up_word(q.w));
}
fn dot16(q: vec4<u32>, x: vec4<u32>, sum: i32) -> i32 {
    return sum + dot4I8Packed(q.x, x.x) + dot4I8Packed(q.y, x.y) + dot4I8Packed(q.z, x.z)
        + dot4I8Packed(q.w, x.w);
}
fn signed_byte(bits: u32) -> i32 { return bitcast<i32>(bits << 24u) >> 24u; }

// [row][slot][own block][panel][lane]: factors of the steps. Those of the last step are f32(I) and a
// product of scales. Types with a minimum have a step before it, of the minimum and its factor.
alias Steps = array<vec2<u32>, FIELDS>;
var<workgroup> terms: array<array<array<array<array<Steps, 16>, 2>, OWN>, SLOTS>, ROWS>;
// Not 0 if the thread has seen a marked block of activations.
var<private> seen: u32;

struct Thread {
    lane: u32, slot: u32,
    // Activations of the first own block, and rows after the first one.
    acts: u32, rows: u32,
    // In the first chunk: words of the own fields, and of the own sub-scales, which begin at bit
    // `shift`; own quants, and their words in `words`.
    fields: u32, sub_scales: u32, shift: u32, quants: u32, rest: u32,
}
// Weights of a block and an output.
struct Weights { q: Quants, scale: u32, minimum: u32, sub_scale: u32 }

// Half word `i` of those from word `at` on.
fn field(at: u32, i: u32, careful: bool) -> u32 {
    let high = words[at + i / 2u] << (16u - 16u * (i % 2u));
    if (BF16_FIELDS) { return high & 0xffff0000u; }
    return t_widen(high, careful);
}
// Of block `i` of the thread's; `skip` from that of the first chunk and panel.
fn weights_of(i: u32, skip: u32, t: Thread, careful: bool) -> Weights {
    var first = i * FIELDS;
    if (SHARED) { first = select(0u, t.lane & 1u, FIELDS == 1u); }
    else if (OWN == 1u) { first = t.slot % UNITS * FIELDS; }
    let d = field(4u * skip + t.fields, first, careful);
    var scale = d;
    var minimum = 0u;
    if (FIELDS == 2u) { minimum = field(4u * skip + t.fields, first + 1u, careful); }
    var sub_scale = 0u;
    if (SUB_BYTES != 0u) {
        let at = i * SUB_BYTES;
        sub_scale = words[4u * skip + t.sub_scales + at / 4u] >> (8u * (at % 4u) + t.shift);
    }
    if (SUB == 1u) { scale = t_scaled(d, signed_byte(sub_scale), careful); }
    if (SUB == 2u) {
        scale = t_scaled(d, i32(sub_scale & 0xffu), careful);
        minimum = t_scaled(minimum, i32((sub_scale >> 8u) & 0xffu), careful);
    }
    let q = quants(skip + t.quants + i * BLOCK, 4u * (skip + i * BLOCK) + t.rest);
    return Weights(q, scale, minimum, sub_scale);
}
// Writes the terms of a row and an output.
fn term(
    w: Weights, head: vec4<u32>, x: Quants, r: u32, i: u32, panel: u32, t: Thread, careful: bool,
) {
    let halves = vec2<i32>(bitcast<i32>(head.z << 16u) >> 16u, bitcast<i32>(head.z) >> 16u);
    var start = -OFFSET * halves;
    if (SIGNED) { start.y += 8 * halves.y; }
    var integer = 0;
    var sum = head.y;
    if (SUB < 3u) {
        integer = start.x + start.y;
        if (SIGNED) { integer = dot16(w.q.second, x.second, 16 * integer) >> 4u; }
        else { integer = dot16(w.q.second, x.second, integer); }
        integer = dot16(w.q.first, x.first, integer);
    } else {
        let first = dot16(w.q.first, x.first, start.x);
        let second = dot16(w.q.second, x.second, start.y);
        var by = vec2<i32>(signed_byte(w.sub_scale), signed_byte(w.sub_scale >> 8u));
        if (SUB == 4u) {
            let four = (vec4<i32>(i32(w.sub_scale)) >> vec4<u32>(0u, 8u, 4u, 12u)) & vec4<i32>(15);
            by = four.xy;
            sum = t_mul(head.x, f_int(halves.x * four.z + halves.y * four.w), careful);
        }
        integer = first * by.x + second * by.y;
    }
    let scale = t_mul(w.scale, head.x, careful);
    if (FIELDS == 2u) { terms[r][t.slot][i][panel][t.lane][0] = vec2<u32>(w.minimum, sum); }
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
fn panel_length() -> u32 { return (p.blocks + RECORD_BLOCKS - 1u) / RECORD_BLOCKS * RECORD; }

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
    let lane = l & 15u;
    let slot = (l >> 4u) % SLOTS;
    let record = panel * panel_length() + slot / UNITS * RECORD;
    let own = slot % UNITS * OWN;
    let fields = 4u * record + lane * FIELD_HALVES / 2u;
    let sub_byte = (lane * RECORD_BLOCKS + own) * SUB_BYTES;
    let sub_scales = 4u * record + 8u * FIELD_HALVES + sub_byte / 4u;
    let shift = select(sub_byte % 4u * 8u, 0u, OWN == 4u);
    let first = record + QUANTS + own * BLOCK;
    let rest = 4u * (first + BITS / 4u * 16u) + lane;
    let act = 3u * (first_row * p.blocks + OWN * slot);
    let thread = Thread(
        lane, slot, act, p.rows - 1u - first_row, fields, sub_scales, shift, first + lane, rest,
    );
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
