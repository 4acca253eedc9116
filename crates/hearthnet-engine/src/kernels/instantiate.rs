//! The kernels of each instruction set: generic functions, compiled with its target features.

use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, CacheDtype};

use super::act::Act;
use super::attention::{self, Attention, AttentionScratch};
use super::matmul::{self, Job, PanelDots};
use super::portable::lanes::Array;
use super::portable::matmul::Portable;
use super::shared::{SharedMut, TileMut};
#[cfg(target_arch = "x86_64")]
use super::x86::{avx2::Avx2, avx2::AvxVnni, avx512::Avx512, lanes};
use super::{delta, kv, mamba, rope, rows};

/// Table of the inner kernels `$dot` of all weight types.
macro_rules! dots {
    ($dot:ident: $($ty:literal)*) => {
        const { &[$(PanelDots::of::<$dot<$ty>>()),*] }
    };
    ($dot:ident) => {
        dots!($dot: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
}

/// Defines functions with target features that call generic ones, which are inlined.
macro_rules! functions {
    (
        #[$features:meta]
        $($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $function:expr;)*
    ) => {
        $(
            #[$features]
            #[allow(unused_unsafe)] // Some of the functions are safe.
            pub(in crate::kernels) unsafe fn $name($($argument: $type),*) $(-> $result)? {
                // SAFETY: `Kernels` has found the instruction set, and checks every length. For
                // `store_kv`, the caller guarantees the cells.
                unsafe { $function($($argument),*) }
            }
        )*
    };
}

/// Instantiates the kernels for one instruction set: the module `$name`.
macro_rules! kernels {
    (#[$features:meta] mod $name:ident, $lanes:ty, $wide:literal, $dot:ident) => {
        pub(super) mod $name {
            use crate::kernels::instantiate::*;

            functions! {
                #[$features]
                rms_norm_in_place(x: &mut [f32], w: &[f32], eps: f32)
                    = rows::rms_norm_in_place::<$lanes>;
                layer_norm_in_place(x: &mut [f32], w: &[f32], b: &[f32], eps: f32)
                    = rows::layer_norm_in_place::<$lanes>;
                gelu_erf(x: &mut [f32]) = rows::gelu_erf::<$lanes>;
                prepare(x: &[f32], norm: Option<(&[f32], f32)>, act: &mut Act)
                    = rows::prepare::<$lanes>;
                gate(activation: Activation, g: &mut [f32], u: &[f32]) = rows::gate::<$lanes>;
                softcap(x: &mut [f32], cap: f32) = rows::softcap::<$lanes>;
                add_scaled(sum: &mut [f32], x: &[f32], factor: f32) = rows::add_scaled;
                exp(x: &mut [f32]) = rows::exp::<$lanes>;
                silu(x: &mut [f32]) = rows::activate::<$lanes, false>;
                sigmoid(x: &mut [f32]) = rows::activate::<$lanes, true>;
                l2_norm(x: &mut [f32], width: usize, eps: f32, scale: f32) = rows::l2_norm;
                convolve(convolution: &delta::Convolution<'_>, window: &[f32], out: &mut [f32])
                    = delta::convolve;
                delta_rule(rows: &delta::DeltaRows<'_>, state: &mut [f32], values: &mut [f32])
                    = delta::rule;
                mamba_scan(rows: &mamba::MambaRows<'_>, state: &mut [f32], values: &mut [f32])
                    = mamba::scan;
                squared_relu(x: &mut [f32]) = rows::squared_relu::<$lanes>;
                add_round(x: &mut [f32], y: &[f32], dtype: BoundaryDtype) = rows::add_round;
                rope(row: &rope::RopeRow<'_>, x: &mut [f32], head_dim: usize) = rows::rope;
                store_kv(
                    page: SharedMut<'_, u16>,
                    cache: CacheDtype,
                    slot: usize,
                    key: &[f32],
                    value: &[f32]
                ) = kv::store::<$lanes>;
                all_finite(x: &[f32]) -> bool = rows::all_finite;
                attention(
                    a: &Attention<'_>,
                    q: &[f32],
                    stride: usize,
                    scratch: &mut AttentionScratch,
                    out: &mut TileMut<'_>
                ) = attention::attend::<Loops>;
            }

            #[$features]
            pub(in crate::kernels) unsafe fn matmul(job: &mut Job<'_>) {
                // SAFETY: `Kernels` has found the instruction set and checked the job.
                unsafe { matmul::run::<$lanes>(job, dots!($dot)) };
            }

            struct Loops;

            impl attention::Inner for Loops {
                type V = $lanes;
                const WIDE: bool = $wide;

                #[$features]
                #[inline(never)]
                unsafe fn score<E: kv::Cells, const N: usize, const B: usize>(
                    page: *const u16,
                    next: Option<*const u16>,
                    a: &Attention<'_>,
                    vectors: *const f32,
                    to: *mut f32,
                    stride: usize,
                ) {
                    // SAFETY: the caller ensures the instruction set, and the room that `Inner`
                    // requires.
                    unsafe {
                        attention::score::<$lanes, E, N, B>(page, next, a, vectors, to, stride)
                    };
                }

                #[$features]
                #[inline(never)]
                unsafe fn mix<E: kv::Cells, const N: usize, const C: usize>(
                    a: &Attention<'_>,
                    column: usize,
                    positions: Range<usize>,
                    ahead: bool,
                    weights: *const f32,
                    stride: usize,
                    sums: *mut f32,
                ) {
                    // SAFETY: the caller ensures the instruction set, and the room that `Inner`
                    // requires.
                    unsafe {
                        attention::mix::<$lanes, E, N, C>(
                            a, column, positions, ahead, weights, stride, sums,
                        );
                    };
                }
            }
        }
    };
}

kernels!(
    /// Needs no target feature.
    mod portable, Array, false, Portable
);
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx2,fma,f16c")]
    mod avx2, lanes::Avx2, false, Avx2
);
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    mod avx512, lanes::Avx512, true, Avx512
);

/// As `avx2::matmul`, with the dot products of AVX-VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul_vnni(job: &mut Job<'_>) {
    // SAFETY: `Kernels` has found AVX2 and checked the job, as for `avx2::matmul`.
    unsafe { matmul::run::<lanes::Avx2>(job, dots!(AvxVnni)) };
}
