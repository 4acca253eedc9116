// Recurrences: causal convolution of channels, gated delta rule, scan of Mamba-2
// (specs/canonical-arithmetic.md, sections 13 and 16).
//
// A piece has some successive rows of one sequence. Eight words: first row, number of rows, the
// state before them (NONE is zeros), the state after them, a copy of that (or NONE), and three that
// are not used. The states before and after may be the same one.
struct Params {
    // First of the pieces of this launch.
    piece: u32,
    x: u32, x_stride: u32,
    // Words of a state, and the first of those that the kernel uses.
    words: u32, at: u32,
    // Convolution: channels, positions, place of the factors of x, whether there are any, out, most
    // rows of a piece.
    // Others: columns of a state, rows of it, heads, heads that share q and k, whether these heads
    // follow one another, columns of q and k.
    a: u32, b: u32, c: u32, d: u32, e: u32, f: u32, g: u32,
}
const NONE: u32 = 0xffffffffu;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> xs: array<u32>;
@group(0) @binding(2) var<storage, read> pieces: array<u32>;
// Of the convolution, [position][channel]; or two factors for each row and head.
@group(0) @binding(3) var<storage, read> weights: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<u32>;
// Outputs of the convolution; or a factor for each head.
@group(0) @binding(5) var<storage, read_write> out: array<u32>;

// Input `t` of a channel, counted from the first row of the piece. Inputs before it are those of the
// state.
fn input(piece: u32, t: i32, channel: u32) -> u32 {
    if (t < 0) {
        let before = pieces[piece + 2u];
        if (before == NONE) { return 0u; }
        let row = u32(i32(p.b) - 1 + t);
        return states[before * p.words + p.at + row * p.a + channel];
    }
    let row = (pieces[piece] + u32(t)) * p.x_stride + channel;
    if (p.d != 0u) { return soft_mul(xs[p.c + row], xs[p.x + row]); }
    return xs[p.x + row];
}

@compute @workgroup_size(64) fn convolve(@builtin(global_invocation_id) id: vec3<u32>) {
    let piece = 8u * (p.piece + id.z);
    if (id.x >= p.a || id.y >= pieces[piece + 1u]) { return; }
    var sum = 0u;
    for (var j = 0u; j < p.b; j++) {
        let t = i32(id.y) + i32(j) - i32(p.b) + 1;
        sum = f_fma(weights[j * p.a + id.x], input(piece, t, id.x), sum);
    }
    out[p.e + (pieces[piece] + id.y) * p.f + id.x] = sum;
}

// Stores the last inputs of a piece. A thread has a channel; it writes a row of the state after it
// has read it.
@compute @workgroup_size(64) fn keep(@builtin(global_invocation_id) id: vec3<u32>) {
    let piece = 8u * (p.piece + id.z);
    if (id.x >= p.a) { return; }
    let rows = i32(pieces[piece + 1u]);
    let copy = pieces[piece + 4u];
    for (var k = 0u; k + 1u < p.b; k++) {
        let value = input(piece, rows + i32(k) - i32(p.b) + 1, id.x);
        let cell = p.at + k * p.a + id.x;
        states[pieces[piece + 3u] * p.words + cell] = value;
        if (copy != NONE) { states[copy * p.words + cell] = value; }
    }
}

// State of a head: rows of p.a columns. A thread has a column.
fn before(piece: u32, cell: u32, row: u32) -> u32 {
    if (row > 0u) { return states[pieces[piece + 3u] * p.words + cell]; }
    let before = pieces[piece + 2u];
    if (before == NONE) { return 0u; }
    return states[before * p.words + cell];
}
fn copy_column(piece: u32, cell: u32) {
    let copy = pieces[piece + 4u];
    if (copy == NONE) { return; }
    for (var i = 0u; i < p.b; i++) {
        let at = cell + i * p.a;
        states[copy * p.words + at] = states[pieces[piece + 3u] * p.words + at];
    }
}
// Head of q and k, or group, of a head.
fn shared_head(head: u32) -> u32 {
    if (p.e != 0u) { return head / p.d; }
    return head % p.d;
}

@compute @workgroup_size(64) fn delta_rule(@builtin(global_invocation_id) id: vec3<u32>) {
    let piece = 8u * (p.piece + id.z);
    if (id.x >= p.a) { return; }
    let head = id.y;
    let cell = p.at + head * p.a * p.b + id.x;
    let after = pieces[piece + 3u] * p.words + cell;
    for (var row = 0u; row < pieces[piece + 1u]; row++) {
        let begin = (pieces[piece] + row) * p.x_stride;
        let value = begin + p.x + head * p.a + id.x;
        let q = begin + p.f + shared_head(head) * p.b;
        let k = begin + p.g + shared_head(head) * p.b;
        let factors = 2u * ((pieces[piece] + row) * p.c + head);
        let decay = weights[factors];
        var read = 0u;
        for (var i = 0u; i < p.b; i++) {
            let s = f_mul(before(piece, cell + i * p.a, row), decay);
            states[after + i * p.a] = s;
            read = f_fma(xs[k + i], s, read);
        }
        let correction = f_mul(f_add(xs[value], f_neg(read)), weights[factors + 1u]);
        var sum = 0u;
        for (var i = 0u; i < p.b; i++) {
            let s = f_fma(xs[k + i], correction, states[after + i * p.a]);
            states[after + i * p.a] = s;
            sum = f_fma(xs[q + i], s, sum);
        }
        xs[value] = sum;
    }
    copy_column(piece, cell);
}

@compute @workgroup_size(64) fn mamba_scan(@builtin(global_invocation_id) id: vec3<u32>) {
    let piece = 8u * (p.piece + id.z);
    if (id.x >= p.a) { return; }
    let head = id.y;
    let cell = p.at + head * p.a * p.b + id.x;
    let after = pieces[piece + 3u] * p.words + cell;
    for (var row = 0u; row < pieces[piece + 1u]; row++) {
        let begin = (pieces[piece] + row) * p.x_stride;
        let value = begin + p.x + head * p.a + id.x;
        let write = begin + p.f + shared_head(head) * p.b;
        let read = begin + p.g + shared_head(head) * p.b;
        let factors = 2u * ((pieces[piece] + row) * p.c + head);
        let decay = weights[factors];
        let added = f_mul(xs[value], weights[factors + 1u]);
        var sum = 0u;
        for (var i = 0u; i < p.b; i++) {
            let s = f_fma(xs[write + i], added, f_mul(before(piece, cell + i * p.a, row), decay));
            states[after + i * p.a] = s;
            sum = f_fma(xs[read + i], s, sum);
        }
        xs[value] = f_fma(out[head], xs[value], sum);
    }
    copy_column(piece, cell);
}
