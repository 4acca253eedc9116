//! All layers on this machine, or all those that hosts would run.
//!
//! One engine holds the weights once; any number of chats have a sequence each on it and
//! take turns, a decode step or a piece of a prompt at a time.
//!
//! | concept | where |
//! |---|---|
//! | whose turn it is | `ticket_lock.rs` |
//! | how long a piece is | `chunked_prefill.rs` (pure) |

mod chunked_prefill;
mod ticket_lock;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hearthnet_bus::flight::PipelineId;
use hearthnet_model::engine::{Engine, EngineError, SeqId, Span};
use parking_lot::Mutex;

use self::chunked_prefill::ChunkedPrefill;
use self::ticket_lock::TicketLock;
use crate::Cancel;
use crate::backend::{Backend, HopClock, HopTimes, Notice, RouteHop, Run};
use crate::error::ChatError;

/// An engine over the layers of a model, for several chats. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedEngine(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    line: TicketLock<Seat>,
    shard_id: String,
    width: usize,
    /// Whether the model's last layer is here: then of rows only the last one is wanted.
    has_last: bool,
    /// What one sequence may come to take, in bytes.
    sequence_bytes: u64,
    kv_budget: u64,
}

/// What a turn is about.
#[derive(Debug)]
struct Seat {
    engine: Engine,
    pieces: ChunkedPrefill,
}

