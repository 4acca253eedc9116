// Terms of 6.3 in the arithmetic `guarded`.
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 { return f_fma(a, b, c); }
fn t_mul(a: u32, b: u32, careful: bool) -> u32 { return f_mul(a, b); }
