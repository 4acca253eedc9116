// Arithmetic `integers`.
fn f_fma(a: u32, b: u32, c: u32) -> u32 { return soft_fma(a, b, c); }
fn f_mul(a: u32, b: u32) -> u32 { return soft_mul(a, b); }
fn f_int(i: i32) -> u32 { return soft_int(i); }
// A step of a chain of 6.3 and a product of two scales. `careful` is for other arithmetics.
fn t_fma(a: u32, b: u32, c: u32, careful: bool) -> u32 { return soft_fma(a, b, c); }
fn t_mul(a: u32, b: u32, careful: bool) -> u32 { return soft_mul(a, b); }
