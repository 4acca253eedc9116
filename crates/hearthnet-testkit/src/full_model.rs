//! Complete model on one machine.

use hearthnet_engine::{Engine, EngineError, EngineOptions, Head, LoadError, SeqId, Span};
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
        if rows > 0 {
            let span = Span::new(seq, position, rows);
            self.engine.forward(&[span], &mut self.rows)?;
            self.keep_streams();
        }
        let width = self.head.spec().width as usize;
        let last = self.rows.len().saturating_sub(width);
        self.head.logits(&self.rows[last..], logits)
    }

    /// Appends tokens to a sequence, and replaces `logits` by the logits of each token, `vocab`
    /// values each.
    ///
    /// # Panics
    /// If the engine refuses.
    pub fn append_all(&mut self, seq: SeqId, ids: &[u32], logits: &mut Vec<f32>) {
        self.head.embed(ids, &mut self.rows).expect("known tokens");
        let position = self.engine.len(seq).expect("an open sequence");
        let span = Span::new(seq, position, ids.len() as u32);
        let ran = self.engine.forward(&[span], &mut self.rows);
        ran.expect("rows that the engine takes");
        self.keep_streams();
        self.head.logits(&self.rows, logits).expect("finite rows");
    }

    /// Drops the per-layer inputs of the rows behind the last layer.
    fn keep_streams(&mut self) {
        let spec = self.head.spec();
        let (width, values) = (spec.width as usize, spec.row_values(&(0..spec.layers)));
        let rows = self.rows.len() / values;
        for row in 1..rows {
            let from = row * values;
            self.rows.copy_within(from..from + width, row * width);
        }
        self.rows.truncate(rows * width);
    }
}
