//! A complete model on this machine.

use super::error::{EngineError, LoadError};
use super::{Engine, EngineOptions, Head, SeqId, Span};
use crate::model_file::ModelFile;

/// All layers of a model and its head, on the same threads.
#[derive(Debug)]
pub struct FullModel {
    engine: Engine,
    head: Head,
    rows: Vec<f32>,
}

impl FullModel {
    /// Loads everything. `progress` is called with the bytes of the layers done so far and in all.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(
        file: &ModelFile,
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let engine = Engine::load(file, 0..file.spec().layers, options, progress)?;
        let head = Head::beside(file, &engine)?;
        Ok(Self {
            engine,
            head,
            rows: Vec::new(),
        })
    }

    /// The layers.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The layers, to open, fork, truncate and close sequences.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Embedding and output matrix.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Memory that all weights take.
    pub fn weight_bytes(&self) -> u64 {
        self.engine.weight_bytes() + self.head.weight_bytes()
    }

    /// Bytes of weights that a token reads on its way through: all but the embeddings of others,
    /// and of a layer's experts those that it is sent to.
    pub fn token_bytes(&self) -> u64 {
        self.engine.token_bytes() + self.head.token_bytes()
    }

    /// Appends tokens to a sequence, and replaces `logits` by those of the last one: `vocab`
    /// values, or none when there are no tokens.
    ///
    /// # Errors
    /// See [`EngineError`]; the sequence is then as before.
    pub fn append(
        &mut self,
        seq: SeqId,
        ids: &[u32],
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        self.head.embed(ids, &mut self.rows)?;
        let position = self.engine.len(seq)?;
        let limit = self.head.spec().context;
        let rows = u32::try_from(ids.len()).map_err(|_| EngineError::ContextFull {
            wanted: ids.len() as u64,
            limit,
        })?;
        let span = Span {
            seq,
            position,
            rows,
        };
        if rows > 0 {
            self.engine.forward(&[span], &mut self.rows)?;
        }
        let last = self
            .rows
            .len()
            .saturating_sub(self.head.spec().width as usize);
        self.head.logits(&self.rows[last..], logits)
    }
}
