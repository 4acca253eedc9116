//! All layers on this machine.

use std::time::Instant;

use hearthnet_model::engine::{Engine, EngineError, SeqId, Span};

use crate::backend::{Backend, HopClock, HopTimes, RouteHop, Run};
use crate::error::ChatError;

/// Rows per engine call during prefill: a cancelled chat is noticed between calls.
const PREFILL_ROWS: usize = 512;

/// The exact engine over every layer of the model.
pub struct LocalBackend {
    engine: Engine,
    seq: SeqId,
    width: usize,
    shard_id: String,
    clock: HopClock,
    scratch: Vec<f32>,
}

impl LocalBackend {
    /// Takes an engine that holds all layers of the model.
    ///
    /// # Errors
    /// [`ChatError::Engine`] when no sequence can be opened.
    pub fn new(mut engine: Engine, model_id: &str) -> Result<Self, ChatError> {
        let seq = engine.open().map_err(engine_error)?;
        let layers = engine.layers();
        let width = engine.spec().width as usize;
        let shard_id = hearthnet_bus::Descriptor::shard_id(
            model_id,
            layers.start,
            layers.end.saturating_sub(1),
        );
        Ok(Self {
            engine,
            seq,
            width,
            shard_id,
            clock: HopClock::default(),
            scratch: Vec::new(),
        })
    }
}

impl Backend for LocalBackend {
    fn run(
        &mut self,
        position: u32,
        rows: &[f32],
        out: &mut Vec<f32>,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        self.engine
            .truncate(self.seq, position)
            .map_err(engine_error)?;
        let mut at = position;
        for piece in rows.chunks(PREFILL_ROWS * self.width) {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let count = (piece.len() / self.width) as u32;
            self.scratch.clear();
            self.scratch.extend_from_slice(piece);
            let start = Instant::now();
            let span = Span {
                seq: self.seq,
                position: at,
                rows: count,
            };
            self.engine
                .forward(&[span], &mut self.scratch)
                .map_err(engine_error)?;
            let took = start.elapsed();
            if count == 1 {
                self.clock
                    .record(took, u32::try_from(took.as_micros()).unwrap_or(u32::MAX), 0);
            }
            at += count;
        }
        let last = self.scratch.len().saturating_sub(self.width);
        out.clear();
        out.extend_from_slice(self.scratch.get(last..).unwrap_or_default());
        Ok(())
    }

    fn route(&self) -> Vec<RouteHop> {
        let layers = self.engine.layers();
        vec![RouteHop {
            shard_id: self.shard_id.clone(),
            host: None,
            endpoint: None,
            layers: (layers.start, layers.end.saturating_sub(1)),
            memory_mb: (self.engine.weight_bytes() + self.engine.kv_bytes_in_use()) >> 20,
        }]
    }

    fn times(&self) -> Vec<HopTimes> {
        vec![self.clock.summary()]
    }

    fn begin_call(&mut self) {
        self.clock.clear();
    }
}

fn engine_error(error: EngineError) -> ChatError {
    match error {
        EngineError::ContextFull { .. } => ChatError::BadRequest(error.to_string()),
        _ => ChatError::Engine(error.to_string()),
    }
}
