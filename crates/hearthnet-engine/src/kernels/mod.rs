//! The numeric kernels of the exact CPU engine.
//!
//! Everything here is single-threaded and works on a *tile*: a few rows of tokens
//! (1 to 8 while decoding, 64 or more in prefill), and, for matrices, a range of
//! *panels* of 16 outputs. The engine above splits panels between its threads when
//! there are few rows, rows when there are many.
//!
//! Every function gives the same bits on every instruction set ([`Isa`]), for every
//! size of tile and every split; `specs/canonical-arithmetic.md` says which bits.
//! A row never depends on the rows beside it. Two NaNs count as the same bits.
//!
//! | what | where |
//! |---|---|
//! | sixteen lanes of `f32`, per instruction set | `lanes` |
//! | weights: types, repacking, memory | [`Packed`], [`Arena`] |
//! | activations: normalise, quantise | [`Kernels::norm_prepare`], [`Kernels::prepare`], [`Act`] |
//! | matrices | [`Kernels::matmul`], [`Kernels::matmul_swiglu`] |
//! | rotation | [`Kernels::rope`], [`RopeTable`] |
//! | cache layout, attention | [`Kernels::store_kv`], [`Kernels::attention`] |
//!
//! Lengths are checked on entry; a wrong length panics. Shapes come from a model that
//! [`Packed::pack`] and the engine have accepted, so a wrong length is a bug of the caller and
//! never caused by input.

// Needed for the intrinsics, their pointers and the shared buffers. Every block states why it is
// sound.
#![allow(unsafe_code)]
// Indices run over several arrays in step; iterators would hide the arithmetic.
#![allow(clippy::needless_range_loop)]

mod act;
mod arena;
mod attention;
mod kv;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_x86;
mod math;
mod matmul;
mod pack;
mod record;
mod rope;
mod rows;
mod shared;

use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::{BLOCK, WeightType};
use hearthnet_files::spec::Activation;

#[cfg(target_arch = "x86_64")]
use matmul::avx2::{Avx2, AvxVnni};
#[cfg(target_arch = "x86_64")]
use matmul::avx512::Avx512;
use matmul::portable::Portable;
use matmul::{Job, PanelDots};

pub(crate) use act::grow;
pub use act::{Act, ActForm};
pub use arena::{Arena, F16Buffer};
pub use attention::{Attention, AttentionScratch};
#[cfg(test)]
pub(crate) use kv::tests::write_kv;
pub use kv::{PAGE, key_cell, page_len, value_cell};
pub use lanes::LANES;
pub use matmul::Output;
pub use pack::{Matrix, Packed};
pub use rope::RopeTable;
pub use rows::fold16;
pub use shared::{SharedMut, Tile, TileMut};

/// Why weights cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The number of inputs is zero or not whole blocks of the weight type.
    #[error("a matrix has {cols} inputs, which is not a positive multiple of {block}")]
    Columns { cols: usize, block: usize },
    #[error("a matrix has no outputs")]
    NoRows,
    /// The data does not have the length that type and shape require.
    #[error("a matrix should have {expected} bytes and has {found}")]
    Length { expected: usize, found: usize },
    /// Matrices to be packed together differ in type or shape.
    #[error("matrices that belong together differ in type or shape")]
    Mismatch,
    /// In a stack, a matrix would start after this many outputs, within a panel.
    #[error("matrices cannot be stacked after {0} outputs, which is not a multiple of 16")]
    PartialPanel(usize),
    /// The size does not fit the address space.
    #[error("a matrix is too large for this machine's address space")]
    TooLarge,
    /// The operating system refused the memory for the weights.
    #[error("no memory for the weights; hold fewer layers or free some memory")]
    OutOfMemory(#[source] std::io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust; the reference for the others.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// `Avx2` with AVX-VNNI: Intel's consumer CPUs since 2021, which lack AVX-512.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// Best instruction set of this CPU.
    pub fn detect() -> Self {
        Self::available()
            .into_iter()
            .max()
            .unwrap_or(Self::Portable)
    }

    /// Instruction sets of this CPU, [`Isa::Portable`] first and the best last.
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512]
            .into_iter()
            .filter(|isa| isa.usable())
            .collect()
    }

    /// Lower-case name, as [`FromStr`](std::str::FromStr) reads it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
        }
    }

    fn usable(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.usable() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.usable()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::AvxVnni | Self::Avx512 => false,
        }
    }
}

impl std::str::FromStr for Isa {
    type Err = String;

