// Products of a panel of 16 outputs of a quantised matrix with ROWS rows of activations
// (specs/gpu-arithmetic.md, section 5). The constants of the weight type stand before this text.
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
@group(0) @binding(1) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read_write> acts: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read> pairs: array<u32>;

const HEAD_WORDS: u32 = 8u * FIELDS;
const BLOCK_WORDS: u32 = 4u * (SUB_BYTES + BITS * 4u);
const RECORD_WORDS: u32 = HEAD_WORDS + RECORD_BLOCKS * BLOCK_WORDS;
// Blocks that the threads of a workgroup take together.
const CHUNK: u32 = 16u;

fn four(at: u32, g: u32) -> u32 { return (weights[at + 16u * (g & 3u)] >> (4u * (g >> 2u))) & 0x0f0f0f0fu; }
fn two(at: u32, g: u32) -> u32 { return (weights[at + 16u * (g >> 2u)] >> (2u * (g & 3u))) & 0x03030303u; }
fn one(at: u32, g: u32) -> u32 { return (weights[at] >> g) & 0x01010101u; }
fn look_up(q: u32) -> u32 {
    let low = select(TABLE[0], TABLE[1], (q & 4u) != 0u);
    let high = select(TABLE[2], TABLE[3], (q & 4u) != 0u);
    return (select(low, high, (q & 8u) != 0u) >> (8u * (q & 3u))) & 0xffu;
}
// Four signed bytes: the weights of group g (inputs 4 g to 4 g + 3), less the offset of the type.
fn group(at: u32, g: u32) -> u32 {
    if (BITS == 8u) { return weights[at + 16u * g] ^ 0x80808080u; }
    var q = 0u;
    if (BITS == 2u || BITS == 3u) { q = two(at, g); } else { q = four(at, g); }
    if (BITS == 3u) { q |= one(at + 32u, g) << 2u; }
    if (BITS == 5u) { q |= one(at + 64u, g) << 4u; }
    if (BITS == 6u) { q |= two(at + 64u, g) << 4u; }
    if (HAS_TABLE) {
        q = look_up(q & 15u) | (look_up((q >> 8u) & 15u) << 8u) | (look_up((q >> 16u) & 15u) << 16u)
            | (look_up((q >> 24u) & 15u) << 24u);
    }
    return q;
}
fn half_word(word: u32, odd: u32) -> u32 { return (word >> (16u * odd)) & 0xffffu; }
fn field(record: u32, index: u32, lane: u32) -> u32 {
    let bits = half_word(weights[record + 8u * index + (lane >> 1u)], lane & 1u);
    if (BF16_FIELDS) { return bits << 16u; }
    return f16_widen(bits);
}
// D * f32(n), which is exact for a finite D.
fn scaled(d: u32, n: i32) -> u32 {
    let magnitude = d & 0x7fffffffu;
    if (magnitude >= INF || magnitude < 0x08000000u || n == 0) { return soft_mul(d, soft_int(n)); }
    // The significand of a binary16 has 11 bits.
    let product = soft_int(i32(((magnitude >> 13u) & 0x3ffu) | 0x400u) * n);
    return (product ^ (d & SIGN)) + (((magnitude >> 23u) - 137u) << 23u);
}
fn signed_byte(bits: u32) -> i32 { return bitcast<i32>(bits << 24u) >> 24u; }
fn first_half(halves: u32) -> i32 { return bitcast<i32>(halves << 16u) >> 16u; }
fn second_half(halves: u32) -> i32 { return bitcast<i32>(halves) >> 16u; }

// [row][block of the chunk][lane]
var<workgroup> integers: array<u32, ROWS * 256>;
var<workgroup> scales: array<u32, ROWS * 256>;
// Of types with a minimum: the factors of the first step.
var<workgroup> minima: array<u32, MINIMA>;
var<workgroup> sums: array<u32, SUMS>;

