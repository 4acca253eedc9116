// Sets the flag of a row if one of its values is an infinity or a NaN.
struct Params { cols: u32, x: u32, x_stride: u32, flags: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
@group(0) @binding(2) var<storage, read_write> flags: array<u32>;

@compute @workgroup_size(64) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) j: u32,
) {
    var found = false;
    for (var i = j; i < p.cols; i += 64u) {
        found = found || (xs[p.x + w.y * p.x_stride + i] & INF) == INF;
    }
    // Threads that write the same word write the same value.
    if (found) { flags[p.flags + w.y] = 1u; }
}
