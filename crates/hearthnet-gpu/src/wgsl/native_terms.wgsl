// Terms of 6.3 in the arithmetic `native`: no number is subnormal unless `careful` is set
// (specs/gpu-arithmetic.md).
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 {
    if (careful) { return soft_fma(a, b, c); }
    return card_fma(a, b, c);
}
fn t_mul(a: u32, b: u32, careful: bool) -> u32 {
    if (careful) { return soft_mul(a, b); }
    return card_mul(a, b);
}