@compute @workgroup_size(256) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) {
    let lane = l & 15u;
    let slot = l >> 4u;
    var first_row = w.y * ROWS;
    var panel = p.panel + w.x;
    if (PAIRED) {
        panel += pairs[2u * w.y + 1u];
        first_row = pairs[2u * w.y];
        if (panel >= p.panels) { return; }
    }
    let records = p.blocks / RECORD_BLOCKS;
    var acc = 0u;
    // Whether the own row has had a block whose terms may be subnormal.
    var careful = false;
    for (var begin = 0u; begin < p.blocks; begin += CHUNK) {
        let b = begin + slot;
        if (b < p.blocks) {
            let record = (panel * records + b / RECORD_BLOCKS) * RECORD_WORDS;
            let block = record + HEAD_WORDS + (b % RECORD_BLOCKS) * BLOCK_WORDS;
            let runs = block + 4u * SUB_BYTES + lane;
            let d = field(record, 0u, lane);
            var sub_scale = 0u;
            if (SUB_BYTES == 1u) { sub_scale = (weights[block + (lane >> 2u)] >> (8u * (lane & 3u))) & 0xffu; }
            if (SUB_BYTES == 2u) { sub_scale = half_word(weights[block + (lane >> 1u)], lane & 1u); }
            // Rounded products begin with this.
            var scale = d;
            if (SUB == 1u) { scale = scaled(d, signed_byte(sub_scale)); }
            if (SUB == 2u) { scale = scaled(d, i32(sub_scale & 0xffu)); }
            if (FIELDS == 2u) {
                let m = field(record, 1u, lane);
                var minimum = m;
                if (SUB == 2u) { minimum = f_neg(scaled(m, i32(sub_scale >> 8u))); }
                if (SUB == 4u) { minimum = f_neg(m); }
                minima[l] = minimum;
            }
            for (var r = 0u; r < ROWS; r++) {
                if (first_row + r >= p.rows) { break; }
                let act = ((first_row + r) * p.blocks + b) * 12u;
                var first = 0;
                var second = 0;
                for (var g = 0u; g < 4u; g++) { first += dot4I8Packed(group(runs, g), acts[act + 4u + g]); }
                for (var g = 4u; g < 8u; g++) { second += dot4I8Packed(group(runs, g), acts[act + 4u + g]); }
                if (OFFSET != 0) {
                    let halves = acts[act + 2u];
                    first -= OFFSET * first_half(halves);
                    second -= OFFSET * second_half(halves);
                }
                var integer = first + second;
                if (SUB == 3u) { integer = first * signed_byte(sub_scale) + second * signed_byte(sub_scale >> 8u); }
                if (SUB == 4u) {
                    integer = first * i32(sub_scale & 15u) + second * i32((sub_scale >> 8u) & 15u);
                    let halves = acts[act + 2u];
                    let sum = first_half(halves) * i32((sub_scale >> 4u) & 15u)
                        + second_half(halves) * i32(sub_scale >> 12u);
                    sums[r * 256u + l] = t_mul(acts[act], f_int(sum), acts[act + 3u] != 0u);
                }
                integers[r * 256u + l] = f_int(integer);
                scales[r * 256u + l] = t_mul(scale, acts[act], CAREFUL || acts[act + 3u] != 0u);
            }
        }
        workgroupBarrier();
        if (slot < ROWS && first_row + slot < p.rows) {
            for (var k = 0u; k < min(CHUNK, p.blocks - begin); k++) {
                let at = slot * 256u + 16u * k + lane;
                let act = ((first_row + slot) * p.blocks + begin + k) * 12u;
                careful = careful || CAREFUL || acts[act + 3u] != 0u;
                if (FIELDS == 2u) {
                    var second = acts[act + 1u];
                    if (SUB == 4u) { second = sums[at]; }
                    acc = t_fma(minima[16u * k + lane], second, acc, careful);
                }
                acc = t_fma(integers[at], scales[at], acc, careful);
            }
        }
        workgroupBarrier();
    }
    let output = w.x * 16u + lane;
    if (slot < ROWS && first_row + slot < p.rows && output < p.outputs) {
        var row = first_row + slot;
        if (PAIRED) { row = w.y; }
        out[p.out + row * p.out_stride + p.column + output] = acc;
    }
}
