//! Tensors outside the blocks: embedding, last norm, output matrix.

use std::fmt;
use std::sync::Arc;

use hearthnet_files::ModelFile;
use hearthnet_files::families::{
    EMBEDDING, OUTPUT, PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_PROJECTION_NORM,
};
use hearthnet_files::spec::ModelSpec;
use parking_lot::Mutex;

use crate::cpu::{Engine, check};
use crate::encoder_head::{EncoderHead, EncoderTensors};
use crate::error::{EngineError, LoadError};
use crate::forward::{share, units};
use crate::kernels::{Act, ActForm, Kernels, Output, Packed, SharedMut};
use crate::matrices::packed_bytes;
use crate::options::EngineOptions;
use crate::thread_pool::ThreadPool;
use crate::weights::Loader;

/// Rows multiplied with the output matrix per pass.
const TILE: usize = 64;
/// Work units of the output matrix per thread. A thread that wakes late, or gets less memory
/// bandwidth, processes fewer units.
const UNITS: usize = 16;

/// Embedding, last norm and output matrix of a model.
pub struct Head {
    spec: ModelSpec,
    kernels: Kernels,
    thread_pool: Arc<ThreadPool>,
    embedding: Packed,
    /// `None` if the outputs of the last layer are the final hidden states.
    norm: Option<Vec<f32>>,
    /// `None` if the embedding is also the output matrix.
    output: Option<Packed>,
    per_layer: Option<PerLayerHead>,
    encoder: Option<EncoderHead>,
    weight_bytes: u64,
    act: Mutex<Act>,
}

/// Source of the per-layer inputs.
struct PerLayerHead {
    embedding: Packed,
    projection: Packed,
    norm: Vec<f32>,
}

