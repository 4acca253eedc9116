//! Matrix times a tile of activation rows.
//!
//! The driver walks panels and rows. A [`PanelDot`] (one per weight type and instruction set)
//! multiplies a panel with a few rows; the driver calls it through pointers ([`PanelDots`]), so
//! that the driver is compiled once per instruction set. Every output is one accumulator that
//! takes the blocks of its row in ascending order, so neither the tiling nor the split between
//! threads can change a bit of it.

use std::cell::RefCell;
use std::ops::Range;

use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::{BLOCK, WeightType};

use super::act::{Act, BlockMeta, grow};
use super::lanes::{LANES, Lanes};
use super::math::silu;
use super::pack::Packed;
use super::prefetch;
use super::record::record_bytes;
use super::rows::round_one;
use super::shared::TileMut;

pub(super) mod float;

/// Destination of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Overwrites the output.
    Store,
    /// Adds the product to the output and rounds the sum (residual stream).
    Add(BoundaryDtype),
}

/// Prefetch distance for one row, in bytes of a single stream of weights. A larger one delays small
/// matrices, whose beginnings nothing prefetches.
const STREAM_AHEAD: usize = 6 << 10;
/// Prefetch distance for several rows.
const SHARED_STREAM_AHEAD: usize = 8 << 10;

/// Rows from which the quants of a panel are unpacked once, instead of by each group of rows.
const UNPACK_FROM: usize = 16;
/// Bytes of an unpacked block: 32 quants of 16 rows.
pub(super) const UNPACKED_BLOCK: usize = BLOCK * LANES;

