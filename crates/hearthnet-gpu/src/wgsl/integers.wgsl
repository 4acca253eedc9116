// Arithmetic `integers`.
fn f_fma(a: u32, b: u32, c: u32) -> u32 { return soft_fma(a, b, c); }
fn f_mul(a: u32, b: u32) -> u32 { return soft_mul(a, b); }
fn f_int(i: i32) -> u32 { return soft_int(i); }
const UNGUARDED: bool = false;
// A step of a chain of 6.3 and a product of two scales. `careful` is for other arithmetics.
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 { return soft_fma(a, b, c); }
fn t_mul(a: u32, b: u32, careful: bool) -> u32 { return soft_mul(a, b); }
// d * f32(n), which is exact for a finite d.
fn t_scaled(d: u32, n: i32, careful: bool) -> u32 {
    let magnitude = d & 0x7fffffffu;
    if (magnitude >= INF || magnitude < 0x08000000u || n == 0) { return soft_mul(d, soft_int(n)); }
    // The significand of a binary16 has 11 bits.
    let product = soft_int(i32(((magnitude >> 13u) & 0x3ffu) | 0x400u) * n);
    return (product ^ (d & SIGN)) + (((magnitude >> 23u) - 137u) << 23u);
}
fn t_widen(high: u32, careful: bool) -> u32 { return f16_widen(high >> 16u); }
