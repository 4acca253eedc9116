// Products of 64 outputs of an F32, F16 or BF16 matrix with ROWS rows of activations. A thread has
// one output.
struct Params {
    rows: u32,
    inputs: u32,
    outputs: u32,
    panel: u32, column: u32,
    panels: u32,
    out: u32, out_stride: u32,
    x: u32, x_stride: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read_write> xs: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read> pairs: array<u32>;

// KIND: 0 is F32, 1 is F16, 2 is BF16.
fn weight(at: u32) -> u32 {
    if (KIND == 0u) { return weights[at]; }
    let bits = (weights[at >> 1u] >> (16u * (at & 1u))) & 0xffffu;
    if (KIND == 1u) { return f16_widen(bits); }
    return bits << 16u;
}
@compute @workgroup_size(64) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) {
    let output = w.x * 64u + l;
    if (output >= p.outputs) { return; }
    var first_row = w.y * ROWS;
    var panel = p.panel + output / 16u;
    if (PAIRED) {
        panel += pairs[2u * w.y + 1u];
        first_row = pairs[2u * w.y];
        if (panel >= p.panels) { return; }
    }
    let first = panel * p.inputs * 16u + (output & 15u);
    var acc = array<u32, ROWS>();
    for (var k = 0u; k < p.inputs; k++) {
        let v = weight(first + 16u * k);
        for (var r = 0u; r < ROWS; r++) {
            // Rows beyond the last one repeat it.
            let row = min(first_row + r, p.rows - 1u);
            acc[r] = f_fma(v, xs[p.x + row * p.x_stride + k], acc[r]);
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        if (first_row + r >= p.rows) { break; }
        var row = first_row + r;
        if (PAIRED) { row = w.y; }
        out[p.out + row * p.out_stride + p.column + output] = acc[r];
    }
}
