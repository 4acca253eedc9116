// Integers of a round by the card's matrix units: each subgroup makes some tiles.

// One tile, at `to` of `integers`. spirv.rs replaces the body: WGSL has no tiles of bytes.
fn tile(weights: u32, activations: u32, to: u32) {
    integers[to] = vec4<i32>(operands[weights] + operands[activations]);
}
fn multiply(id: vec3<u32>) {
    for (var t = id.y; t < 2u * (32u / M) * (32u / N); t += id.z) {
        let output = t % (32u / M) * M;
        let row = t / (32u / M) % (32u / N) * N;
        let unit = t / ((32u / M) * (32u / N));
        let to = (1024u * unit + 32u * row + output) / 4u;
        tile(unit * UNIT + output * RUN, (2u + unit) * UNIT + row * RUN, to);
    }
}
@compute @workgroup_size(THREADS) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
    @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) subgroups: u32,
) { all_products(vec3<u32>(l, subgroup, subgroups), w); }
