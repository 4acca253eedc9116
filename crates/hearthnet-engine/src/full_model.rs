//! Complete model on one machine.

use super::error::{EngineError, LoadError};
use super::{Engine, EngineOptions, Head, SeqId, Span};
use hearthnet_files::ModelFile;

/// All layers of a model and its head, on one thread pool.
#[derive(Debug)]
pub struct FullModel {
    engine: Engine,
    head: Head,
    rows: Vec<f32>,
}

impl FullModel {
    /// Loads all layers and the head. `progress` receives the bytes of the layers read so far, and
    /// the total.
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

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Mutable engine, for opening, forking, truncating and closing sequences.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Bytes of memory of all packed weights.
    pub fn weight_bytes(&self) -> u64 {
        self.engine.weight_bytes() + self.head.weight_bytes()
    }

    /// Bytes of weights that one token reads: the layers and the output matrix, but only the
    /// experts that the token is routed to.
    pub fn token_bytes(&self) -> u64 {
        self.engine.token_bytes() + self.head.token_bytes()
    }

    /// Appends tokens to a sequence, and replaces `logits` by the logits of the last token: `vocab`
    /// values, or no values if `ids` is empty.
    ///
    /// # Errors
    /// See [`EngineError`]. The sequence is then unchanged.
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
