// Quantised weights on the card (specs/gpu-arithmetic.md, section 5), for the kernels of products. The
// constants of the weight type stand before this text. A kernel defines OWN: the blocks of an output
// that a thread takes at a time.
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
    if (HAS_TABLE) { return decoded(both); }
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
    return q;
}
fn dot16(q: vec4<u32>, x: vec4<u32>, sum: i32) -> i32 {
    return sum + dot4I8Packed(q.x, x.x) + dot4I8Packed(q.y, x.y) + dot4I8Packed(q.z, x.z)
        + dot4I8Packed(q.w, x.w);
}
fn signed_byte(bits: u32) -> i32 { return bitcast<i32>(bits << 24u) >> 24u; }

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
fn panel_length() -> u32 { return (p.blocks + RECORD_BLOCKS - 1u) / RECORD_BLOCKS * RECORD; }
// The blocks of slot `slot` of an output.
fn thread_of(panel: u32, lane: u32, slot: u32, act: u32, rows: u32) -> Thread {
    let record = panel * panel_length() + slot / UNITS * RECORD;
    let own = slot % UNITS * OWN;
    let fields = 4u * record + lane * FIELD_HALVES / 2u;
    let sub_byte = (lane * RECORD_BLOCKS + own) * SUB_BYTES;
    let sub_scales = 4u * record + 8u * FIELD_HALVES + sub_byte / 4u;
    let shift = select(sub_byte % 4u * 8u, 0u, OWN == 4u);
    let first = record + QUANTS + own * BLOCK;
    let rest = 4u * (first + BITS / 4u * 16u) + lane;
    return Thread(lane, slot, act, rows, fields, sub_scales, shift, first + lane, rest);
}
// Sums of the first and second 16 quants of a block of activations, of its first four words.
fn sums_of(head: vec4<u32>) -> vec2<i32> {
    return vec2<i32>(bitcast<i32>(head.z << 16u) >> 16u, bitcast<i32>(head.z) >> 16u);
}
// Sub-scales of the two halves of a block, of types with one for 16 inputs; minima follow.
fn halves_of(sub_scale: u32) -> vec4<i32> {
    if (SUB == 3u) { return vec4<i32>(signed_byte(sub_scale), signed_byte(sub_scale >> 8u), 0, 0); }
    return (vec4<i32>(i32(sub_scale)) >> vec4<u32>(0u, 8u, 4u, 12u)) & vec4<i32>(15);
}
fn scaled_halves(first: i32, second: i32, sub_scale: u32) -> i32 {
    let by = halves_of(sub_scale);
    return first * by.x + second * by.y;
}
// Second factor of the step of the minimum.
fn minimum_factor(sub_scale: u32, head: vec4<u32>, careful: bool) -> u32 {
    if (SUB != 4u) { return head.y; }
    let halves = sums_of(head);
    let by = halves_of(sub_scale);
    return t_mul(head.x, f_int(halves.x * by.z + halves.y * by.w), careful);
}
