//! Tensors outside the blocks: embedding, last norm, output matrix.

use std::fmt;
use std::sync::Arc;

use hearthnet_files::ModelFile;
use hearthnet_files::families::{EMBEDDING, OUTPUT, OUTPUT_NORM};
use hearthnet_files::spec::ModelSpec;
use parking_lot::Mutex;

use crate::cpu::{Engine, check};
use crate::error::{EngineError, LoadError};
use crate::forward::{share, units};
use crate::kernels::{Act, ActForm, Kernels, Output, Packed, SharedMut};
use crate::options::EngineOptions;
use crate::thread_pool::ThreadPool;
use crate::weights::{Loader, packed_bytes};

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
    norm: Vec<f32>,
    /// `None` if the embedding is also the output matrix.
    output: Option<Packed>,
    weight_bytes: u64,
    act: Mutex<Act>,
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
        let mut packed = packed_bytes(&embedding)?;
        if let Some(output) = &output {
            packed = packed.saturating_add(packed_bytes(output)?);
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
            norm: loader.vector(&file.tensor(OUTPUT_NORM)?)?,
            output: output.map(|output| loader.matrix(&output)).transpose()?,
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

    /// Replaces `out` by the embeddings of `ids`, the input of the first layer: one row of `width`
    /// values per token, rounded to the boundary dtype.
    ///
    /// # Errors
    /// [`EngineError::UnknownToken`]; [`EngineError::InputNotFinite`] when an embedding exceeds the
    /// range of the boundary dtype. `out` is then empty.
    pub fn embed(&self, ids: &[u32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        out.clear();
        let vocab = self.spec.vocab;
        if let Some(&id) = ids.iter().find(|id| **id >= vocab) {
            return Err(EngineError::UnknownToken { id, vocab });
        }
        let width = self.spec.width as usize;
        out.resize(ids.len() * width, 0.0);
        for (row, (&id, values)) in ids.iter().zip(out.chunks_exact_mut(width)).enumerate() {
            self.embedding.dequantise_row(id as usize, values);
            if let Some(scale) = self.spec.scales.embedding {
                values.iter_mut().for_each(|value| *value *= scale);
            }
            self.spec.boundary.round(values);
            if !self.kernels.all_finite(values) {
                out.clear();
                return Err(EngineError::InputNotFinite(row));
            }
        }
        Ok(())
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
        self.kernels
            .rms_norm_in_place(rows, &self.norm, self.spec.norm_eps);
        Ok(())
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

    #[allow(unsafe_code)]
    fn tile(&self, rows: &[f32], out: &mut [f32]) {
        let matrix = self.output.as_ref().unwrap_or(&self.embedding);
        let (panels, vocab) = (matrix.panels(), matrix.rows());
        let units = units(panels, self.thread_pool.threads(), UNITS);
        let mut act = self.act.lock();
        let form = ActForm::of([matrix]);
        self.kernels
            .norm_prepare(rows, &self.norm, self.spec.norm_eps, form, &mut act);
        let (act, count) = (&*act, rows.len() / self.norm.len());
        let out = SharedMut::new(out);
        self.thread_pool.run(&|thread| {
            thread.phase(units, |unit| {
                let range = share(panels, units, unit);
                // SAFETY: units have separate panels, and so separate columns.
                let tile = unsafe { out.tile_mut(count, vocab, matrix.columns(&range)) };
                self.kernels.matmul(matrix, range, act, Output::Store, tile);
            });
        });
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
