// specs/canonical-arithmetic.md, section 5.
fn f_add(a: u32, b: u32) -> u32 { return f_fma(a, ONE, b); }
fn f_exp(x: u32) -> u32 {
    if (is_nan(x)) { return NAN; }
    if (f_less(x, 0xc2ae0000u)) { return 0u; }
    let c = select(x, 0x42b00000u, f_less(0x42b00000u, x));
    let t = f_fma(c, 0x3fb8aa3bu, 0x4b400000u);
    // The low bits of t hold the integer.
    let n = f_int(bitcast<i32>(t - 0x4b400000u));
    let r = f_fma(n, 0xb5bfbe8eu, f_fma(n, 0xbf317200u, c));
    var coefficients = array<u32, 6>(0x3c091d10u, 0x3d2aac79u, 0x3e2aaa49u, 0x3efffffeu, ONE, ONE);
    var p = 0x3ab511e8u;
    for (var i = 0u; i < 6u; i++) { p = f_fma(p, r, coefficients[i]); }
    return soft_mul(p, (t << 23u) + ONE);
}
fn f_sigmoid(x: u32) -> u32 { return soft_div(ONE, f_add(ONE, f_exp(f_neg(x)))); }
fn f_silu(x: u32) -> u32 { return soft_div(x, f_add(ONE, f_exp(f_neg(x)))); }
fn f_gelu(g: u32) -> u32 {
    let u = soft_mul(f_fma(soft_mul(g, g), 0x3d922279u, 0x3fcc422au), g);
    return soft_div(g, f_add(ONE, f_exp(f_neg(u))));
}
fn f_gelu_erf(g: u32) -> u32 {
    let z = g & 0x7fffffffu;
    let k = soft_div(ONE, f_fma(z, 0x3e800000u, ONE));
    var coefficients = array<u32, 8>(0xbe212cb4u, 0x3e9c91eeu, 0xbe5e569cu, 0x3e56db0bu, 0x3cf0aa17u,
        0x3dd66826u, 0x3dc97a9cu, 0x3dcc671cu);
    var t = 0x3cda51b7u;
    for (var i = 0u; i < 8u; i++) { t = f_fma(t, k, coefficients[i]); }
    let tail = soft_mul(soft_mul(t, k), f_exp(soft_mul(soft_mul(z, 0xbf000000u), z)));
    let top = select(0u, g, f_less(0u, g));
    return f_fma(f_neg(z), tail, top);
}
fn f_relu2(u: u32) -> u32 {
    let r = select(u, 0u, f_less(u, 0u));
    return soft_mul(r, r);
}
fn f_clamped(gate: u32, up: u32) -> u32 {
    let seven = 0x40e00000u;
    let g = select(gate, seven, f_less(seven, gate));
    var u = select(up, seven, f_less(seven, up));
    u = select(u, f_neg(seven), f_less(u, f_neg(seven)));
    let slope = soft_mul(g, 0x3fd9db23u);
    let bent = soft_div(g, f_add(ONE, f_exp(f_neg(slope))));
    return soft_mul(f_add(u, ONE), bent);
}
fn f_softcap(x: u32, cap: u32) -> u32 {
    let scaled = soft_div(x, cap);
    let e = f_exp(f_add(scaled, scaled));
    let tanh = f_add(ONE, f_neg(soft_div(0x40000000u, f_add(e, ONE))));
    return soft_mul(tanh, cap);
}
