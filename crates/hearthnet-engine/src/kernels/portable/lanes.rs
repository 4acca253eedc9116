//! [`Lanes`] in a plain array.

use hearthnet_files::floats::{bf16_to_f32, f16_to_f32, f32_to_f16};

use super::super::lanes::{LANES, Lanes};

/// Portable lanes, in a form that compilers vectorise.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(in super::super) struct Array([f32; LANES]);

impl Array {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (x, y) in out.iter_mut().zip(b.0) {
            *x = f(*x, y);
        }
        Self(out)
    }
}

impl Lanes for Array {
    methods! {
        splat(x: f32) -> Self = Self([x; LANES]);
        load(p: *const f32) -> Self = Self(p.cast::<[f32; LANES]>().read_unaligned());
        store(self, p: *mut f32) = p.cast::<[f32; LANES]>().write_unaligned(self.0);
        load_f16(p: *const u16) -> Self
            = Self(p.cast::<[u16; LANES]>().read_unaligned().map(f16_to_f32));
        load_bf16(p: *const u16) -> Self
            = Self(p.cast::<[u16; LANES]>().read_unaligned().map(bf16_to_f32));
        load_i8(p: *const i8) -> Self
            = Self(p.cast::<[i8; LANES]>().read_unaligned().map(f32::from));
        store_f16(self, p: *mut u16)
            = p.cast::<[u16; LANES]>().write_unaligned(self.0.map(f32_to_f16));
        add(self, b: Self) -> Self = self.zip(b, |x, y| x + y);
        sub(self, b: Self) -> Self = self.zip(b, |x, y| x - y);
        mul(self, b: Self) -> Self = self.zip(b, |x, y| x * y);
        div(self, b: Self) -> Self = self.zip(b, |x, y| x / y);
        fma(self, b: Self, c: Self) -> Self = {
            let mut out = c.0;
            for ((z, x), y) in out.iter_mut().zip(self.0).zip(b.0) {
                *z = x.mul_add(y, *z);
            }
            Self(out)
        };
        max(self, b: Self) -> Self = self.zip(b, |x, y| if x > y { x } else { y });
        min(self, b: Self) -> Self = self.zip(b, |x, y| if x < y { x } else { y });
        zero_where_less(self, bound: Self, value: Self) -> Self = {
            let mut out = value.0;
            for ((z, x), y) in out.iter_mut().zip(self.0).zip(bound.0) {
                *z = if x < y { 0.0 } else { *z };
            }
            Self(out)
        };
        max_magnitude(self, b: Self) -> Self = self.zip(b, |x, y| {
            f32::from_bits(x.abs().to_bits().max(y.abs().to_bits()))
        });
        top_bits(self) -> u32 = self.0.iter().fold(0, |top, x| top.max(x.to_bits()));
        exp2_of_rounded(self) -> Self = Self(
            self.0.map(|x| f32::from_bits(x.to_bits().wrapping_add(127) << 23)),
        );
        store_low_bytes(self, p: *mut i8)
            = p.cast::<[i8; LANES]>().write_unaligned(self.0.map(|x| x.to_bits() as i8));
    }
}
