//! All layers on this machine.
//!
//! One engine holds the weights once; any number of chats have a sequence each on it and
//! take turns, a decode step or a piece of a prompt at a time.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use hearthnet_bus::flight::PipelineId;
use hearthnet_model::engine::{Engine, EngineError, SeqId, Span};

use crate::Cancel;
use crate::backend::{Backend, HopClock, HopTimes, RouteHop, Run};
use crate::error::ChatError;

/// Rows per engine call during prefill: between calls a cancelled chat is noticed, and
/// another chat has its turn.
const PREFILL_ROWS: usize = 128;

/// An engine over every layer of a model, for several chats. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedEngine(Arc<Desk>);

#[derive(Debug)]
struct Desk {
    engine: Mutex<Engine>,
    shard_id: String,
    width: usize,
    /// What one sequence may come to take, in bytes.
    sequence_bytes: u64,
    kv_budget: u64,
}

impl SharedEngine {
    /// Takes an engine that holds all layers of the model. `kv_budget` is its memory for keys
    /// and values in bytes, as its options had it.
    pub fn new(engine: Engine, model_id: &str, kv_budget: u64) -> Self {
        let layers = engine.layers();
        let spec = engine.spec();
        let last = layers.end.saturating_sub(1);
        Self(Arc::new(Desk {
            shard_id: hearthnet_bus::Descriptor::shard_id(model_id, layers.start, last),
            width: spec.width as usize,
            sequence_bytes: engine.kv_bytes_per_position() * u64::from(spec.context),
            engine: Mutex::new(engine),
            kv_budget,
        }))
    }

    /// A sequence for one chat. Memory is promised to it for as long as it may become, so that
    /// no chat that has begun runs out; a first one is taken however small the budget is.
    ///
    /// # Errors
    /// [`ChatError::Busy`] when what is left cannot be promised; [`ChatError::Engine`].
    pub fn open(&self) -> Result<LocalBackend, ChatError> {
        let seq = self.with(|engine| {
            let open = engine.sequences() as u64;
            let promised = (open + 1).saturating_mul(self.0.sequence_bytes);
            if open > 0 && promised > self.0.kv_budget {
                return Err(ChatError::Busy(format!(
                    "this machine has memory for {open} conversations at once"
                )));
            }
            engine.open().map_err(engine_error)
        })?;
        Ok(LocalBackend {
            engine: self.clone(),
            seq: Some(seq),
            pipeline: PipelineId::draw(),
            clock: HopClock::default(),
            submitted: (0, Vec::new()),
            scratch: Vec::new(),
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut Engine) -> Result<T, ChatError>) -> Result<T, ChatError> {
        match self.0.engine.lock() {
            Ok(mut engine) => f(&mut engine),
            Err(_) => Err(ChatError::Engine("it failed in an earlier chat".into())),
        }
    }
}

/// Loads the engine of a model.
pub type LoadEngine = Box<dyn Fn() -> Result<SharedEngine, ChatError> + Send + Sync>;

/// An engine that is loaded when a chat needs it, once for all chats that need it at the same
/// time, and put away with the last of them.
pub struct EngineOnDemand {
    load: LoadEngine,
    loaded: Mutex<Weak<Desk>>,
}

impl EngineOnDemand {
    /// Nothing is loaded yet.
    pub fn new(load: LoadEngine) -> Self {
        Self {
            load,
            loaded: Mutex::new(Weak::new()),
        }
    }

    /// A sequence on the engine, which may have to be loaded: it may take seconds.
    ///
    /// # Errors
    /// What loading or [`SharedEngine::open`] says.
    pub fn open(&self) -> Result<LocalBackend, ChatError> {
        // Held while loading, so that chats in need at the same time load it once.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = match loaded.upgrade() {
            Some(desk) => SharedEngine(desk),
            None => {
                let engine = (self.load)()?;
                *loaded = Arc::downgrade(&engine.0);
                engine
            }
        };
        drop(loaded);
        engine.open()
    }
}

/// One sequence on the exact engine over every layer of the model.
pub struct LocalBackend {
    engine: SharedEngine,
    /// `None` once it is closed.
    seq: Option<SeqId>,
    pipeline: PipelineId,
    clock: HopClock,
    /// What was handed in, and where.
    submitted: (u32, Vec<f32>),
    scratch: Vec<f32>,
}

impl LocalBackend {
    /// Takes an engine that holds all layers of the model, for itself alone.
    ///
    /// # Errors
    /// [`ChatError::Engine`] when no sequence can be opened.
    pub fn new(engine: Engine, model_id: &str) -> Result<Self, ChatError> {
        SharedEngine::new(engine, model_id, u64::MAX).open()
    }
}

impl Backend for LocalBackend {
    fn submit(&mut self, position: u32, rows: &[f32], _: &Cancel) {
        self.submitted.0 = position;
        self.submitted.1.clear();
        self.submitted.1.extend_from_slice(rows);
    }

    fn output(&mut self, out: &mut Vec<f32>, run: &mut Run<'_>) -> Result<(), ChatError> {
        let width = self.engine.0.width;
        let position = self.submitted.0;
        let Some(seq) = self.seq else {
            return Err(ChatError::Engine("the conversation was closed".into()));
        };
        self.engine
            .with(|engine| engine.truncate(seq, position).map_err(engine_error))?;
        let mut at = position;
        for piece in self.submitted.1.chunks(PREFILL_ROWS * width) {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let count = (piece.len() / width) as u32;
            self.scratch.clear();
            self.scratch.extend_from_slice(piece);
            let span = Span {
                seq,
                position: at,
                rows: count,
            };
            let scratch = &mut self.scratch;
            let asked = Instant::now();
            let (waited, took) = self.engine.with(|engine| {
                let start = Instant::now();
                engine.forward(&[span], scratch).map_err(engine_error)?;
                Ok((start - asked, start.elapsed()))
            })?;
            if count == 1 {
                let us =
                    |time: std::time::Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
                self.clock.record(waited + took, us(took), us(waited));
            }
            at += count;
        }
        let last = self.scratch.len().saturating_sub(width);
        out.clear();
        out.extend_from_slice(self.scratch.get(last..).unwrap_or_default());
        Ok(())
    }

    fn route(&self) -> Vec<RouteHop> {
        let hop = self.engine.with(|engine| {
            let layers = engine.layers();
            Ok(RouteHop {
                shard_id: self.engine.0.shard_id.clone(),
                host: None,
                endpoint: None,
                layers: (layers.start, layers.end.saturating_sub(1)),
                memory_mb: (engine.weight_bytes() + engine.kv_bytes_in_use()) >> 20,
            })
        });
        hop.into_iter().collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        vec![self.clock.summary()]
    }

    fn pipeline(&self) -> Option<PipelineId> {
        Some(self.pipeline)
    }

    fn begin_call(&mut self) {
        self.clock.clear();
    }
}

impl Drop for LocalBackend {
    fn drop(&mut self) {
        if let Some(seq) = self.seq.take() {
            // An engine that has failed frees its memory when it goes itself.
            let _ = self.engine.with(|engine| Ok(engine.close(seq)));
        }
    }
}

fn engine_error(error: EngineError) -> ChatError {
    match error {
        EngineError::ContextFull { .. } => ChatError::BadRequest(error.to_string()),
        _ => ChatError::Engine(error.to_string()),
    }
}
