// Terms of 6.3 in the arithmetic `guarded`.
const UNGUARDED: bool = false;
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 { return f_fma(a, b, c); }
fn t_mul(a: u32, b: u32, careful: bool) -> u32 { return f_mul(a, b); }
fn t_scaled(d: u32, n: i32, careful: bool) -> u32 { return f_mul(d, f_int(n)); }
fn t_widen(high: u32, careful: bool) -> u32 { return f16_widen(high >> 16u); }
