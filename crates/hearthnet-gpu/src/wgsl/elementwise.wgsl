// out[r][c] = value(x[r][c], y[r][c], out[r][c]).
struct Params {
    rows: u32, cols: u32,
    x: u32, x_stride: u32,
    y: u32, y_stride: u32,
    // 1, or 0 if a row has one value of y.
    y_step: u32,
    out: u32, out_stride: u32,
    argument: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
@group(0) @binding(2) var<storage, read_write> ys: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
    if (g.x >= p.cols) { return; }
    let at = p.out + g.y * p.out_stride + g.x;
    let x = xs[p.x + g.y * p.x_stride + g.x];
    let y = ys[p.y + g.y * p.y_stride + g.x * p.y_step];
    out[at] = value(x, y, out[at]);
}