impl Head {
    /// Reads and repacks the tensors outside the blocks.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(file: &ModelFile, options: &EngineOptions) -> Result<Self, LoadError> {
        Self::with(file, options.kernels()?, options.thread_pool()?)
    }

    /// As [`Self::load`], on the threads of an engine in the same process. Engine and head run in
    /// turn, so threads of its own would only compete for cores.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn beside(file: &ModelFile, engine: &Engine) -> Result<Self, LoadError> {
        let cpu = &engine.backend;
        Self::with(file, cpu.kernels, Arc::clone(&cpu.thread_pool))
    }

    fn with(
        file: &ModelFile,
        kernels: Kernels,
        thread_pool: Arc<ThreadPool>,
    ) -> Result<Self, LoadError> {
        let spec = file.spec().clone();
        check(&spec)?;
        let embedding = file.tensor(EMBEDDING)?;
        let output = (!spec.tied_embedding).then(|| file.tensor(OUTPUT));
        let output = output.transpose()?;
        let encoder = spec.encoder.map(|_| EncoderTensors::of(file)).transpose()?;
        let per_layer = match spec.per_layer {
            Some(_) => Some([
                file.tensor(PER_LAYER_EMBEDDING)?,
                file.tensor(PER_LAYER_PROJECTION)?,
            ]),
            None => None,
        };
        let matrices = std::iter::once(&embedding).chain(&output);
        let matrices = matrices.chain(encoder.iter().flat_map(EncoderTensors::matrices));
        let mut packed = 0usize;
        for view in matrices.chain(per_layer.iter().flatten()) {
            packed = packed.saturating_add(packed_bytes(view)?);
        }
        let mut progress = |_, _| ();
        let mut loader = Loader::new(
            file,
            thread_pool.threads(),
            packed,
            file.head_bytes(),
            &mut progress,
        )?;
        let head = Self {
            kernels,
            thread_pool,
            embedding: loader.matrix(&embedding)?,
            norm: match spec.encoder.is_some_and(|encoder| encoder.layer_norm) {
                true => None,
                false => Some(loader.vector(&file.tensor(file.family().output_norm)?)?),
            },
            output: output.map(|output| loader.matrix(&output)).transpose()?,
            per_layer: match per_layer {
                Some([embedding, projection]) => Some(PerLayerHead {
                    embedding: loader.matrix(&embedding)?,
                    projection: loader.matrix(&projection)?,
                    norm: loader.vector(&file.tensor(PER_LAYER_PROJECTION_NORM)?)?,
                }),
                None => None,
            },
            encoder: encoder
                .map(|tensors| tensors.load(&mut loader))
                .transpose()?,
            weight_bytes: loader.bytes as u64,
            spec,
            act: Mutex::default(),
        };
        file.check_copied(file.head_tensors())?;
        Ok(head)
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of memory of the packed weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes of weights that one row reads: the output matrix.
    pub(crate) fn token_bytes(&self) -> u64 {
        self.output.as_ref().unwrap_or(&self.embedding).bytes() as u64
    }

    /// Replaces `out` by the embeddings of `ids`, the input of the first layer: one row of
    /// [`ModelSpec::row_values`] of all layers per token, rounded to the boundary dtype. Of an
    /// encoder, `ids` are a whole text.
    ///
    /// # Errors
    /// [`EngineError::UnknownToken`]; [`EngineError::ContextFull`] when the text of an encoder is
    /// longer than its context; [`EngineError::InputNotFinite`] when an embedding exceeds the range
    /// of the boundary dtype. `out` is then empty.
    pub fn embed(&self, ids: &[u32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        out.clear();
        let vocab = self.spec.vocab;
        if let Some(&id) = ids.iter().find(|id| **id >= vocab) {
            return Err(EngineError::UnknownToken { id, vocab });
        }
        let limit = self.spec.context;
        if self.encoder.is_some() && ids.len() > limit as usize {
            let wanted = ids.len() as u64;
            return Err(EngineError::ContextFull { wanted, limit });
        }
        let width = self.spec.width as usize;
        let row_values = self.spec.row_values(&(0..self.spec.layers));
        out.resize(ids.len() * row_values, 0.0);
        for (row, (&id, values)) in ids.iter().zip(out.chunks_exact_mut(row_values)).enumerate() {
            let (stream, inputs) = values.split_at_mut(width);
            self.embedding.dequantise_row(id as usize, stream);
            if let Some(scale) = self.spec.scales.embedding {
                stream.iter_mut().for_each(|value| *value *= scale);
            }
            if self.spec.embedding_norm {
                let ones = vec![1.0; width];
                self.kernels
                    .rms_norm_in_place(stream, &ones, self.spec.norm_eps);
            }
            if let Some(encoder) = &self.encoder {
                encoder.finish_row(self.kernels, row, self.spec.norm_eps, stream);
            }
            self.spec.boundary.round(stream);
            if let Some(per_layer) = &self.per_layer {
                self.per_layer_inputs(per_layer, id, stream, inputs);
                self.spec.boundary.round(inputs);
            }
            if !self.kernels.all_finite(values) {
                out.clear();
                return Err(EngineError::InputNotFinite(row));
            }
        }
        Ok(())
    }

    /// Writes the per-layer inputs of a token; `stream` is its row of the embedding.
    fn per_layer_inputs(&self, own: &PerLayerHead, id: u32, stream: &[f32], out: &mut [f32]) {
        let PerLayerHead {
            embedding,
            projection,
            norm,
        } = own;
        let mut act = self.act.lock();
        self.multiply_row(projection, stream, &mut act, out);
        let mut of_token = vec![0.0; out.len()];
        embedding.dequantise_row(id as usize, &mut of_token);
        let (width, eps) = (stream.len(), self.spec.norm_eps);
        combine(self.kernels, out, &of_token, (width, norm, eps));
    }

    /// Replaces `out` by the logits of `rows`, `vocab` values per row. `rows` are outputs of the
    /// last layer, `width` values each; usually only the row of the last position.
    ///
    /// # Errors
    /// [`EngineError::RowsMismatch`] when `rows` is not whole rows,
    /// [`EngineError::InputNotFinite`]. `out` is then empty.
    pub fn logits(&self, rows: &[f32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        out.clear();
        self.check_rows(rows)?;
        let (width, vocab) = (self.spec.width as usize, self.spec.vocab as usize);
        out.resize(rows.len() / width * vocab, 0.0);
        for (rows, out) in rows.chunks(TILE * width).zip(out.chunks_mut(TILE * vocab)) {
            self.tile(rows, out);
        }
        if let Some(divisor) = self.spec.scales.logits {
            out.iter_mut().for_each(|logit| *logit /= divisor);
        }
        if let Some(cap) = self.spec.scales.logit_softcap {
            self.kernels.softcap(out, cap);
        }
        Ok(())
    }

    /// Applies the last norm to `rows`, outputs of the last layer, in place: they become the final
    /// hidden states.
    ///
    /// # Errors
    /// As for [`Self::logits`]. `rows` is then unchanged.
    pub fn norm(&self, rows: &mut [f32]) -> Result<(), EngineError> {
        self.check_rows(rows)?;
        if let Some(norm) = &self.norm {
            self.kernels
                .rms_norm_in_place(rows, norm, self.spec.norm_eps);
        }
        Ok(())
    }

    /// Takes the pooled state of a text, of `width` values, through the matrices behind it, if the
    /// model has them.
    pub fn project(&self, state: &mut [f32]) {
        let projection = self.encoder.as_ref();
        let Some((up, down)) = projection.and_then(|encoder| encoder.projection.as_ref()) else {
            return;
        };
        let mut act = self.act.lock();
        let mut between = vec![0.0; up.rows()];
        self.multiply_row(up, state, &mut act, &mut between);
        self.multiply_row(down, &between, &mut act, state);
    }

    fn check_rows(&self, rows: &[f32]) -> Result<(), EngineError> {
        let width = self.spec.width as usize;
        if !rows.len().is_multiple_of(width) {
            let expected = rows.len().next_multiple_of(width);
            return Err(EngineError::RowsMismatch {
                expected,
                found: rows.len(),
            });
        }
        let mut each = rows.chunks_exact(width);
        match each.position(|row| !self.kernels.all_finite(row)) {
            Some(row) => Err(EngineError::InputNotFinite(row)),
            None => Ok(()),
        }
    }

    fn tile(&self, rows: &[f32], out: &mut [f32]) {
        let matrix = self.output.as_ref().unwrap_or(&self.embedding);
        let mut act = self.act.lock();
        let form = ActForm::of([matrix]);
        let width = self.spec.width as usize;
        match &self.norm {
            Some(norm) => {
                self.kernels
                    .norm_prepare(rows, norm, self.spec.norm_eps, form, &mut act);
            }
            None => self.kernels.prepare(rows, width, form, &mut act),
        }
        self.multiply(matrix, &act, rows.len() / width, out);
    }

    /// Replaces `out` by the product of a row with a matrix.
    fn multiply_row(&self, matrix: &Packed, row: &[f32], act: &mut Act, out: &mut [f32]) {
        let form = ActForm::of([matrix]);
        self.kernels.prepare(row, row.len(), form, act);
        self.multiply(matrix, act, 1, out);
    }

    /// Replaces `out` by the products of `count` rows of activations with a matrix.
    #[allow(unsafe_code)]
    fn multiply(&self, matrix: &Packed, act: &Act, count: usize, out: &mut [f32]) {
        let (panels, rows) = (matrix.panels(), matrix.rows());
        let units = units(panels, self.thread_pool.threads(), UNITS);
        let out = SharedMut::new(out);
        self.thread_pool.run(&|thread| {
            thread.phase(units, |unit| {
                let range = share(panels, units, unit);
                // SAFETY: units have separate panels, and so separate columns.
                let tile = unsafe { out.tile_mut(count, rows, matrix.columns(&range)) };
                self.kernels.matmul(matrix, range, act, Output::Store, tile);
            });
        });
    }
}

/// Combines the projection of an embedding of `width` values, `out`, with the per-layer embeddings
/// of the token: section 14 of the specification.
fn combine(
    kernels: Kernels,
    out: &mut [f32],
    of_token: &[f32],
    (width, norm, eps): (usize, &[f32], f32),
) {
    let root = 1.0 / (width as f32).sqrt();
    out.iter_mut().for_each(|value| *value *= root);
    kernels.rms_norm_in_place(out, norm, eps);
    let scale = (norm.len() as f32).sqrt();
    for (value, of_token) in out.iter_mut().zip(of_token) {
        *value = (*value + of_token * scale) * std::f32::consts::FRAC_1_SQRT_2;
    }
}

impl fmt::Debug for Head {
    /// Omits the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Head")
            .field("architecture", &self.spec.architecture)
            .field("vocab", &self.spec.vocab)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_layer_inputs_equal_the_specification() {
        let spec = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../specs/canonical-arithmetic.md"
        ));
        let spec = spec.unwrap();
        let bits = |values: &[f32]| -> String {
            let values = values
                .iter()
                .map(|value| format!("`{:08x}`", value.to_bits()));
            values.collect::<Vec<_>>().join(", ")
        };
        let norm = [1.0, 0.5];
        let mut out = [3.0, -5.0];
        combine(Kernels::best(), &mut out, &[0.25, -1.5], (16, &norm, 1e-6));
        let mut p = [0.75, -1.25];
        Kernels::best().rms_norm_in_place(&mut p, &norm, 1e-6);
        let line = format!("| {} | {} |", bits(&p), bits(&out));
        assert!(spec.contains(&line), "{line}");
    }
}
