//! Encoders for blocks of 256 values (K-quants), whose sub-blocks have integer factors of the
//! block's scale.
//!
//! Factors have few bits. So the encoder searches the best scale (and minimum) per sub-block,
//! chooses the block's scale so that the largest sub-block scale gets the largest factor, and
//! rounds the values with the factors as stored. The search tries ranges somewhat wider and
//! narrower than the values', because clipping a few values often costs less than a coarser step
//! for all. For the integers of a range, the best scale is a least-squares fit.

use half::f16;

/// Values per block.
pub(super) const LARGE: usize = 256;

/// Ranges tried on either side of the values' own, a tenth of a step apart. Beyond a whole step the
/// neighbouring integers would repeat.
const TRIES: i8 = 10;

/// `1 / d`; 0 for a scale of 0.
pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value of largest magnitude, with its sign.
pub(super) fn of_largest_magnitude(values: &[f32]) -> f32 {
    values
        .iter()
        .fold(0f32, |best, &v| if v.abs() > best.abs() { v } else { best })
}

/// Ranges to try around `steps`, in steps.
fn ranges(steps: f32) -> impl Iterator<Item = f32> {
    (-TRIES..=TRIES).map(move |tenths| steps + 0.1 * f32::from(tenths))
}

/// Weight of an error at each value: large values contribute more to the output of a row. The floor
/// near zero keeps the weights above zero in a sub-block of zeros.
fn importance(values: &[f32]) -> impl Fn(f32) -> f32 + use<> {
    let squares: f32 = values.iter().map(|v| v * v).sum();
    let typical = (squares / values.len() as f32).sqrt();
    move |v| typical + v.abs()
}

/// Scale that stores the values best as integers from `-most` to `most - 1`.
fn symmetric(values: &[f32], most: f32) -> f32 {
    let largest = of_largest_magnitude(values);
    let weight = importance(values);
    let (mut scale, mut best) = (0.0, 0.0);
    // The negative end is the larger one, so the largest value goes there.
    for steps in ranges(most) {
        let id = -steps * inverse(largest);
        let (mut product, mut square) = (0.0, 0.0);
        for &v in values {
            let (q, w) = ((v * id).round().clamp(-most, most - 1.0), weight(v));
            product += w * v * q;
            square += w * q * q;
        }
        // With the fitted scale product / square, the error decreases by this amount.
        let gain = product * product * inverse(square);
        if gain > best {
            (scale, best) = (product * inverse(square), gain);
        }
    }
    scale
}

/// Scale and minimum (the negated value of integer 0, at least 0) that store the values best as
/// integers from 0 to `most`.
fn affine(values: &[f32], most: f32) -> (f32, f32) {
    // The minimum cannot express an offset above zero.
    let low = values.iter().copied().fold(0.0, f32::min);
    let high = values.iter().copied().fold(f32::MIN, f32::max);
    let weight = importance(values);
    let quant = |v: f32, id: f32| ((v - low) * id).round().clamp(0.0, most);
    let error = |(scale, min): (f32, f32), id| -> f32 {
        let errors = values
            .iter()
            .map(|&v| weight(v) * (scale * quant(v, id) - min - v).powi(2));
        errors.sum()
    };
    let step = (high - low) / most;
    let mut fit = (step, -low);
    let mut best = error(fit, inverse(step));
    for steps in ranges(most) {
        let id = steps * inverse(high - low);
        let [mut w0, mut wq, mut wqq, mut wv, mut wqv] = [0.0; 5];
        for &v in values {
            let (q, w) = (quant(v, id), weight(v));
            w0 += w;
            wq += w * q;
            wqq += w * q * q;
            wv += w * v;
            wqv += w * q * v;
        }
        let determinant = inverse(w0 * wqq - wq * wq);
        let mut tried = (
            (w0 * wqv - wq * wv) * determinant,
            (wq * wqv - wqq * wv) * determinant,
        );
        if tried.1 < 0.0 {
            tried = (wqv * inverse(wqq), 0.0);
        }
        let total = error(tried, id);
        if tried.0 > 0.0 && total < best {
            (fit, best) = (tried, total);
        }
    }
    fit
}

/// Four bits, with a scale and a minimum of six bits per 32 values.
pub(super) fn encode_q4_k(values: &[f32; LARGE], out: &mut Vec<u8>) {
    let (parts, _) = values.as_chunks::<32>();
    let fits: Vec<(f32, f32)> = parts.iter().map(|part| affine(part, 15.0)).collect();
    let d = f16::from_f32(fits.iter().map(|fit| fit.0).fold(0.0, f32::max) / 63.0);
    let m = f16::from_f32(fits.iter().map(|fit| fit.1).fold(0.0, f32::max) / 63.0);
    let (scale, min) = (d.to_f32(), m.to_f32());
    let mut factors = [0u8; 12];
    let mut quants = [0u8; LARGE];
    for (s, (&(fit, fit_min), part)) in fits.iter().zip(parts).enumerate() {
        let sc = (fit * inverse(scale)).round().min(63.0) as u8;
        let mc = (fit_min * inverse(min)).round().min(63.0) as u8;
        // The high two bits of the last four sub-blocks fill up the bytes of the first four.
        if s < 4 {
            factors[s] = sc;
            factors[s + 4] = mc;
        } else {
            factors[s + 4] = sc & 15 | mc << 4;
            factors[s - 4] |= sc >> 4 << 6;
            factors[s] |= mc >> 4 << 6;
        }
        let (id, low) = (inverse(scale * f32::from(sc)), min * f32::from(mc));
        for (quant, v) in quants[32 * s..].iter_mut().zip(part) {
            *quant = ((v + low) * id).round().min(15.0) as u8;
        }
    }
    out.extend(d.to_le_bytes());
    out.extend(m.to_le_bytes());
    out.extend(factors);
    for pair in quants.chunks_exact(64) {
        let (low, high) = pair.split_at(32);
        out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
    }
}

/// Six bits, with a scale of eight bits per 16 values.
pub(super) fn encode_q6_k(values: &[f32; LARGE], out: &mut Vec<u8>) {
    let (parts, _) = values.as_chunks::<16>();
    let fits: Vec<f32> = parts.iter().map(|part| symmetric(part, 32.0)).collect();
    let largest = of_largest_magnitude(&fits);
    // The negative end is the larger one here too.
    let d = f16::from_f32(largest / -128.0);
    let scale = d.to_f32();
    let factors: Vec<i8> = fits
        .iter()
        .map(|fit| (fit * inverse(scale)).round() as i8)
        .collect();
    let mut quants = [0u8; LARGE];
    let rows = quants.as_chunks_mut::<16>().0.iter_mut();
    for ((quants, part), factor) in rows.zip(parts).zip(&factors) {
        let id = inverse(scale * f32::from(*factor));
        for (quant, v) in quants.iter_mut().zip(part) {
            *quant = ((v * id).round().clamp(-32.0, 31.0) + 32.0) as u8;
        }
    }
    // Of 128 values, the first 64 have the low nibbles, the others the high ones.
    for half in quants.chunks_exact(128) {
        let (low, high) = half.split_at(64);
        out.extend(low.iter().zip(high).map(|(a, b)| a & 15 | b << 4));
    }
    for half in quants.chunks_exact(128) {
        let (parts, _) = half.as_chunks::<32>();
        out.extend((0..32).map(|l| {
            let bits = parts.iter().map(|part| part[l] >> 4);
            bits.rev().fold(0, |byte, bits| byte << 2 | bits)
        }));
    }
    out.extend(factors.iter().map(|factor| factor.cast_unsigned()));
    out.extend(d.to_le_bytes());
}
