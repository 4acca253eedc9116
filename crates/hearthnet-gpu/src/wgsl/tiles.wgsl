// Products of two panels of 16 outputs of a quantised matrix with 32 rows of activations
// (specs/gpu-arithmetic.md, section 7). `weights.wgsl` stands before this text. Integers are made in
// tiles of M outputs and N rows, from K inputs at a time.
const OWN: u32 = 1u;
// Types with a sub-scale for 16 inputs need the integers of both halves of a block.
const HALVES: bool = SUB >= 3u;
// Blocks of a round. A round has two units: integers of a block, or of half of it.
const BLOCKS: u32 = select(2u, 1u, HALVES);
// A unit has STEPS runs of each output or row: the bytes of K inputs, in RUN vec4.
const UNIT: u32 = 32u * RUN * STEPS;

// [weights, activations][unit][step][output or row][RUN]: signed bytes.
var<workgroup> operands: array<vec4<u32>, 4u * UNIT>;
// [unit][row][output].
var<workgroup> integers: array<vec4<i32>, 512>;
// [block][output]: scale, minimum, sub-scale.
var<workgroup> factors: array<vec4<u32>, 64>;
// [block][row]: first four words of a block of activations.
var<workgroup> heads: array<vec4<u32>, 64>;
// Not 0 if the thread has seen a marked block of activations.
var<private> seen: u32;

// Less the type's offset, as signed bytes.
fn signed_bytes(q: Quants) -> Quants {
    var second = q.second;
    if (SIGNED) { second = ((second ^ bytes(0x80u)) >> vec4<u32>(4u)) & bytes(15u); }
    if (OFFSET == 0) { return Quants(q.first, second); }
    let less = bytes(u32(128 - OFFSET));
    return Quants((q.first + less) ^ bytes(0x80u), (second + less) ^ bytes(0x80u));
}
// Writes a block of an output or a row to its runs, the first of which is at `at`.
fn place(at: u32, q: Quants, weights: bool) {
    if (K == 8u) {
        operands[at] = vec4<u32>(q.first.xy, 0u, 0u);
        operands[at + 32u] = vec4<u32>(q.first.zw, 0u, 0u);
        operands[at + 64u] = vec4<u32>(q.second.xy, 0u, 0u);
        operands[at + 96u] = vec4<u32>(q.second.zw, 0u, 0u);
    } else if (K == 16u) {
        operands[at] = q.first;
        operands[at + 32u] = q.second;
    } else if (HALVES && weights) {
        // The other half does not count: zeros.
        operands[at] = q.first;
        operands[at + 1u] = vec4<u32>(0u);
        operands[at + UNIT] = vec4<u32>(0u);
        operands[at + UNIT + 1u] = q.second;
    } else {
        operands[at] = q.first;
        operands[at + 1u] = q.second;
        if (HALVES) {
            operands[at + UNIT] = q.first;
            operands[at + UNIT + 1u] = q.second;
        }
    }
}
// Thread l < 64 stores the weights of an output, the others the activations of a row.
fn load(l: u32, panel: u32, first_row: u32, begin: u32, careful: bool) {
    let i = l & 31u;
    let k = (l >> 5u) & 1u;
    if (k >= BLOCKS) { return; }
    if (l < 64u) {
        // A block beyond the last one is in its record.
        let t = thread_of(panel + (i >> 4u), i & 15u, begin + k, 0u, 0u);
        let w = weights_of(0u, 0u, t, careful);
        factors[l] = vec4<u32>(w.scale, w.minimum, w.sub_scale, 0u);
        place(k * UNIT + i * RUN, signed_bytes(w.q), true);
    } else {
        // Rows and blocks beyond the last one repeat it.
        let row = first_row + min(i, p.rows - 1u - first_row);
        let at = 3u * (row * p.blocks + min(begin + k, p.blocks - 1u));
        heads[l - 64u] = acts[at];
        seen |= acts[at].w;
        place((2u + k) * UNIT + i * RUN, Quants(acts[at + 1u], acts[at + 2u]), false);
    }
}
fn integer(i: u32) -> i32 { return integers[i >> 2u][i & 3u]; }
// Adds the terms of block k of the round to an output of a row.
fn step(acc: u32, k: u32, row: u32, output: u32, careful: bool) -> u32 {
    let f = factors[32u * k + output];
    let head = heads[32u * k + row];
    let at = 32u * row + output;
    var sum = acc;
    if (FIELDS == 2u) { sum = t_fma(f.y, minimum_factor(f.z, head, careful), acc, careful); }
    var i = integer(1024u * k + at);
    if (HALVES) { i = scaled_halves(i, integer(1024u + at), f.z); }
    return t_fma(f_int(i), t_mul(f.x, head.x, careful), sum, careful);
}
// Of one output of eight rows.
alias Accumulators = array<u32, 8>;
fn products(id: vec3<u32>, panel: u32, first_row: u32, careful: bool) -> Accumulators {
    var acc = Accumulators();
    let l = id.x;
    for (var begin = 0u; begin < p.blocks; begin += BLOCKS) {
        load(l, panel, first_row, begin, careful);
        workgroupBarrier();
        multiply(id);
        workgroupBarrier();
        for (var k = 0u; k < min(BLOCKS, p.blocks - begin); k++) {
            for (var i = 0u; i < 8u; i++) {
                acc[i] = step(acc[i], k, 8u * (l >> 5u) + i, l & 31u, careful);
            }
        }
        workgroupBarrier();
    }
    return acc;
}
// `id`: thread, its subgroup, and the number of subgroups.
fn all_products(id: vec3<u32>, w: vec3<u32>) {
    let l = id.x;
    prepare(l, THREADS);
    let panel = p.panel + 2u * w.x;
    let first_row = 32u * w.y;
    var careful = false;
    var acc = Accumulators();
    loop {
        acc = products(id, panel, first_row, careful);
        if (!UNGUARDED || careful) { break; }
        // Chains with small scales again, on the bits. The first factor serves as a flag.
        if (l == 0u) { factors[0].x = 0u; }
        workgroupBarrier();
        if (seen != 0u) { factors[0].x = 1u; }
        careful = workgroupUniformLoad(&factors[0]).x != 0u;
        if (!careful) { break; }
    }
    let column = w.x * 32u + (l & 31u);
    for (var i = 0u; i < 8u; i++) {
        let row = first_row + 8u * (l >> 5u) + i;
        if (row < p.rows && column < p.outputs) {
            out[p.out + row * p.out_stride + p.column + column] = acc[i];
        }
    }
}
