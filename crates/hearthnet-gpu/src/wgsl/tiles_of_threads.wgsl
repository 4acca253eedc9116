// Integers of a round by dot products, for tests: a driver without matrix units runs it.
fn multiply(id: vec3<u32>) {
    for (var i = id.x; i < 2048u; i += THREADS) {
        var sum = 0;
        for (var s = 0u; s < STEPS; s++) {
            let unit = i / 1024u * UNIT + 32u * RUN * s;
            let w = unit + i % 32u * RUN;
            let x = unit + 2u * UNIT + i / 32u % 32u * RUN;
            sum = dot16(operands[w], operands[x], sum);
            if (RUN == 2u) { sum = dot16(operands[w + 1u], operands[x + 1u], sum); }
        }
        integers[i / 4u][i % 4u] = sum;
    }
}
@compute @workgroup_size(THREADS) fn main(
    @builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) l: u32,
) { all_products(vec3<u32>(l, 0u, 1u), w); }
