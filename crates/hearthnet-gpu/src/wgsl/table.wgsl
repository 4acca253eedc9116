// Values of the codes in a byte: of the low four bits in byte 0, of the high four in byte 2.
var<workgroup> values: array<u32, 256>;
fn value_of(code: u32) -> u32 {
    let low = select(TABLE[0], TABLE[1], (code & 4u) != 0u);
    let high = select(TABLE[2], TABLE[3], (code & 4u) != 0u);
    return (select(low, high, (code & 8u) != 0u) >> (8u * (code & 3u))) & 0xffu;
}
// Fills the table, with `threads` threads.
fn prepare(l: u32, threads: u32) {
    for (var i = l; i < 256u; i += threads) {
        values[i] = value_of(i & 15u) | (value_of(i >> 4u) << 16u);
    }
    workgroupBarrier();
}
// Of four bytes: the values of the low codes, and of the high codes.
fn decoded_word(codes: u32) -> vec2<u32> {
    let first = values[codes & 255u] | (values[(codes >> 8u) & 255u] << 8u);
    let second = values[(codes >> 16u) & 255u] | (values[codes >> 24u] << 8u);
    return vec2<u32>(
        (first & 0xffffu) | (second << 16u), (first >> 16u) | (second & 0xffff0000u),
    );
}
fn decoded(codes: vec4<u32>) -> Quants {
    let x = decoded_word(codes.x);
    let y = decoded_word(codes.y);
    let z = decoded_word(codes.z);
    let w = decoded_word(codes.w);
    return Quants(vec4<u32>(x.x, y.x, z.x, w.x), vec4<u32>(x.y, y.y, z.y, w.y));
}