thread_local! {
    /// Unpacked quants of the panels that a thread multiplies.
    static UNPACKED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Pointers to the forms of an activation row.
#[derive(Clone, Copy)]
pub(super) struct ActRow {
    pub(super) plain: *const f32,
    pub(super) quants: *const i8,
    pub(super) meta: *const BlockMeta,
}

/// Number of weight types.
pub(super) const TYPES: usize = WeightType::ALL.len();

/// Upper limits of [`PanelDot::PANELS`] and [`PanelDot::ROWS`].
pub(super) const MAX_PANELS: usize = 2;
pub(super) const MAX_ROWS: usize = 6;

/// Results of a [`PanelDot`]: `[panel][row][lane]`, without gaps.
#[repr(align(64))]
pub(super) struct Sums(pub(super) [f32; MAX_PANELS * MAX_ROWS * LANES]);

/// Inner kernel of one weight type on one instruction set.
pub(super) trait PanelDot {
    /// Panels multiplied together from [`Self::TOGETHER_FROM`] rows on; 1 or 2.
    const PANELS: usize;
    /// Rows multiplied together; at most [`MAX_ROWS`].
    const ROWS: usize;
    /// Minimum number of rows for multiplying panels together. With fewer rows, panels are read
    /// one after the other, in memory order.
    const TOGETHER_FROM: usize;

    /// Unpacks the quants of a panel, if [`Self::dot`] can read them so. Then [`Self::PANELS`] is 1 and
    /// [`Self::ROWS`] is 4.
    const UNPACK: Option<Unpack> = None;

    /// Writes the products of `NP` panels of `records` records with `NT` rows to
    /// `sums[panel][row][lane]`. It may prefetch the data `ahead` bytes further on; 0 disables
    /// that. With `U`, it reads the quants from `unpacked` instead of the panels.
    ///
    /// # Safety
    /// The CPU has the instruction set; `panels` point to whole panels; with `U`, `unpacked` points
    /// to what [`Self::UNPACK`] has written for the panel; `rows` point to rows of the form that the
    /// weight type reads, `records` records long; `sums` has room for `NP * NT * 16` values.
    unsafe fn dot<const NP: usize, const NT: usize, const U: bool>(
        panels: [*const u8; NP],
        unpacked: *const u8,
        records: usize,
        rows: [ActRow; NT],
        ahead: usize,
        sums: *mut f32,
    );
}

/// Weight panels that are next to each other.
#[derive(Clone, Copy)]
struct Panels {
    first: *const u8,
    /// Bytes of a panel.
    bytes: usize,
    /// Unpacked quants of the first panel.
    unpacked: *const u8,
    /// Records of a panel.
    records: usize,
}

/// [`PanelDot::dot`] as a function pointer. Arguments: panels, rows, ahead, sums. The position in
/// [`PanelDots`] gives the number of panels and rows.
type Dot = unsafe fn(&Panels, *const ActRow, usize, *mut f32);

/// Function pointers of a [`PanelDot`], `dots[panels - 1][rows - 1]`.
pub(super) struct PanelDots {
    together_from: usize,
    rows: usize,
    dots: [[Dot; MAX_ROWS]; MAX_PANELS],
    /// The function for one panel and `rows` rows with unpacked quants, and the one that unpacks.
    unpacked: Option<(Dot, Unpack)>,
}

/// Writes the quants of a panel as bytes, in the form that [`PanelDot::dot`] multiplies:
/// `to[block][group][row][input of the group]`. Arguments: panel, records, to.
///
/// # Safety
/// The CPU has the instruction set; `panel` points to a whole panel; `to` has room for
/// [`UNPACKED_BLOCK`] bytes per block.
pub(super) type Unpack = unsafe fn(*const u8, usize, *mut u8);

impl PanelDots {
    /// Dispatch table for `K`. Entries beyond `K::PANELS` and `K::ROWS` are never called.
    pub(super) const fn of<K: PanelDot>() -> Self {
        const { assert!(K::PANELS <= MAX_PANELS && K::ROWS <= MAX_ROWS) };
        let one = if K::ROWS > 4 {
            many_rows::<K, 1>()
        } else {
            few_rows::<K, 1>()
        };
        let two = if K::PANELS < 2 {
            one
        } else if K::ROWS > 4 {
            many_rows::<K, 2>()
        } else {
            few_rows::<K, 2>()
        };
        Self {
            together_from: if K::PANELS < 2 {
                usize::MAX
            } else {
                K::TOGETHER_FROM
            },
            rows: K::ROWS,
            dots: [one, two],
            unpacked: match K::UNPACK {
                Some(unpack) => {
                    assert!(K::PANELS == 1 && K::ROWS == 4);
                    Some((apart::<K, 1, 4, true>, unpack))
                }
                None => None,
            },
        }
    }
}

const fn many_rows<K: PanelDot, const NP: usize>() -> [Dot; MAX_ROWS] {
    [
        apart::<K, NP, 1, false>,
        apart::<K, NP, 2, false>,
        apart::<K, NP, 3, false>,
        apart::<K, NP, 4, false>,
        apart::<K, NP, 5, false>,
        apart::<K, NP, 6, false>,
    ]
}

const fn few_rows<K: PanelDot, const NP: usize>() -> [Dot; MAX_ROWS] {
    let four: Dot = apart::<K, NP, 4, false>;
    [
        apart::<K, NP, 1, false>,
        apart::<K, NP, 2, false>,
        apart::<K, NP, 3, false>,
        four,
        four,
        four,
    ]
}

/// [`PanelDot::dot`] as a [`Dot`].
///
/// # Safety
/// As [`PanelDot::dot`]; `rows` points to `NT` rows.
unsafe fn apart<K: PanelDot, const NP: usize, const NT: usize, const U: bool>(
    panels: &Panels,
    rows: *const ActRow,
    ahead: usize,
    sums: *mut f32,
) {
    let mut each = [panels.first; NP];
    for p in 1..NP {
        each[p] = panels.first.wrapping_add(p * panels.bytes);
    }
    // SAFETY: the caller ensures the contract of `dot`, and that there are `NT` rows.
    unsafe {
        K::dot::<NP, NT, U>(
            each,
            panels.unpacked,
            panels.records,
            *rows.cast(),
            ahead,
            sums,
        );
    }
}

/// Arguments of a matrix product, checked by [`super::Kernels::matmul`].
pub(super) struct Job<'a> {
    pub(super) packed: &'a Packed,
    pub(super) panels: Range<usize>,
    pub(super) act: &'a Act,
    pub(super) output: Output,
    pub(super) out: TileMut<'a>,
}

