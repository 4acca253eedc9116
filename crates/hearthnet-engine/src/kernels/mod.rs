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
//! A folder has the code of one processor family: `portable` (plain Rust, for all) and `x86`. It
//! implements `Lanes` and `PanelDot`. From a call to the instructions:
//!
//! ```text
//! Kernels::matmul(packed, panels, act, ..)   checks all shapes                    mod.rs
//!   dispatch!(matmul)                        -> avx512::matmul, by `Isa`          mod.rs
//!     kernels!(mod avx512, ..)               functions with target features       instantiate.rs
//!       matmul::run::<Lanes>                 walks panels and rows; output        matmul/mod.rs
//!         dots!(Avx512)                      pointers by weight type              instantiate.rs
//!           PanelDots                        ... by numbers of panels and rows    matmul/mod.rs
//!             PanelDot::dot                  inner loop of a weight type          x86/avx512.rs
//! Kernels::exp(x)                            likewise: dispatch!, kernels!,       mod.rs
//!   rows::exp::<Lanes>                       a loop over `Lanes`                  rows.rs
//! ```
//!
//! | what | where |
//! |---|---|
//! | sixteen lanes of `f32` | `lanes`; per instruction set in `portable` and `x86` |
//! | weights: types, repacking, memory | [`Packed`], [`Arena`] |
//! | activations: normalise, quantise | [`Kernels::norm_prepare`], [`Kernels::prepare`], [`Act`] |
//! | matrices | [`Kernels::matmul`], [`Kernels::matmul_swiglu`] |
//! | rotation | [`Kernels::rope`], [`RopeTable`] |
//! | cache layout, attention | [`Kernels::store_kv`], [`Kernels::attention`] |
//! | convolution, delta rule, Mamba-2 | [`Kernels::convolve`], [`Kernels::delta_rule`], [`Kernels::mamba_scan`] |
//!
//! Lengths are checked on entry; a wrong length panics. Shapes come from a model that
//! [`Packed`] and the engine have accepted, so a wrong length is a bug of the caller and
//! never caused by input.

// Needed for the intrinsics, their pointers and the shared buffers. Every block states why it is
// sound.
#![allow(unsafe_code)]
// Indices run over several arrays in step; iterators would hide the arithmetic.
#![allow(clippy::needless_range_loop)]

mod act;
mod arena;
mod attention;
mod delta;
mod error;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod instantiate;
mod isa;
mod kv;
#[macro_use]
mod lanes;
mod mamba;
mod math;
mod matmul;
mod pack;
mod portable;
mod record;
mod rope;
mod rows;
mod shared;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::{Activation, CacheDtype};

use matmul::Job;
#[cfg(not(target_arch = "x86_64"))]
use portable::{prefetch, prefetch_l2};
#[cfg(target_arch = "x86_64")]
use x86::{prefetch, prefetch_l2};

pub(crate) use act::grow;
pub use act::{Act, ActForm};
pub use arena::{Arena, F16Buffer};
pub use attention::{Attention, AttentionScratch};
pub use delta::{Convolution, DeltaRows, softplus};
pub use error::PackError;
pub use isa::Isa;
pub use kv::{PAGE, key_cell, page_len, value_cell};
pub use lanes::LANES;
pub use mamba::MambaRows;
pub use matmul::Output;
pub use pack::{Matrix, Packed};
pub use rope::RopeTable;
pub use rows::fold16;
pub use shared::{SharedMut, TileMut};
#[cfg(test)]
pub(crate) use tests::write_kv;

/// The kernels of one instruction set. See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

