// A workgroup normalises a run of `width` values. A row has `groups` runs beside each other.
struct Params {
    width: u32,
    x: u32, x_stride: u32,
    out: u32, out_stride: u32,
    eps: u32,
    // 0 if all weights are 1.
    weighted: u32,
    // Factor of all values instead of weights (`l2_norm`).
    factor: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<u32>;
@group(0) @binding(4) var<storage, read> biases: array<u32>;

var<workgroup> lanes: array<u32, 16>;
var<workgroup> shared_value: u32;

// Adds the sixteen lanes at distance 8, 4, 2, 1; all threads return the sum.
fn fold(j: u32) -> u32 {
    workgroupBarrier();
    for (var d = 8u; d > 0u; d = d >> 1u) {
        if (j < d) { lanes[j] = f_add(lanes[j], lanes[j + d]); }
        workgroupBarrier();
    }
    if (j == 0u) { shared_value = lanes[0]; }
    return workgroupUniformLoad(&shared_value);
}
// Sum of the squares of the run that begins at `begin`; all threads return it.
fn sum_of_squares(begin: u32, j: u32) -> u32 {
    if (j < 16u) {
        var lane = 0u;
        for (var i = j; i < p.width; i += 16u) {
            let x = xs[begin + i];
            lane = f_fma(x, x, lane);
        }
        lanes[j] = lane;
    }
    return fold(j);
}
fn inverse_root(q: u32) -> u32 {
    return soft_div(ONE, soft_sqrt(f_add(q, p.eps)));
}
fn mean(sum: u32) -> u32 { return soft_div(sum, soft_int(i32(p.width))); }

@compute @workgroup_size(64) fn rms_norm(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) j: u32,
) {
    let begin = p.x + w.y * p.x_stride + w.x * p.width;
    let to = p.out + w.y * p.out_stride + w.x * p.width;
    let q = sum_of_squares(begin, j);
    if (j == 0u) { shared_value = inverse_root(mean(q)); }
    let s = workgroupUniformLoad(&shared_value);
    for (var i = j; i < p.width; i += 64u) {
        var y = soft_mul(xs[begin + i], s);
        if (p.weighted != 0u) { y = soft_mul(y, weights[i]); }
        out[to + i] = y;
    }
}

@compute @workgroup_size(64) fn l2_norm(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) j: u32,
) {
    let begin = p.x + w.y * p.x_stride + w.x * p.width;
    let to = p.out + w.y * p.out_stride + w.x * p.width;
    let q = sum_of_squares(begin, j);
    if (j == 0u) { shared_value = inverse_root(q); }
    let s = workgroupUniformLoad(&shared_value);
    for (var i = j; i < p.width; i += 64u) {
        let y = soft_mul(xs[begin + i], s);
        out[to + i] = soft_mul(y, p.factor);
    }
}

@compute @workgroup_size(64) fn layer_norm(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) j: u32,
) {
    let begin = p.x + w.y * p.x_stride;
    let to = p.out + w.y * p.out_stride;
    if (j < 16u) {
        var lane = 0u;
        for (var i = j; i < p.width; i += 16u) { lane = f_add(xs[begin + i], lane); }
        lanes[j] = lane;
    }
    let sum = fold(j);
    if (j == 0u) { shared_value = f_neg(mean(sum)); }
    let less = workgroupUniformLoad(&shared_value);
    if (j < 16u) {
        var lane = 0u;
        for (var i = j; i < p.width; i += 16u) {
            let d = f_add(xs[begin + i], less);
            lane = f_fma(d, d, lane);
        }
        lanes[j] = lane;
    }
    let q = fold(j);
    if (j == 0u) { shared_value = inverse_root(mean(q)); }
    let s = workgroupUniformLoad(&shared_value);
    for (var i = j; i < p.width; i += 64u) {
        let d = f_add(xs[begin + i], less);
        out[to + i] = f_fma(soft_mul(d, s), weights[i], biases[i]);
    }
}
