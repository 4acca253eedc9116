// The only float operations of all kernels.
fn card_fma(a: u32, b: u32, c: u32) -> u32 {
    return bitcast<u32>(fma(bitcast<f32>(a), bitcast<f32>(b), bitcast<f32>(c)));
}
fn card_mul(a: u32, b: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) * bitcast<f32>(b)); }
// |i| < 2^24.
fn card_int(i: i32) -> u32 { return bitcast<u32>(f32(i)); }