/// Runs a job with the kernel of its weight type; `kernels` has one of each type.
///
/// # Safety
/// The CPU has the instruction set of `V` and `kernels`. The caller has checked the job: the
/// panels exist, `act` has the matrix's columns and the form that its kernel reads, `out` has
/// `act.rows` rows and a column for every output of the panels.
#[inline(always)]
pub(super) unsafe fn run<V: Lanes>(job: &mut Job<'_>, kernels: &[PanelDots; TYPES]) {
    let kernel = &kernels[job.packed.weight_type() as usize];
    let rows = job.act.rows;
    let gated = job.packed.gated();
    let together = rows >= kernel.together_from;
    let unpack = kernel.unpacked.filter(|_| rows >= UNPACK_FROM);
    let unpacked_bytes = job.packed.cols() * LANES;
    let mut buffer = UNPACKED.take();
    if unpack.is_some() {
        grow(&mut buffer, MAX_PANELS * unpacked_bytes);
    }
    let mut sums = Sums([0.0; MAX_PANELS * MAX_ROWS * LANES]);
    let mut panel = job.panels.start;
    while panel < job.panels.end {
        // Output panels of this round, and the weight panels that they need.
        let outputs = if !gated && together && panel + 1 < job.panels.end {
            2
        } else {
            1
        };
        let weights = if gated { 2 } else { outputs };
        let first = panel * job.packed.streams();
        if let Some((_, unpack)) = unpack {
            let panels = panels_of(job, first..first + weights, &buffer);
            let to = buffer.as_mut_ptr();
            for i in 0..weights {
                // SAFETY: `panels_of` has checked the panels, and the room of their quants. The
                // caller ensures the instruction set.
                unsafe {
                    let panel = panels.first.add(i * panels.bytes);
                    unpack(panel, panels.records, to.add(i * unpacked_bytes));
                }
            }
        }
        let quants: &[u8] = if unpack.is_some() { &buffer } else { &[] };
        for row in (0..rows).step_by(kernel.rows) {
            let count = kernel.rows.min(rows - row);
            // The first rows load the panels into the cache and prefetch the next ones.
            let ahead = match (row, weights == 2 && together) {
                (0, true) => 2 * job.packed.panel_bytes(),
                (0, false) if rows == 1 => STREAM_AHEAD,
                (0, false) => SHARED_STREAM_AHEAD,
                _ => 0,
            };
            // The residual stream of a large tile does not stay in the L1 cache.
            if together && matches!(job.output, Output::Add(_)) {
                fetch_output(job, panel, outputs, row, count);
            }
            // SAFETY: the caller has checked the job; `row + count` rows and `first + weights`
            // panels exist.
            unsafe {
                if weights == 2 && together {
                    let panels = first..first + 2;
                    let panels = (panels_of(job, panels, quants), 2);
                    dot_rows(kernel, job, panels, row, count, ahead, &mut sums.0);
                } else {
                    for i in 0..weights {
                        let panel = first + i..first + i + 1;
                        let quants = quants.get(i * unpacked_bytes..);
                        let panel = (panels_of(job, panel, quants.unwrap_or_default()), 1);
                        let sums = &mut sums.0[i * count * LANES..];
                        dot_rows(kernel, job, panel, row, count, ahead, sums);
                    }
                }
                if gated {
                    gate::<V>(job, panel, row, count, &sums);
                } else {
                    for i in 0..outputs {
                        finish::<V>(job, panel + i, row, count, &sums.0[i * count * LANES..]);
                    }
                }
            }
        }
        panel += outputs;
    }
    UNPACKED.set(buffer);
}

/// Pointers to panels, whose unpacked quants begin `unpacked`.
#[inline(always)]
fn panels_of(job: &Job<'_>, panels: Range<usize>, unpacked: &[u8]) -> Panels {
    let bytes = job.packed.panel_bytes();
    let data = job.packed.data();
    assert!(panels.end * bytes <= data.len());
    let unpacked_bytes = job.packed.cols() * LANES;
    assert!(unpacked.is_empty() || panels.len() * unpacked_bytes <= unpacked.len());
    Panels {
        first: data[panels.start * bytes..].as_ptr(),
        bytes,
        unpacked: unpacked.as_ptr(),
        records: bytes / record_bytes(job.packed.weight_type()),
    }
}

/// Calls the kernel for `count` rows starting at `row`, and for as many panels as `panels` says. If
/// there are enough rows, their quants are unpacked.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn dot_rows(
    kernel: &PanelDots,
    job: &Job<'_>,
    (panels, number): (Panels, usize),
    row: usize,
    count: usize,
    ahead: usize,
    sums: &mut [f32],
) {
    assert!(sums.len() >= number * count * LANES);
    let dot = match &kernel.unpacked {
        Some((dot, _)) if job.act.rows >= UNPACK_FROM && count == kernel.rows => *dot,
        _ => kernel.dots[number - 1][count - 1],
    };
    let rows = act_rows(job.act, row, count);
    // SAFETY: bounds are checked above and by `panels_of`; the rest is the caller's contract.
    unsafe { dot(&panels, rows.as_ptr(), ahead, sums.as_mut_ptr()) };
}

