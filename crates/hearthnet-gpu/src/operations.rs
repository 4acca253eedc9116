//! Operations on rows: norms, quantisation, formulas value by value, rotation, attention.

use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::WeightType;
use hearthnet_files::spec::{Activation, RopeKind};

use crate::buffers::{Buffer, Input, View};
use crate::kernels::{Formula, Kernel, Unary};
use crate::kv_layout::PAGE;
use crate::step::{Step, fits};

/// Shape of [`Step::attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: u32,
    pub kv_heads: u32,
    /// Even.
    pub head_dim: u32,
    /// Factor of the scores.
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Latest positions that a row attends to.
    pub window: Option<u32>,
}

impl Step {
    /// RMS normalisation. A row has `groups` runs of `width` values beside each other, each
    /// normalised by itself: heads, or one run. Without `weight` all weights are 1.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn rms_norm(
        &mut self,
        x: View<'_>,
        out: View<'_>,
        rows: u32,
        groups: u32,
        width: u32,
        weight: Option<&Buffer>,
        eps: f32,
    ) {
        self.norm(
            Kernel::RmsNorm,
            x,
            out,
            [rows, groups, width],
            [weight, None],
            [eps, 0.0],
        );
    }

    /// `x = (x / sqrt(sum(x²) + eps)) * scale` of each run.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn l2_norm(
        &mut self,
        x: View<'_>,
        rows: u32,
        groups: u32,
        width: u32,
        eps: f32,
        scale: f32,
    ) {
        self.norm(
            Kernel::L2Norm,
            x,
            x,
            [rows, groups, width],
            [None, None],
            [eps, scale],
        );
    }

    /// LayerNorm of rows.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn layer_norm(
        &mut self,
        x: View<'_>,
        out: View<'_>,
        rows: u32,
        width: u32,
        weight: &Buffer,
        bias: &Buffer,
        eps: f32,
    ) {
        let factors = [Some(weight), Some(bias)];
        self.norm(
            Kernel::LayerNorm,
            x,
            out,
            [rows, 1, width],
            factors,
            [eps, 0.0],
        );
    }

    /// Runs a kernel of `norm.wgsl`. `factors` are the weights and the bias, each of `width` values.
    fn norm(
        &mut self,
        kernel: Kernel,
        x: View<'_>,
        out: View<'_>,
        [rows, groups, width]: [u32; 3],
        factors: [Option<&Buffer>; 2],
        [eps, scale]: [f32; 2],
    ) {
        fits(x, rows, groups * width);
        fits(out, rows, groups * width);
        for factors in factors.into_iter().flatten() {
            assert!(factors.words() >= u64::from(width));
        }
        let nothing = self.nothing();
        let [weight, bias] = factors.map(|factors| factors.unwrap_or(&nothing));
        self.dispatch(
            kernel,
            &[x.buffer, out.buffer, weight, bias],
            &[
                width,
                x.offset,
                x.stride,
                out.offset,
                out.stride,
                eps.to_bits(),
                u32::from(factors[0].is_some()),
                scale.to_bits(),
            ],
            [groups, rows, 1],
        );
    }

    /// Quantises rows of `cols` values, a multiple of 32, into the rows of `act` from row 0 on.
    pub fn quantise(&mut self, x: View<'_>, act: &Buffer, rows: u32, cols: u32) {
        fits(x, rows, cols);
        assert!(cols.is_multiple_of(32) && act.words() >= u64::from(rows * (cols / 32)) * 12);
        self.dispatch(
            Kernel::Quantise,
            &[x.buffer, act],
            &[cols / 32, x.offset, x.stride],
            [(cols / 32).div_ceil(8), rows, 1],
        );
    }

    /// Input of a matrix: rows `x`, which are quantised into `act` if the type of the weights needs it.
    pub fn input<'a>(
        &mut self,
        weight_type: WeightType,
        x: View<'a>,
        act: &'a Buffer,
        (rows, cols): (u32, u32),
    ) -> Input<'a> {
        if weight_type.quantised() {
            self.quantise(x, act, rows, cols);
        }
        Input::of(weight_type, x, act)
    }

    /// `x = round(x + y)`; a stride of 0 makes `y` a bias.
    pub fn add_round(
        &mut self,
        x: View<'_>,
        y: View<'_>,
        rows: u32,
        cols: u32,
        dtype: BoundaryDtype,
    ) {
        self.elementwise(Formula::AddRound, x, (y, 1), x, (rows, cols), code(dtype));
    }

    /// `x = round(x)`.
    pub fn round(&mut self, x: View<'_>, rows: u32, cols: u32, dtype: BoundaryDtype) {
        self.elementwise(Formula::Round, x, (x, 1), x, (rows, cols), code(dtype));
    }

    /// `x = x * factor`.
    pub fn scale(&mut self, x: View<'_>, rows: u32, cols: u32, factor: f32) {
        self.elementwise(Formula::Scale, x, (x, 1), x, (rows, cols), factor.to_bits());
    }

    /// `x[r] = x[r] * factors[r]`: the first value of each row of `factors`.
    pub fn scale_rows(&mut self, x: View<'_>, factors: View<'_>, rows: u32, cols: u32) {
        self.elementwise(Formula::Multiply, x, (factors, 0), x, (rows, cols), 0);
    }

    /// `x = x * y`.
    pub fn multiply(&mut self, x: View<'_>, y: View<'_>, rows: u32, cols: u32) {
        self.elementwise(Formula::Multiply, x, (y, 1), x, (rows, cols), 0);
    }

    /// `sum[r] = fma(x[r], factors[r], sum[r])`: the first value of each row of `factors`.
    pub fn add_scaled(
        &mut self,
        sum: View<'_>,
        x: View<'_>,
        rows: u32,
        cols: u32,
        factors: View<'_>,
    ) {
        self.elementwise(Formula::AddScaled, x, (factors, 0), sum, (rows, cols), 0);
    }

    /// `out = activation(gate) * up`.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn gate(
        &mut self,
        activation: Activation,
        gate: View<'_>,
        up: View<'_>,
        out: View<'_>,
        rows: u32,
        cols: u32,
    ) {
        let formula = Formula::Gate(activation);
        self.elementwise(formula, gate, (up, 1), out, (rows, cols), 0);
    }

    /// `x = function(x)`.
    pub fn activate(&mut self, function: Unary, x: View<'_>, rows: u32, cols: u32) {
        self.elementwise(Formula::Unary(function), x, (x, 1), x, (rows, cols), 0);
    }

    /// `x = cap * tanh(x / cap)`.
    pub fn softcap(&mut self, x: View<'_>, rows: u32, cols: u32, cap: f32) {
        self.elementwise(Formula::Softcap, x, (x, 1), x, (rows, cols), cap.to_bits());
    }

    /// Copies rows. The two do not overlap.
    pub fn copy(&mut self, from: View<'_>, to: View<'_>, rows: u32, cols: u32) {
        self.elementwise(Formula::Copy, from, (from, 1), to, (rows, cols), 0);
    }

    /// `y` with the distance of its values in a row, 0 or 1.
    fn elementwise(
        &mut self,
        formula: Formula,
        x: View<'_>,
        (y, step): (View<'_>, u32),
        out: View<'_>,
        (rows, cols): (u32, u32),
        argument: u32,
    ) {
        fits(x, rows, cols);
        fits(y, rows, 1 + step * (cols.max(1) - 1));
        fits(out, rows, cols);
        self.dispatch(
            Kernel::Elementwise(formula),
            &[x.buffer, y.buffer, out.buffer],
            &[
                rows, cols, x.offset, x.stride, y.offset, y.stride, step, out.offset, out.stride,
                argument,
            ],
            [cols.div_ceil(64), rows, 1],
        );
    }

    /// Rotates the first `2 * pairs` values of each head by the angles of the row's position.
    /// `angles` has a cosine and a sine per position and pair. `info` has four words per row; the
    /// first is its position.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn rope(
        &mut self,
        x: View<'_>,
        rows: u32,
        heads: u32,
        head_dim: u32,
        kind: RopeKind,
        angles: &Buffer,
        pairs: u32,
        info: View<'_>,
    ) {
        assert!(2 * pairs <= head_dim, "a rotation wider than the head");
        fits(x, rows, heads * head_dim);
        fits(info, rows, 4);
        let interleaved = kind == RopeKind::Interleaved;
        self.dispatch(
            Kernel::Rope { interleaved },
            &[x.buffer, angles, info.buffer],
            &[pairs, head_dim, x.offset, x.stride, info.offset],
            [pairs.div_ceil(64), heads, rows],
        );
    }

    /// Writes keys and values of rows to their pages. `info` has four words per row: position, the
    /// first entry of its sequence in `tables`, the end of the positions that it attends to or 0
    /// for its own, and one that is not used. `tables` has the page of each 32 positions.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn store_kv(
        &mut self,
        keys: View<'_>,
        values: View<'_>,
        rows: u32,
        kv_heads: u32,
        head_dim: u32,
        kv: &Buffer,
        tables: &Buffer,
        info: View<'_>,
    ) {
        fits(keys, rows, kv_heads * head_dim);
        fits(values, rows, kv_heads * head_dim);
        fits(info, rows, 4);
        assert!(head_dim.is_multiple_of(2), "an odd width of heads");
        self.dispatch(
            Kernel::StoreKv,
            &[keys.buffer, values.buffer, kv, tables, info.buffer],
            &[
                kv_heads,
                head_dim,
                keys.offset,
                keys.stride,
                values.offset,
                values.stride,
                info.offset,
            ],
            [(head_dim / 2).div_ceil(64), kv_heads, rows],
        );
    }

    /// Attention of rows over their pages. `scores` has [`crate::attention_words`] for `positions`,
    /// the largest end of the positions that a row attends to.
    #[allow(clippy::too_many_arguments, reason = "as the formula has")]
    pub fn attention(
        &mut self,
        shape: &AttentionShape,
        q: View<'_>,
        out: View<'_>,
        rows: u32,
        kv: &Buffer,
        tables: &Buffer,
        info: View<'_>,
        scores: &Buffer,
        positions: u32,
        sinks: Option<&Buffer>,
    ) {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *shape;
        let width = heads * head_dim;
        fits(q, rows, width);
        fits(out, rows, width);
        fits(info, rows, 4);
        assert!(head_dim.is_multiple_of(2), "an odd width of heads");
        assert!(heads.is_multiple_of(kv_heads), "heads that share no key");
        assert!(scores.words() >= crate::attention_words(rows, heads, positions));
        assert!(sinks.is_none_or(|sinks| sinks.words() >= u64::from(heads)));
        let nothing = self.nothing();
        let parameters = [
            heads,
            kv_heads,
            head_dim,
            q.offset,
            q.stride,
            out.offset,
            out.stride,
            info.offset,
            positions,
            shape.window.unwrap_or(0),
            shape.scale.to_bits(),
            shape.softcap.map_or(0, f32::to_bits),
            u32::from(sinks.is_some()),
        ];
        let sinks = sinks.unwrap_or(&nothing);
        let blocks = positions.div_ceil(PAGE);
        let kernels = [
            (
                Kernel::Score,
                q,
                [(blocks * PAGE).div_ceil(64), heads, rows],
            ),
            (Kernel::Softmax, q, [heads, rows, 1]),
            (Kernel::Mix, out, [(head_dim / 2).div_ceil(64), heads, rows]),
        ];
        for (kernel, view, groups) in kernels {
            let buffers = [view.buffer, kv, tables, info.buffer, scores, sinks];
            self.dispatch(kernel, &buffers, &parameters, groups);
        }
    }

    /// Sets word `at + r` of `flags` to 1 if a value of row r is an infinity or a NaN.
    pub fn find_overflow(&mut self, x: View<'_>, rows: u32, cols: u32, flags: &Buffer, at: u32) {
        fits(x, rows, cols);
        assert!(flags.words() >= u64::from(at) + u64::from(rows));
        self.dispatch(
            Kernel::Overflow,
            &[x.buffer, flags],
            &[cols, x.offset, x.stride, at],
            [1, rows, 1],
        );
    }
}

/// Number of a dtype in the kernels.
fn code(dtype: BoundaryDtype) -> u32 {
    match dtype {
        BoundaryDtype::F32 => 0,
        BoundaryDtype::F16 => 1,
        BoundaryDtype::Bf16 => 2,
    }
}
