// A block of 32 activations becomes twelve words: d, d * f32(S), the sums of the first (low half)
// and second sixteen quants, 1 if a chain with d may have subnormal numbers, eight words of quants.
struct Params { blocks: u32, x: u32, x_stride: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
@group(0) @binding(2) var<storage, read_write> acts: array<u32>;

var<workgroup> values: array<u32, 256>;
var<workgroup> inverses: array<u32, 8>;
// Sum of four signed bytes.
fn sum4(word: u32) -> i32 { return dot4I8Packed(word, 0x01010101u); }

@compute @workgroup_size(256) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) {
    let own = l >> 5u;
    let j = l & 31u;
    let block = w.x * 8u + own;
    let inside = block < p.blocks;
    var y = 0u;
    if (inside) { y = xs[p.x + w.y * p.x_stride + block * 32u + j]; }
    values[l] = y & 0x7fffffffu;
    workgroupBarrier();
    let at = (w.y * p.blocks + block) * 12u;
    var d = 0u;
    if (j == 0u) {
        var top = 0u;
        for (var i = 0u; i < 32u; i++) { top = max(top, values[own * 32u + i]); }
        var r = 0u;
        if (top >= INF) {
            d = NAN;
        } else if (top >= 0x0da24260u) {
            d = soft_div(top, 0x42fe0000u);
            r = soft_div(0x42fe0000u, top);
        }
        inverses[own] = r;
    }
    workgroupBarrier();
    let r = inverses[own];
    var q = 0u;
    if (r != 0u) { q = f_fma(y, r, 0x4b400000u) & 0xffu; }
    values[l] = q;
    workgroupBarrier();
    var word = 0u;
    if (j < 8u) {
        let i = own * 32u + 4u * j;
        word = values[i] | (values[i + 1u] << 8u) | (values[i + 2u] << 16u) | (values[i + 3u] << 24u);
        if (inside) { acts[at + 4u + j] = word; }
    }
    workgroupBarrier();
    if (j < 8u) { values[own * 32u + j] = word; }
    workgroupBarrier();
    if (j == 0u && inside) {
        let i = own * 32u;
        let first = sum4(values[i]) + sum4(values[i + 1u]) + sum4(values[i + 2u]) + sum4(values[i + 3u]);
        let second = sum4(values[i + 4u]) + sum4(values[i + 5u]) + sum4(values[i + 6u]) + sum4(values[i + 7u]);
        acts[at] = d;
        acts[at + 1u] = select(soft_mul(d, soft_int(first + second)), d, r == 0u);
        acts[at + 2u] = (bitcast<u32>(first) & 0xffffu) | (bitcast<u32>(second) << 16u);
        // 2^-78.
        acts[at + 3u] = select(0u, 1u, d != 0u && d < 0x18800000u);
    }
}