impl SharedEngine {
    /// Takes an engine that holds all layers of the model, or all that its backends are to run.
    /// `kv_budget` is its memory for keys and values in bytes, as its options had it.
    pub fn new(engine: Engine, model_id: &str, kv_budget: u64) -> Self {
        let layers = engine.layers();
        let spec = engine.spec();
        let last = layers.end.saturating_sub(1);
        Self(Arc::new(Shared {
            shard_id: hearthnet_bus::Descriptor::shard_id(model_id, layers.start, last),
            width: spec.width as usize,
            has_last: layers.end == spec.layers,
            sequence_bytes: engine.kv_bytes_per_position() * u64::from(spec.context),
            line: TicketLock::new(Seat {
                engine,
                pieces: ChunkedPrefill::default(),
            }),
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
            in_parts: false,
            scratch: Vec::new(),
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut Engine) -> Result<T, ChatError>) -> Result<T, ChatError> {
        self.turn(|seat, _| f(&mut seat.engine))
    }

    /// Waits for a turn; `f` is told how many ask for one.
    fn turn<T>(
        &self,
        f: impl FnOnce(&mut Seat, usize) -> Result<T, ChatError>,
    ) -> Result<T, ChatError> {
        let done = self.0.line.with(f);
        done.unwrap_or_else(|| Err(ChatError::Engine("it failed in an earlier chat".into())))
    }
}

/// Loads the engine of a model.
pub type LoadEngine = Box<dyn Fn() -> Result<SharedEngine, ChatError> + Send + Sync>;

/// An engine that is loaded when a chat needs it, once for all chats that need it at the same
/// time, and put away with the last of them.
pub struct EngineOnDemand {
    load: LoadEngine,
    loaded: Mutex<Weak<Shared>>,
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
        let mut loaded = self.loaded.lock();
        let engine = match loaded.upgrade() {
            Some(shared) => SharedEngine(shared),
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

/// One sequence on the exact engine.
pub struct LocalBackend {
    engine: SharedEngine,
    /// `None` once it is closed.
    seq: Option<SeqId>,
    pipeline: PipelineId,
    clock: HopClock,
    /// What was handed in, and where.
    submitted: (u32, Vec<f32>),
    /// Whether more rows were announced than have been handed in.
    in_parts: bool,
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
    fn submit_part(&mut self, position: u32, rows: &[f32], more: u32, _: &Cancel) {
        if !self.in_parts {
            self.submitted.0 = position;
            self.submitted.1.clear();
        }
        self.submitted.1.extend_from_slice(rows);
        self.in_parts = more > 0;
    }

    fn output(&mut self, out: &mut Vec<f32>, run: &mut Run<'_>) -> Result<(), ChatError> {
        let width = self.engine.0.width;
        let position = self.submitted.0;
        let Some(seq) = self.seq else {
            return Err(ChatError::Engine("the conversation was closed".into()));
        };
        let (rows, scratch) = (&self.submitted.1, &mut self.scratch);
        let total = rows.len() / width;
        let mut done = 0;
        out.clear();
        while done < total {
            let asked = Instant::now();
            let (count, waited, took) = self.engine.turn(|seat, asking| {
                // Whoever gave up while it waited for its turn passes it on.
                if run.cancel.is_cancelled() {
                    return Err(ChatError::Cancelled);
                }
                let start = Instant::now();
                if done == 0 {
                    seat.engine.truncate(seq, position).map_err(engine_error)?;
                }
                let most = seat.pieces.rows(asking);
                let count = most.min(total - done);
                let piece = rows.get(done * width..(done + count) * width);
                scratch.clear();
                scratch.extend_from_slice(piece.unwrap_or_default());
                let span = Span {
                    seq,
                    position: position + done as u32,
                    rows: count as u32,
                };
                seat.engine
                    .forward(&[span], scratch)
                    .map_err(engine_error)?;
                let took = start.elapsed();
                if total > 1 {
                    seat.pieces.note(count == most, count, took);
                }
                Ok((count, start - asked, took))
            })?;
            if total == 1 {
                let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
                self.clock.record(waited + took, us(took), us(waited));
            }
            done += count;
            // Of layers that only begin a sequence's way nobody knows how far the prompt is.
            if total > 1 && self.engine.0.has_last {
                let rows = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                (run.notify)(Notice::Prompt {
                    done: rows(done),
                    total: rows(total),
                });
            }
            let wanted = match self.engine.0.has_last {
                false => 0,
                true if done < total => continue,
                true => scratch.len().saturating_sub(width),
            };
            out.extend_from_slice(scratch.get(wanted..).unwrap_or_default());
        }
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

#[cfg(test)]
mod tests {
    use hearthnet_model::ModelFile;
    use hearthnet_model::engine::{EngineOptions, Head};
    use hearthnet_model::gguf::Gguf;
    use hearthnet_testkit::TinyLlama;

    use super::*;

    const PROMPT: usize = 40;

    /// An engine, and the rows of a prompt.
    fn tiny() -> (SharedEngine, Vec<f32>) {
        let bytes = TinyLlama::default().bytes();
        let file = ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap();
        let options = EngineOptions {
            threads: 1,
            ..EngineOptions::default()
        };
        let engine = Engine::load(&file, 0..2, &options, &mut |_, _| {}).unwrap();
        let head = Head::beside(&file, &engine).unwrap();
        let ids: Vec<u32> = (0..PROMPT as u32).map(|n| 3 + n % 7).collect();
        let mut rows = Vec::new();
        head.embed(&ids, &mut rows).unwrap();
        (SharedEngine::new(engine, "tiny", 1 << 30), rows)
    }

    fn run(
        backend: &mut LocalBackend,
        rows: &[f32],
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ChatError> {
        let mut out = Vec::new();
        let notify: &mut dyn FnMut(Notice) = &mut |_| {};
        backend.run(0, rows, &mut out, &mut Run { cancel, notify })?;
        Ok(out)
    }

    #[test]
    fn however_a_prompt_is_cut_the_same_row_comes_out() {
        let (engine, rows) = tiny();
        let mut outputs = Vec::new();
        for ms_per_row in [0, 5, 15, 1000] {
            let slow = Duration::from_millis(ms_per_row);
            let prepare = engine.turn(|seat, _| {
                seat.pieces = ChunkedPrefill::default();
                seat.pieces.note(true, 1, slow);
                Ok(seat.pieces.rows(1))
            });
            let first = prepare.unwrap();
            assert_eq!(first >= PROMPT, ms_per_row == 0);
            let mut backend = engine.open().unwrap();
            outputs.push(run(&mut backend, &rows, &Cancel::default()).unwrap());
        }
        outputs.dedup();
        assert_eq!(outputs.len(), 1);
        assert!(outputs[0].iter().all(|value| value.is_finite()));
    }

    #[test]
    fn a_chat_that_was_given_up_takes_no_further_turn() {
        let (engine, rows) = tiny();
        let mut backend = engine.open().unwrap();
        let cancel = Cancel::default();
        let mut in_use = 0;
        std::thread::scope(|scope| {
            let (cancel, backend) = (&cancel, &mut backend);
            let chat = engine.turn(|seat, _| {
                in_use = seat.engine.kv_bytes_in_use();
                let chat = scope.spawn(move || run(backend, &rows, cancel));
                // It is given up while it waits for this turn to end.
                while engine.0.line.asking() < 2 {
                    std::thread::yield_now();
                }
                cancel.cancel();
                Ok(chat)
            });
            assert_eq!(chat.unwrap().join().unwrap(), Err(ChatError::Cancelled));
        });
        let after = engine.with(|engine| Ok(engine.kv_bytes_in_use()));
        assert_eq!(after.unwrap(), in_use, "nothing was computed for it");
    }
}
