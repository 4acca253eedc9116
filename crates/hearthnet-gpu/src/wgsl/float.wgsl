// IEEE 754 binary32 on the bits, by u32 operations only: rounded to nearest, ties to even, with
// subnormals. No function here has a float operation. A NaN result is NAN.

const NAN: u32 = 0x7fc00000u;
const INF: u32 = 0x7f800000u;
const SIGN: u32 = 0x80000000u;
const ONE: u32 = 0x3f800000u;

fn is_nan(x: u32) -> bool { return (x & 0x7fffffffu) > INF; }
fn f_neg(x: u32) -> u32 { return x ^ SIGN; }
// Whether x < y; false if either is a NaN.
fn f_less(x: u32, y: u32) -> bool {
    if (is_nan(x) || is_nan(y)) { return false; }
    return f_key(x) < f_key(y);
}
// Orders all numbers: -0 and +0 have the same key.
fn f_key(x: u32) -> i32 {
    let magnitude = bitcast<i32>(x & 0x7fffffffu);
    return select(magnitude, -magnitude, (x & SIGN) != 0u);
}

// Of a magnitude: significand with its leading bit at bit 23, and exponent + 64, which is positive.
// The significand of 0 is 0.
fn parts(x: u32) -> vec2<u32> {
    let e = x >> 23u;
    let f = x & 0x7fffffu;
    if (e != 0u) { return vec2<u32>(f | 0x800000u, e + 64u); }
    if (f == 0u) { return vec2<u32>(0u, 0u); }
    let shift = 23u - firstLeadingBit(f);
    return vec2<u32>(f << shift, 65u - shift);
}
// (high, low) >> n for n up to 64; bit 0 of the result is set if a lost bit was.
fn shift_right(v: vec2<u32>, n: u32) -> vec2<u32> {
    let far = n >= 32u;
    let high = select(v.x, 0u, far);
    let low = select(v.y, v.x, far);
    let gone = select(0u, v.y, far);
    let k = n & 31u;
    let all = n >= 64u;
    // Shifts by 32 - k, which are 0 for k = 0.
    let from_high = (high << 1u) << (31u - k);
    let lost = select(((low << 1u) << (31u - k)) | gone, v.x | v.y, all);
    let sticky = select(0u, 1u, lost != 0u);
    return vec2<u32>(select(high >> k, 0u, all), select((low >> k) | from_high, 0u, all) | sticky);
}
// Rounds v * 2^(exponent - 1000) to the bits of a float. v is at least 2 and below 2^63.
fn round_pack(sign: u32, v: vec2<u32>, exponent: i32) -> u32 {
    var high = v.x;
    var low = v.y;
    var e = exponent;
    if (high == 0u) {
        high = low >> 1u;
        low = low << 31u;
        e -= 31;
    }
    let up = 30u - firstLeadingBit(high);
    high = (high << up) | ((low >> 1u) >> (31u - up));
    low = low << up;
    e -= i32(up);
    // The significand is high >> 7, and this its exponent field.
    var field = e - 1000 + 189;
    if (field >= 255) { return sign | INF; }
    if (field < 1) {
        let shifted = shift_right(vec2<u32>(high, low), u32(min(1 - field, 63)));
        high = shifted.x;
        low = shifted.y;
        field = 1;
    }
    let kept = high >> 7u;
    let half = (high >> 6u) & 1u;
    let rest = (high & 0x3fu) | low;
    let round_up = select(0u, half, rest != 0u || (kept & 1u) != 0u);
    return sign | ((u32(field - 1) << 23u) + kept + round_up);
}
// Product of numbers of 24 bits, as (high, low).
fn multiply_wide(a: u32, b: u32) -> vec2<u32> {
    let al = a & 0xfffu; let ah = a >> 12u;
    let bl = b & 0xfffu; let bh = b >> 12u;
    let ll = al * bl;
    let middle = al * bh + ah * bl;
    let hh = ah * bh;
    let t = ll + (middle << 12u);
    let first_carry = select(0u, 1u, t < ll);
    let low = t + (hh << 24u);
    let second_carry = select(0u, 1u, low < t);
    return vec2<u32>((middle >> 20u) + (hh >> 8u) + first_carry + second_carry, low);
}
fn soft_fma(a: u32, b: u32, c: u32) -> u32 {
    let product_sign = (a ^ b) & SIGN;
    let sum_sign = c & SIGN;
    let x = a & 0x7fffffffu;
    let y = b & 0x7fffffffu;
    let z = c & 0x7fffffffu;
    if (max(max(x, y), z) >= INF) {
        if (x > INF || y > INF || z > INF) { return NAN; }
        if (x == INF || y == INF) {
            if (x == 0u || y == 0u) { return NAN; }
            if (z == INF && sum_sign != product_sign) { return NAN; }
            return product_sign | INF;
        }
        return c;
    }
    if (x == 0u || y == 0u) {
        if (z == 0u) { return select(0u, product_sign, product_sign == sum_sign); }
        return c;
    }
    let xs = parts(x);
    let ys = parts(y);
    let zs = parts(z);
    let wide = multiply_wide(xs.x, ys.x);
    // Leading bit at bit 60 or 61.
    let product = vec2<u32>((wide.x << 14u) | (wide.y >> 18u), wide.y << 14u);
    let product_exponent = i32(xs.y) + i32(ys.y) - 442 + 1000;
    // Leading bit at bit 61.
    let term = vec2<u32>(zs.x << 6u, 0u);
    let term_exponent = select(i32(zs.y) - 252 + 1000, product_exponent, z == 0u);
    let product_first = product_exponent >= term_exponent;
    let first = select(term, product, product_first);
    let second = shift_right(
        select(product, term, product_first),
        u32(min(abs(product_exponent - term_exponent), 64)),
    );
    // Sum or difference of 64 bits, in two's complement.
    let mask = select(0xffffffffu, 0u, product_sign == sum_sign);
    let low_second = second.y ^ mask;
    var low = first.y + low_second + (mask & 1u);
    let carry = low < first.y || (mask != 0u && second.y == 0u);
    var high = first.x + (second.x ^ mask) + select(0u, 1u, carry);
    let negative = (high >> 31u) != 0u;
    if (negative) {
        low = ~low + 1u;
        high = ~high + select(0u, 1u, low == 0u);
    }
    if ((high | low) == 0u) { return 0u; }
    let sign = select(sum_sign, product_sign, product_first) ^ select(0u, SIGN, negative);
    return round_pack(sign, vec2<u32>(high, low), max(product_exponent, term_exponent));
}
fn soft_mul(a: u32, b: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let x = a & 0x7fffffffu;
    let y = b & 0x7fffffffu;
    if (max(x, y) >= INF) {
        if (x > INF || y > INF || x == 0u || y == 0u) { return NAN; }
        return sign | INF;
    }
    if (x == 0u || y == 0u) { return sign; }
    let xs = parts(x);
    let ys = parts(y);
    let wide = multiply_wide(xs.x, ys.x);
    let product = vec2<u32>((wide.x << 14u) | (wide.y >> 18u), wide.y << 14u);
    return round_pack(sign, product, i32(xs.y) + i32(ys.y) - 442 + 1000);
}
fn soft_div(a: u32, b: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let x = a & 0x7fffffffu;
    let y = b & 0x7fffffffu;
    if (x > INF || y > INF) { return NAN; }
    if (x == INF) { return select(sign | INF, NAN, y == INF); }
    if (y == INF) { return sign; }
    if (y == 0u) { return select(sign | INF, NAN, x == 0u); }
    if (x == 0u) { return sign; }
    let xs = parts(x);
    let ys = parts(y);
    // The quotient times 2^27, rounded down, and a sticky bit.
    var rest = xs.x;
    var quotient = 0u;
    for (var i = 0u; i < 28u; i++) {
        quotient = quotient << 1u;
        if (rest >= ys.x) { rest -= ys.x; quotient |= 1u; }
        rest = rest << 1u;
    }
    quotient = (quotient << 1u) | select(0u, 1u, rest != 0u);
    return round_pack(sign, vec2<u32>(quotient, 0u), i32(xs.y) - i32(ys.y) - 60 + 1000);
}
fn soft_sqrt(a: u32) -> u32 {
    let x = a & 0x7fffffffu;
    if (x > INF) { return NAN; }
    if (x == 0u) { return a; }
    if ((a & SIGN) != 0u) { return NAN; }
    if (x == INF) { return a; }
    let xs = parts(x);
    // The value is m * 2^e with e odd.
    var e = i32(xs.y) - 214;
    var m = xs.x;
    if ((e & 1) == 0) { m = m << 1u; e -= 1; }
    // The root of m * 2^29, rounded down, and a sticky bit.
    var digits = m << 7u;
    var root = 0u;
    var rest = 0u;
    for (var i = 0u; i < 27u; i++) {
        rest = (rest << 2u) | (digits >> 30u);
        digits = digits << 2u;
        let next = (root << 2u) | 1u;
        root = root << 1u;
        if (rest >= next) { rest -= next; root |= 1u; }
    }
    root = (root << 1u) | select(0u, 1u, rest != 0u);
    return round_pack(0u, vec2<u32>(root, 0u), (e - 29) / 2 - 33 + 1000);
}
// Exact for integers below 2^24 in magnitude.
fn soft_int(i: i32) -> u32 {
    if (i == 0) { return 0u; }
    let magnitude = u32(abs(i));
    let top = firstLeadingBit(magnitude);
    return (bitcast<u32>(i) & SIGN) | ((top + 127u) << 23u) | ((magnitude << (23u - top)) & 0x7fffffu);
}
// binary16 to binary32.
fn f16_widen(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let e = (h >> 10u) & 31u;
    let m = h & 0x3ffu;
    if (e == 31u) { return sign | INF | (m << 13u); }
    if (e != 0u) { return sign | ((e + 112u) << 23u) | (m << 13u); }
    if (m == 0u) { return sign; }
    let top = firstLeadingBit(m);
    return sign | ((top + 103u) << 23u) | ((m << (23u - top)) & 0x7fffffu);
}
// binary32 to binary16, ties to even.
fn f16_round(x: u32) -> u32 {
    let sign = (x >> 16u) & 0x8000u;
    let a = x & 0x7fffffffu;
    if (a > INF) { return sign | 0x7e00u; }
    if (a >= 0x47800000u) { return sign | 0x7c00u; }
    if (a >= 0x38800000u) { return sign | ((a + 0xfffu + ((a >> 13u) & 1u) - 0x38000000u) >> 13u); }
    // Below half of the smallest subnormal.
    if (a < 0x33000000u) { return sign; }
    let shift = 126u - (a >> 23u);
    let m = (a & 0x7fffffu) | 0x800000u;
    let kept = m >> shift;
    let rest = m & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let round_up = rest > half || (rest == half && (kept & 1u) != 0u);
    return sign | (kept + select(0u, 1u, round_up));
}
// The nearest bfloat16, widened.
fn bf16_round(x: u32) -> u32 {
    if (is_nan(x)) { return NAN; }
    return (x + 0x7fffu + ((x >> 16u) & 1u)) & 0xffff0000u;
}
// Rounds to the boundary dtype: 0 is f32, 1 is f16, 2 is bf16.
fn round_to(dtype: u32, x: u32) -> u32 {
    if (dtype == 1u) { return f16_widen(f16_round(x)); }
    if (dtype == 2u) { return bf16_round(x); }
    return x;
}