/// Pointers to `count` rows of activations starting at `first`. Unused entries repeat the last
/// row.
#[inline(always)]
fn act_rows(act: &Act, first: usize, count: usize) -> [ActRow; MAX_ROWS] {
    assert!(0 < count && first + count <= act.rows);
    let blocks = act.cols / BLOCK;
    std::array::from_fn(|i| {
        let row = first + i.min(count - 1);
        ActRow {
            plain: act
                .plain
                .as_ptr()
                .wrapping_add(if act.form.plain { row * act.cols } else { 0 }),
            quants: act.quants.as_ptr().wrapping_add(row * act.cols),
            meta: act.meta.as_ptr().wrapping_add(row * blocks),
        }
    })
}

/// Columns of `out` that hold the outputs of `panel`.
#[inline(always)]
fn columns(job: &Job<'_>, panel: usize) -> Range<usize> {
    let start = (panel - job.panels.start) * LANES;
    start..start + LANES.min(job.packed.rows() - panel * LANES)
}

/// Stores or adds one panel's sums for `count` rows to the output.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn finish<V: Lanes>(
    job: &mut Job<'_>,
    panel: usize,
    row: usize,
    count: usize,
    sums: &[f32],
) {
    assert!(sums.len() >= count * LANES);
    let columns = columns(job, panel);
    let (out, stride) = job.out.cells(row, count, &columns);
    let sums = sums.as_ptr();
    // SAFETY: `out` has `columns` of `count` rows, sixteen of them in the first three cases;
    // there are sixteen sums for each row. The caller ensures the instruction set.
    unsafe {
        match job.output {
            Output::Store if columns.len() == LANES => {
                for i in 0..count {
                    V::load(sums.add(i * LANES)).store(out.add(i * stride));
                }
            }
            Output::Add(BoundaryDtype::F32) if columns.len() == LANES => {
                for i in 0..count {
                    let out = out.add(i * stride);
                    V::load(out).add(V::load(sums.add(i * LANES))).store(out);
                }
            }
            Output::Add(BoundaryDtype::F16) if columns.len() == LANES => {
                for i in 0..count {
                    let out = out.add(i * stride);
                    let sum = V::load(out).add(V::load(sums.add(i * LANES)));
                    sum.round_f16().store(out);
                }
            }
            output => {
                for i in 0..count {
                    for column in 0..columns.len() {
                        let out = out.add(i * stride + column);
                        let sum = *sums.add(i * LANES + column);
                        *out = match output {
                            Output::Store => sum,
                            Output::Add(dtype) => round_one(*out + sum, dtype),
                        };
                    }
                }
            }
        }
    }
}

/// Writes `silu(gate) * up` of a gated pair's sums for `count` rows to the output.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn gate<V: Lanes>(job: &mut Job<'_>, panel: usize, row: usize, count: usize, sums: &Sums) {
    let columns = columns(job, panel);
    let (out, stride) = job.out.cells(row, count, &columns);
    let (gates, ups) = sums.0.split_at(count * LANES);
    assert!(ups.len() >= gates.len());
    let (gates, ups) = (gates.as_ptr(), ups.as_ptr());
    for i in 0..count {
        // SAFETY: there are sixteen gates and ups for each row, and `out` has `columns` of
        // `count` rows. The caller ensures the instruction set.
        unsafe {
            let h = silu(V::load(gates.add(i * LANES))).mul(V::load(ups.add(i * LANES)));
            let out = out.add(i * stride);
            if columns.len() == LANES {
                h.store(out);
            } else {
                h.store_partial(out, columns.len());
            }
        }
    }
}

/// Prefetches the output cells of `outputs` panels and `count` rows.
#[inline(always)]
fn fetch_output(job: &mut Job<'_>, panel: usize, outputs: usize, row: usize, count: usize) {
    let first = (panel - job.panels.start) * LANES;
    let columns = first..job.out.cols().min(first + outputs * LANES);
    let (out, stride) = job.out.cells(row, count, &columns);
    for i in 0..count {
        let row = out.wrapping_add(i * stride).cast_const();
        for line in (0..columns.len()).step_by(LANES) {
            prefetch(row.wrapping_add(line).cast());
        }
        // Rows need not be aligned to cache lines.
        prefetch(row.wrapping_add(columns.len() - 1).cast());
    }
}
