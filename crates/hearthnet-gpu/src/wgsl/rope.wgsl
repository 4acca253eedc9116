// Rotates pair i of each head by the angle of the row's position. A thread per pair.
struct Params {
    pairs: u32, head_dim: u32,
    x: u32, x_stride: u32,
    info: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
// [position][pair]: cosine, sine.
@group(0) @binding(2) var<storage, read> angles: array<u32>;
// Four words per row; the first is its position.
@group(0) @binding(3) var<storage, read> info: array<u32>;

@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
    if (g.x >= p.pairs) { return; }
    let angle = 2u * (info[p.info + 4u * g.z] * p.pairs + g.x);
    let c = angles[angle];
    let s = angles[angle + 1u];
    let head = p.x + g.z * p.x_stride + g.y * p.head_dim;
    var at = head + g.x;
    var other = at + p.pairs;
    if (INTERLEAVED) {
        at = head + 2u * g.x;
        other = at + 1u;
    }
    let a = xs[at];
    let b = xs[other];
    xs[at] = f_fma(a, c, f_neg(soft_mul(b, s)));
    xs[other] = f_fma(a, s, soft_mul(b, c));
}