    /// Accepts only instruction sets that this CPU has.
    fn from_str(name: &str) -> Result<Self, String> {
        let available = Self::available();
        let found = available.iter().find(|isa| isa.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            format!("{name:?} is not one of {}", names.join(", "))
        })
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The kernels of one instruction set. See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

/// Multiplies with the kernel of the matrix's type.
macro_rules! matrices {
    ($job:ident, $lanes:ty, $dot:ident) => {{
        use WeightType as T;
        let kernel = match $job.packed.weight_type() {
            T::F32 => const { &PanelDots::of::<$dot<{ T::F32 as usize }>>() },
            T::F16 => const { &PanelDots::of::<$dot<{ T::F16 as usize }>>() },
            T::BF16 => const { &PanelDots::of::<$dot<{ T::BF16 as usize }>>() },
            T::Q4_0 => const { &PanelDots::of::<$dot<{ T::Q4_0 as usize }>>() },
            T::Q4_1 => const { &PanelDots::of::<$dot<{ T::Q4_1 as usize }>>() },
            T::Q5_0 => const { &PanelDots::of::<$dot<{ T::Q5_0 as usize }>>() },
            T::Q5_1 => const { &PanelDots::of::<$dot<{ T::Q5_1 as usize }>>() },
            T::Q8_0 => const { &PanelDots::of::<$dot<{ T::Q8_0 as usize }>>() },
            T::Q2_K => const { &PanelDots::of::<$dot<{ T::Q2_K as usize }>>() },
            T::Q3_K => const { &PanelDots::of::<$dot<{ T::Q3_K as usize }>>() },
            T::Q4_K => const { &PanelDots::of::<$dot<{ T::Q4_K as usize }>>() },
            T::Q5_K => const { &PanelDots::of::<$dot<{ T::Q5_K as usize }>>() },
            T::Q6_K => const { &PanelDots::of::<$dot<{ T::Q6_K as usize }>>() },
            T::IQ4_NL => const { &PanelDots::of::<$dot<{ T::IQ4_NL as usize }>>() },
            T::IQ4_XS => const { &PanelDots::of::<$dot<{ T::IQ4_XS as usize }>>() },
            T::MXFP4 => const { &PanelDots::of::<$dot<{ T::MXFP4 as usize }>>() },
        };
        matmul::run::<$lanes>($job, kernel);
    }};
}

/// Instantiates the kernels for one instruction set: the module `$name`.
macro_rules! kernels {
    ($(#[$attribute:meta])* mod $name:ident, $lanes:ty, $tile:literal, $chunks:literal, $dot:ident) => {
        mod $name {
            use crate::kernels::*;

            $(#[$attribute])*
            pub(super) unsafe fn rms_norm_in_place(x: &mut [f32], w: &[f32], eps: f32) {
                for x in x.chunks_exact_mut(w.len()) {
                    let x = x.as_mut_ptr();
                    // SAFETY: `Kernels` has found the instruction set, and checks every length.
                    unsafe { rows::rms_norm::<$lanes>(x, w, eps, x) };
                }
            }

            $(#[$attribute])*
            pub(super) unsafe fn prepare(x: &[f32], norm: Option<(&[f32], f32)>, act: &mut Act) {
                let (cols, form) = (act.cols, act.form);
                for (row, x) in x.chunks_exact(cols).enumerate() {
                    let kept = if form.plain { row * cols } else { 0 };
                    let plain = &mut act.plain[kept..kept + cols];
                    let values = match norm {
                        Some((w, eps)) => {
                            // SAFETY: `Kernels` has found the instruction set, and checks every
                            // length.
                            unsafe {
                                rows::rms_norm::<$lanes>(x.as_ptr(), w, eps, plain.as_mut_ptr());
                            }
                            &*plain
                        }
                        None if form.plain => {
                            plain.copy_from_slice(x);
                            x
                        }
                        None => x,
                    };
                    if form.quantised {
                        let quants = &mut act.quants[row * cols..][..cols];
                        let meta = &mut act.meta[row * (cols / BLOCK)..][..cols / BLOCK];
                        // SAFETY: `Kernels` has found the instruction set, and checks every length.
                        unsafe { rows::quantise::<$lanes>(values, quants, meta) };
                    }
                }
            }

            $(#[$attribute])*
            pub(super) unsafe fn gate(activation: Activation, g: &mut [f32], u: &[f32]) {
                let (n, h) = (g.len().min(u.len()), g.as_mut_ptr());
                // SAFETY: `Kernels` has found the instruction set; `n` values behind each pointer.
                unsafe {
                    match activation {
                        Activation::Silu => rows::swiglu::<$lanes>(h, u.as_ptr(), h, n),
                        Activation::Gelu => rows::geglu::<$lanes>(g, u),
                        Activation::Clamped => rows::clamped_swiglu::<$lanes>(g, u),
                    }
                }
            }

            $(#[$attribute])*
            pub(super) unsafe fn softcap(x: &mut [f32], cap: f32) {
                // SAFETY: `Kernels` has found the instruction set, and checks every length.
                unsafe { rows::softcap::<$lanes>(x, cap) };
            }

            $(#[$attribute])*
            pub(super) unsafe fn add_scaled(sum: &mut [f32], x: &[f32], factor: f32) {
                rows::add_scaled(sum, x, factor);
            }

            $(#[$attribute])*
            pub(super) unsafe fn exp(x: &mut [f32]) {
                // SAFETY: `Kernels` has found the instruction set, and checks every length.
                unsafe { rows::exp::<$lanes>(x) };
            }

            $(#[$attribute])*
            pub(super) unsafe fn add_round(x: &mut [f32], y: &[f32], dtype: BoundaryDtype) {
                rows::add_round(x, y, dtype);
            }

            $(#[$attribute])*
            pub(super) unsafe fn rope(row: &rope::RopeRow<'_>, x: &mut [f32], head_dim: usize) {
                rows::rope(row, x, head_dim);
            }

            $(#[$attribute])*
            pub(super) unsafe fn store_kv(
                page: SharedMut<'_, u16>,
                slot: usize,
                key: &[f32],
                value: &[f32],
            ) {
                // SAFETY: `Kernels` has found the instruction set; the caller guarantees the cells.
                unsafe { kv::store::<$lanes>(page, slot, key, value) };
            }

            $(#[$attribute])*
            pub(super) unsafe fn all_finite(x: &[f32]) -> bool {
                rows::all_finite(x)
            }

            $(#[$attribute])*
            pub(super) unsafe fn attention(
                a: &Attention<'_>,
                q: Tile<'_>,
                scratch: &mut AttentionScratch,
                out: &mut TileMut<'_>,
            ) {
                // SAFETY: `Kernels` has found the instruction set, and checks every length.
                unsafe { attention::attend::<Loops>(a, q, scratch, out) };
            }

            struct Loops;

            impl attention::Inner for Loops {
                type V = $lanes;
                const TILE: usize = $tile;
                const CHUNKS: usize = $chunks;

                $(#[$attribute])*
                #[inline(never)]
                unsafe fn score<const N: usize, const B: usize>(
                    page: *const u16,
                    a: &Attention<'_>,
                    vectors: *const f32,
                    to: *mut f32,
                    stride: usize,
                ) {
                    // SAFETY: the caller ensures the instruction set, and the room that `Inner`
                    // requires.
                    unsafe { attention::score::<$lanes, N, B>(page, a, vectors, to, stride) };
                }

                $(#[$attribute])*
                #[inline(never)]
                unsafe fn mix<const N: usize, const C: usize>(
                    a: &Attention<'_>,
                    column: usize,
                    positions: Range<usize>,
                    weights: *const f32,
                    stride: usize,
                    sums: *mut f32,
                ) {
                    // SAFETY: the caller ensures the instruction set, and the room that `Inner`
                    // requires.
                    unsafe {
                        attention::mix::<$lanes, N, C>(a, column, positions, weights, stride, sums);
                    };
                }
            }

            $(#[$attribute])*
            pub(super) unsafe fn matmul(job: &mut Job<'_>) {
                // SAFETY: `Kernels` has found the instruction set and checked the job; the kernel
                // is that of the matrix's type.
                unsafe { matrices!(job, $lanes, $dot) };
            }
        }
    };
}

kernels!(mod portable, lanes::Array, 6, 1, Portable);
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx2,fma,f16c")]
    mod avx2, lanes_x86::Avx2, 6, 1, Avx2
);
/// As `avx2::matmul`, with the dot products of AVX-VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn matmul_vnni(job: &mut Job<'_>) {
    // SAFETY: `Kernels` has found AVX2 and checked the job, as for `avx2::matmul`.
    unsafe { matrices!(job, lanes_x86::Avx2, AvxVnni) };
}
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    mod avx512, lanes_x86::Avx512, 12, 4, Avx512
);

/// Calls `$function` of the instruction set's module.
macro_rules! dispatch {
    ($self:ident, $function:ident($($argument:expr),*)) => {
        match $self.isa {
            // SAFETY: `isa` was found on this CPU; lengths are checked by the caller.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function($($argument),*) },
            // SAFETY: AVX2 was found on this CPU; lengths are checked by the caller.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => unsafe { avx2::$function($($argument),*) },
            // SAFETY: plain Rust runs everywhere; lengths are checked by the caller.
            _ => unsafe { portable::$function($($argument),*) },
        }
    };
}

impl Kernels {
    /// The kernels for `isa`, if this CPU has it.
    pub fn new(isa: Isa) -> Option<Self> {
        isa.usable().then_some(Self { isa })
    }

    /// The kernels for the best instruction set of this CPU.
    pub fn best() -> Self {
        Self { isa: Isa::detect() }
    }

    pub fn isa(self) -> Isa {
        self.isa
    }

    /// In-place RMS normalisation of rows, `x` as `[rows][weight.len()]`:
    /// `x = x / sqrt(mean(x²) + eps) * weight`.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn rms_norm_in_place(self, x: &mut [f32], weight: &[f32], eps: f32) {
        check_rows(x.len(), weight.len());
        dispatch!(self, rms_norm_in_place(x, weight, eps));
    }

    /// Converts rows of activations, `x` as `[rows][cols]`, into the forms that
    /// matrices read ([`ActForm::of`]).
    ///
    /// # Panics
    /// When `x` is not whole rows, or the quantised form is wanted and `cols` is
    /// not a multiple of 32.
    pub fn prepare(self, x: &[f32], cols: usize, form: ActForm, act: &mut Act) {
        check_rows(x.len(), cols);
        act.shape(x.len() / cols, cols, form);
        dispatch!(self, prepare(x, None, act));
    }

    /// [`Kernels::rms_norm_in_place`] and [`Kernels::prepare`] in one pass per row; `x` stays
    /// unchanged. If `form.plain` is set, [`Act::plain`] returns the normalised values.
    ///
    /// # Panics
    /// When `x` is not whole rows, or as [`Kernels::prepare`].
    pub fn norm_prepare(self, x: &[f32], weight: &[f32], eps: f32, form: ActForm, act: &mut Act) {
        check_rows(x.len(), weight.len());
        act.shape(x.len() / weight.len(), weight.len(), form);
        dispatch!(self, prepare(x, Some((weight, eps)), act));
    }

    /// Multiplies `act` with the outputs of `panels` (16 each) of a matrix.
    ///
    /// `out` has a row per activation row and a column per output of the panels (the last panel
    /// may have fewer than 16). Column 0 is the first output of `panels.start`. Threads take
    /// disjoint panels and the [`SharedMut::tile_mut`] of their columns.
    ///
    /// # Panics
    /// When shapes differ, `act` lacks the form that the weights need, or the matrix
    /// is a gated pair.
    pub fn matmul(
        self,
        packed: &Packed,
        panels: Range<usize>,
        act: &Act,
        output: Output,
        out: TileMut<'_>,
    ) {
        assert!(
            !packed.gated(),
            "a gated pair is multiplied by matmul_swiglu"
        );
        self.run(Job {
            packed,
            panels,
            act,
            output,
            out,
        });
    }

    /// Multiplies `act` with a gate and an up projection
    /// ([`Packed::pack_gate_up`]) and stores `silu(gate) * up`. Panels and `out` as
    /// in [`Kernels::matmul`].
    ///
    /// # Panics
    /// As [`Kernels::matmul`], and when the matrix is not a gated pair.
    pub fn matmul_swiglu(self, packed: &Packed, panels: Range<usize>, act: &Act, out: TileMut<'_>) {
        assert!(packed.gated(), "not a gated pair");
        self.run(Job {
            packed,
            panels,
            act,
            output: Output::Store,
            out,
        });
    }

    fn run(self, mut job: Job<'_>) {
        let Job {
            packed,
            panels,
            act,
            out,
            ..
        } = &job;
        if panels.is_empty() {
            return;
        }
        assert!(panels.end <= packed.panels(), "panels beyond the matrix");
        let outputs = packed.rows().min(panels.end * LANES) - panels.start * LANES;
        assert_eq!(act.cols(), packed.cols(), "activations of another width");
        assert_eq!(
            (out.rows(), out.cols()),
            (act.rows(), outputs),
            "an output of another shape"
        );
        let form = act.form();
        let fits = if packed.weight_type().quantised() {
            form.quantised
        } else {
            form.plain
        };
        assert!(fits, "activations lack the form that the weights want");
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::AvxVnni {
            // SAFETY: `isa` was found on this CPU; the job is checked.
            return unsafe { matmul_vnni(&mut job) };
        }
        dispatch!(self, matmul(&mut job));
    }

    /// `gate = activation(gate) * up`, element by element ([`Activation::Clamped`] has a formula
    /// of its own), for gate and up projections that were not packed as a pair.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn gate(self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gate and up differ in length");
        dispatch!(self, gate(activation, gate, up));
    }

    /// `x = cap * tanh(x / cap)`, element by element.
    pub fn softcap(self, x: &mut [f32], cap: f32) {
        dispatch!(self, softcap(x, cap));
    }

    /// `sum = fma(x, factor, sum)`, element by element; adds up the outputs of experts.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_scaled(self, sum: &mut [f32], x: &[f32], factor: f32) {
        assert_eq!(sum.len(), x.len(), "the two differ in length");
        dispatch!(self, add_scaled(sum, x, factor));
    }

    /// e^x in place; relative error below 1.2e-7, +0 below -87, e^88 above 88.
    pub fn exp(self, x: &mut [f32]) {
        dispatch!(self, exp(x));
    }

    /// `x = round(x + y)`, element by element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_round(self, x: &mut [f32], y: &[f32], dtype: BoundaryDtype) {
        assert_eq!(x.len(), y.len(), "the two differ in length");
        dispatch!(self, add_round(x, y, dtype));
    }

    /// Returns true if no value is a NaN or an infinity.
    pub fn all_finite(self, x: &[f32]) -> bool {
        dispatch!(self, all_finite(x))
    }

    /// Rotates the heads of one row, `x` as `[heads][head_dim]`, in place by the
    /// angles of `position`. Values of a head beyond [`RopeTable::dims`] stay unchanged.
    ///
    /// # Panics
    /// When `x` is not whole heads, the table does not cover `position` or is wider
    /// than a head.
    pub fn rope(self, table: &RopeTable, position: usize, x: &mut [f32], head_dim: usize) {
        check_rows(x.len(), head_dim);
        assert!(table.dims() <= head_dim, "a rotation wider than the head");
        dispatch!(self, rope(&table.row(position), x, head_dim));
    }

    /// Writes one position's key and value, rounded to binary16 (nearest even).
    ///
    /// # Safety
    /// No other thread reads or writes the cells of this slot during the call. Other
    /// slots of the page may be in use.
    ///
    /// # Panics
    /// When `page` is not [`page_len`] long for `key.len()`, `value` has another
    /// length than `key`, or the slot is not below [`PAGE`].
    pub unsafe fn store_kv(
        self,
        page: SharedMut<'_, u16>,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        kv::check(page.len(), slot, key.len(), value.len());
        dispatch!(self, store_kv(page, slot, key, value));
    }

    /// Causal attention of consecutive positions of one sequence over the cache of
    /// one key/value head.
    ///
    /// `q` and `out` have a row per position and `a.heads * a.head_dim` columns (some or all of
    /// the query heads that share the key/value head).
    ///
    /// # Panics
    /// When shapes do not fit, or the pages do not cover the last row's position.
    pub fn attention(
        self,
        a: &Attention<'_>,
        q: Tile<'_>,
        scratch: &mut AttentionScratch,
        mut out: TileMut<'_>,
    ) {
        assert!(
            a.head_dim > 0 && a.head_dim.is_multiple_of(8),
            "a head width that is not 8 n"
        );
        assert!(
            a.heads > 0 && q.cols() == a.heads * a.head_dim,
            "queries of another width"
        );
        assert_eq!(
            (out.rows(), out.cols()),
            (q.rows(), q.cols()),
            "an output of another shape"
        );
        assert_ne!(a.window, Some(0), "a window without positions");
        assert!(
            a.sinks.is_none_or(|sinks| sinks.len() == a.heads),
            "sinks of other heads"
        );
        assert!(
            (a.position + q.rows()).div_ceil(PAGE) <= a.pages.len(),
            "missing pages"
        );
        assert!(
            a.pages.iter().all(|p| p.len() == page_len(a.head_dim)),
            "pages of another width"
        );
        dispatch!(self, attention(a, q, scratch, &mut out));
    }
}

fn check_rows(len: usize, cols: usize) {
    assert!(
        cols > 0 && len.is_multiple_of(cols),
        "a buffer that is not whole rows"
    );
}

#[cfg(test)]
mod tests;