/// Calls `$function` of the instruction set's module.
macro_rules! dispatch {
    ($self:ident, $function:ident($($argument:expr),*)) => {
        match $self.isa {
            // SAFETY: plain Rust runs everywhere; lengths are checked by the caller.
            Isa::Portable => unsafe { instantiate::portable::$function($($argument),*) },
            // SAFETY: AVX2 was found on this CPU; lengths are checked by the caller.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => unsafe { instantiate::avx2::$function($($argument),*) },
            // SAFETY: `isa` was found on this CPU; lengths are checked by the caller.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { instantiate::avx512::$function($($argument),*) },
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

    /// In-place LayerNorm of rows, `x` as `[rows][weight.len()]`:
    /// `x = (x - mean) / sqrt(variance + eps) * weight + bias`.
    ///
    /// # Panics
    /// When `x` is not whole rows, or weight and bias differ in length.
    pub fn layer_norm_in_place(self, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        check_rows(x.len(), weight.len());
        assert_eq!(weight.len(), bias.len(), "the two differ in length");
        dispatch!(self, layer_norm_in_place(x, weight, bias, eps));
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
        self.multiply(packed, panels, act, output, out);
    }

    /// Multiplies `act` with a gate and an up projection
    /// ([`Packed::pack_gate_up`]) and stores `silu(gate) * up`. Panels and `out` as
    /// in [`Kernels::matmul`].
    ///
    /// # Panics
    /// As [`Kernels::matmul`], and when the matrix is not a gated pair.
    pub fn matmul_swiglu(self, packed: &Packed, panels: Range<usize>, act: &Act, out: TileMut<'_>) {
        assert!(packed.gated(), "not a gated pair");
        self.multiply(packed, panels, act, Output::Store, out);
    }

    fn multiply(
        self,
        packed: &Packed,
        panels: Range<usize>,
        act: &Act,
        output: Output,
        out: TileMut<'_>,
    ) {
        if panels.is_empty() {
            return;
        }
        assert!(panels.end <= packed.panels(), "panels beyond the matrix");
        let outputs = packed.rows().min(panels.end * LANES) - panels.start * LANES;
        assert_eq!(act.cols, packed.cols(), "activations of another width");
        assert_eq!(
            (out.rows(), out.cols()),
            (act.rows, outputs),
            "an output of another shape"
        );
        let fits = match packed.weight_type().quantised() {
            true => act.form.quantised,
            false => act.form.plain,
        };
        assert!(fits, "activations lack the form that the weights want");
        let mut job = Job {
            packed,
            panels,
            act,
            output,
            out,
        };
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::AvxVnni {
            // SAFETY: `isa` was found on this CPU; the job is checked.
            return unsafe { instantiate::matmul_vnni(&mut job) };
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

    /// silu(x) in place.
    pub fn silu(self, x: &mut [f32]) {
        dispatch!(self, silu(x));
    }

    /// 1 / (1 + e^-x) in place.
    pub fn sigmoid(self, x: &mut [f32]) {
        dispatch!(self, sigmoid(x));
    }

    /// GELU by the error function, in place.
    pub fn gelu_erf(self, x: &mut [f32]) {
        dispatch!(self, gelu_erf(x));
    }

    /// In each row of `width` values, `x = x / sqrt(sum(x²) + eps) * scale`.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn l2_norm(self, x: &mut [f32], width: usize, eps: f32, scale: f32) {
        check_rows(x.len(), width);
        dispatch!(self, l2_norm(x, width, eps, scale));
    }

    /// Causal convolution: each row of `out` is the weighted sum of that row of `window` and those
    /// before it. `window` begins `positions - 1` rows earlier than `out`.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn convolve(self, convolution: &Convolution<'_>, window: &[f32], out: &mut [f32]) {
        assert!(
            convolution.fits(window.len(), out.len()),
            "a convolution of another shape"
        );
        dispatch!(self, convolve(convolution, window, out));
    }

    /// Takes the state of one head through rows of a sequence, in order: outputs replace `values`,
    /// `[rows][width of values]`.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn delta_rule(self, rows: &DeltaRows<'_>, state: &mut [f32], values: &mut [f32]) {
        assert!(
            rows.fits(state.len(), values.len()),
            "a delta rule of another shape"
        );
        dispatch!(self, delta_rule(rows, state, values));
    }

    /// As [`Self::delta_rule`], for Mamba-2.
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn mamba_scan(self, rows: &MambaRows<'_>, state: &mut [f32], values: &mut [f32]) {
        assert!(
            rows.fits(state.len(), values.len()),
            "a scan of another shape"
        );
        dispatch!(self, mamba_scan(rows, state, values));
    }

    /// `x = max(x, 0)^2` in place.
    pub fn squared_relu(self, x: &mut [f32]) {
        dispatch!(self, squared_relu(x));
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

    /// Writes one position's key and value in the format of the cache.
    ///
    /// # Safety
    /// No other thread reads or writes the cells of this slot during the call. Other
    /// slots of the page may be in use.
    ///
    /// # Panics
    /// When `page` is not [`page_len`] long for `key.len()`, `value` has another
    /// length than `key`, the format cannot hold it, or the slot is not below [`PAGE`].
    pub unsafe fn store_kv(
        self,
        page: SharedMut<'_, u16>,
        cache: CacheDtype,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        kv::check(page.len(), cache, slot, key.len(), value.len());
        dispatch!(self, store_kv(page, cache, slot, key, value));
    }

    /// Attention of consecutive positions of one sequence over the cache of one key/value head.
    ///
    /// `q` and `out` have a row per position and `a.heads * a.head_dim` columns (some or all of
    /// the query heads that share the key/value head). Rows of `q` are `stride` values apart.
    ///
    /// # Panics
    /// When shapes do not fit, or the pages do not cover the positions that a row attends to.
    pub fn attention(
        self,
        a: &Attention<'_>,
        q: &[f32],
        stride: usize,
        scratch: &mut AttentionScratch,
        mut out: TileMut<'_>,
    ) {
        assert!(
            a.head_dim > 0 && a.head_dim.is_multiple_of(8),
            "a head width that is not 8 n"
        );
        assert!(
            a.cache.fits(a.head_dim),
            "a head width that is not whole blocks"
        );
        assert!(
            a.heads > 0 && out.cols() == a.heads * a.head_dim,
            "an output of another width"
        );
        assert!(
            shared::fits(q.len(), out.rows(), out.cols(), stride),
            "queries of another shape"
        );
        assert_ne!(a.window, Some(0), "a window without positions");
        assert!(
            a.sinks.is_none_or(|sinks| sinks.len() == a.heads),
            "sinks of other heads"
        );
        let last = a.position + out.rows();
        assert!(
            a.both_sides.is_none_or(|end| end >= last),
            "rows behind the end of the text"
        );
        assert!(
            a.both_sides.unwrap_or(last).div_ceil(PAGE) <= a.pages.len(),
            "missing pages"
        );
        assert!(
            a.pages
                .iter()
                .all(|p| p.len() == page_len(a.head_dim, a.cache)),
            "pages of another width"
        );
        dispatch!(self, attention(a, q, stride, scratch, &mut out));
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
