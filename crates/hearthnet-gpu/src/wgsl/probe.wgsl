// Float operations by themselves. Eight results of each triple.
struct Params { count: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<u32>;
@group(0) @binding(2) var<storage, read> b: array<u32>;
@group(0) @binding(3) var<storage, read> c: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<u32>;

// Whether no fma of the triple has a subnormal operand or result, as the terms of 6.3.
fn tame(x: u32) -> bool { return ((x >> 23u) & 0xffu) - 80u < 96u; }

@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
    let i = g.x + g.y * 65535u * 64u;
    if (i >= p.count) { return; }
    let x = a[i]; let y = b[i]; let z = c[i];
    let careful = !(tame(x) && tame(y) && tame(z));
    out[8u * i] = f_fma(x, y, z);
    out[8u * i + 1u] = t_fma(x, y, z, careful);
    // A product that goes into a chain: a compiler may not reassociate it.
    out[8u * i + 2u] = t_fma(f_int(bitcast<i32>(x << 8u) >> 8u), t_mul(y, z, careful), x, careful);
    out[8u * i + 3u] = soft_mul(x, y);
    out[8u * i + 4u] = soft_div(x, y);
    out[8u * i + 5u] = soft_sqrt(x);
    out[8u * i + 6u] = f16_widen(f16_round(x)) ^ bf16_round(y);
    out[8u * i + 7u] = f_exp(z);
}
