// Terms of 6.3 in the arithmetic `native`: no number is subnormal unless `careful` is set
// (specs/gpu-arithmetic.md).
const UNGUARDED: bool = true;
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 {
    if (careful) { return soft_fma(a, b, c); }
    return card_fma(a, b, c);
}
fn t_mul(a: u32, b: u32, careful: bool) -> u32 {
    if (careful) { return soft_mul(a, b); }
    return card_mul(a, b);
}
fn t_scaled(d: u32, n: i32, careful: bool) -> u32 { return t_mul(d, f_int(n), careful); }
// A finite binary16, the high half of a word, to binary32. For a subnormal number or 0, the fma gives
// its magnitude, which is below `magnitude`. For others it is not below.
fn t_widen(high: u32, careful: bool) -> u32 {
    if (careful) { return f16_widen(high >> 16u); }
    let magnitude = (((high >> 16u) & 0x7fffu) << 13u) + 0x38000000u;
    // 2 x - 2^-14.
    let subnormal = card_fma(magnitude, 0x40000000u, 0xb8800000u);
    return min(magnitude, subnormal) | (high & SIGN);
}
