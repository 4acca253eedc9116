// Arithmetic `guarded`: the card's fma and product where neither an operand nor the result is
// subnormal, `integers` where one may be.
fn is_subnormal(x: u32) -> bool { return ((x << 1u) - 1u) < 0x00ffffffu; }
fn f_fma(a: u32, b: u32, c: u32) -> u32 {
    let r = card_fma(a, b, c);
    if (is_subnormal(a) || is_subnormal(b) || is_subnormal(c) || (r & INF) == 0u || (r & INF) == INF) {
        return soft_fma(a, b, c);
    }
    return r;
}
fn f_mul(a: u32, b: u32) -> u32 {
    let r = card_mul(a, b);
    if (is_subnormal(a) || is_subnormal(b) || (r & INF) == 0u || (r & INF) == INF) {
        return soft_mul(a, b);
    }
    return r;
}
fn f_int(i: i32) -> u32 { return card_int(i); }
