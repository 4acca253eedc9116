//! Layers on this machine: all layers of a model, those that replace failed hosts, or private ones
//! ([`private_layers`](crate::backend::private_layers)).
//!
//! A shared engine holds the weights once; every chat has a sequence on it. Concurrent jobs run as
//! one batch (`batcher.rs`). A prompt is run in chunks, so that other chats are served in between;
//! their size is set by `chunked_prefill.rs` (pure). A text of an encoder is one chunk.

mod chunked_prefill;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;
use hearthnet_engine::{ARITHMETIC, Engine, EngineError, SeqId, Span};
use hearthnet_files::spec::RowShape;
use parking_lot::Mutex;

use self::chunked_prefill::ChunkedPrefill;
use crate::Cancel;
use crate::backend::{Backend, HopTimes, Output, RouteHop, Rows, Run};
use crate::error::ChatError;
use crate::frames::Frame;
use crate::steps::batcher::{AttendanceGuard, Batcher};
use crate::steps::chat_loop;
use crate::times::HopClock;

/// Maximum chats per batch. A prefill chunk counts as one.
const BATCH: usize = 32;

/// Engine over layers of a model, for several chats. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedEngine(pub(crate) Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    /// `None` after a panic in the engine.
    engine: Mutex<Option<Engine>>,
    pub(crate) batcher: Batcher<Job, Result<Done, ChatError>>,
    pieces: Mutex<ChunkedPrefill>,
    shard_id: String,
    /// Layers of the engine, half-open.
    pub(crate) layers: Range<u32>,
    /// Values of the rows.
    pub(crate) shape: RowShape,
    /// True if the engine has the model's last layer; then only the last row is returned.
    has_last: bool,
    /// True if all rows of a text must run together: those of an encoder attend to later ones.
    whole_texts: bool,
    pub(crate) weight_bytes: u64,
    /// KV bytes of all sequences after the last batch.
    kv_bytes: AtomicU64,
    /// Maximum KV bytes of one sequence.
    sequence_bytes: u64,
    kv_budget: u64,
}

/// Rows to run through the layers.
pub(crate) struct Job {
    seq: SeqId,
    position: u32,
    rows: Vec<f32>,
    /// True if the chunk has the maximum number of rows.
    whole: bool,
    cancel: Cancel,
}

/// Rows that have passed the layers.
pub(crate) struct Done {
    rows: Vec<f32>,
    compute: Duration,
}

impl SharedEngine {
    /// Wraps an engine with all layers that its backends run. `kv_budget` is the engine's KV memory
    /// limit in bytes, as in its options.
    pub fn new(engine: Engine, model_id: &str, kv_budget: u64) -> Self {
        let layers = engine.layers();
        let spec = engine.spec();
        let last = layers.end.saturating_sub(1);
        Self(Arc::new(Shared {
            batcher: Batcher::new(BATCH),
            pieces: Mutex::default(),
            shard_id: hearthnet_bus::Descriptor::shard_id(model_id, layers.start, last),
            shape: spec.row_shape(),
            has_last: layers.end == spec.layers,
            whole_texts: spec.encoder.is_some(),
            weight_bytes: engine.weight_bytes(),
            kv_bytes: AtomicU64::new(0),
            sequence_bytes: engine.footprint().bytes(spec.context),
            kv_budget,
            layers,
            engine: Mutex::new(Some(engine)),
        }))
    }

    /// Opens a sequence. KV memory is reserved for its maximum length, so that a running chat never
    /// runs out. The first sequence is always accepted.
    ///
    /// # Errors
    /// [`ChatError::Busy`] if the rest of the budget is too small; [`ChatError::Engine`].
    pub fn open(&self) -> Result<LocalBackend, ChatError> {
        let seq = self.0.with(|engine| {
            let open = engine.sequences();
            if !self.0.has_room_beside(open) {
                return Err(ChatError::Busy(format!(
                    "this machine has memory for {open} conversations at once"
                )));
            }
            engine.open().map_err(|error| match error {
                EngineError::TooManySequences(limit) => ChatError::Busy(format!(
                    "this machine runs its own layers for {limit} conversations at once"
                )),
                error => engine_error(error),
            })
        })??;
        Ok(LocalBackend {
            engine: self.clone(),
            seq,
            hosted: false,
            present: None,
            pipeline: PipelineId::draw(),
            clock: HopClock::default(),
            per_layer: None,
            submitted: (0, Vec::new()),
            all: false,
        })
    }

    /// Shortens a sequence that is longer. Returns the length that is left.
    fn rewind(&self, seq: SeqId, position: u32) -> Result<u32, ChatError> {
        self.0.with(|engine| {
            let len = engine.len(seq).map_err(engine_error)?;
            engine
                .truncate(seq, position.min(len))
                .map_err(engine_error)
        })?
    }

    /// Copies a sequence, if there is room for another one.
    fn fork(&self, seq: SeqId) -> Option<SeqId> {
        let forked = self.0.with(|engine| {
            let has_room = self.0.has_room_beside(engine.sequences());
            has_room.then(|| engine.fork(seq).ok()).flatten()
        });
        forked.ok().flatten()
    }
}

impl Shared {
    /// Whether the budget has room for a sequence of maximum length beside `open` others.
    fn has_room_beside(&self, open: usize) -> bool {
        let promised = (open as u64 + 1).saturating_mul(self.sequence_bytes);
        open == 0 || promised <= self.kv_budget
    }

    /// Values of a row before the layers, and behind them.
    fn row_values(&self) -> (usize, usize) {
        (
            self.shape.before(self.layers.len()),
            self.shape.width as usize,
        )
    }

    /// Runs `f` on the engine, between two batches.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> Result<T, ChatError> {
        let mut place = self.engine.lock();
        let Some(mut engine) = place.take() else {
            return Err(ChatError::Engine("it failed in an earlier chat".into()));
        };
        let result = f(&mut engine);
        let kv_bytes = engine.kv_bytes_in_use();
        self.kv_bytes.store(kv_bytes, Ordering::Relaxed);
        *place = Some(engine);
        Ok(result)
    }

    /// Runs jobs as one batch. If that fails, runs each job by itself.
    fn compute(&self, jobs: Vec<Job>) -> Vec<Result<Done, ChatError>> {
        // Cancelled jobs must not be computed.
        let together = match jobs.iter().any(|job| job.cancel.is_cancelled()) {
            true => Err(ChatError::Cancelled),
            false => self.with(|engine| self.forward(engine, &jobs)),
        };
        match together.flatten() {
            Ok(done) => done.into_iter().map(Ok).collect(),
            Err(error) if jobs.len() == 1 => vec![Err(error)],
            // An invalid job must fail its own chat only.
            Err(_) => jobs
                .into_iter()
                .flat_map(|job| self.compute(vec![job]))
                .collect(),
        }
    }

    fn forward(&self, engine: &mut Engine, jobs: &[Job]) -> Result<Vec<Done>, ChatError> {
        let (began, (before, width)) = (Instant::now(), self.row_values());
        let mut spans = Vec::with_capacity(jobs.len());
        let mut rows = Vec::with_capacity(jobs.iter().map(|job| job.rows.len()).sum());
        for job in jobs {
            // The job overwrites later positions.
            let kept = engine.truncate(job.seq, job.position);
            let len = kept.map_err(engine_error)?;
            if len < job.position {
                return Err(engine_error(EngineError::PositionGap {
                    seq: job.seq,
                    position: job.position,
                    len,
                }));
            }
            let count = u32::try_from(job.rows.len() / before).unwrap_or(u32::MAX);
            spans.push(Span::new(job.seq, job.position, count));
            rows.extend_from_slice(&job.rows);
        }
        engine.forward(&spans, &mut rows).map_err(engine_error)?;
        self.shape.keep_outputs(self.layers.len(), &mut rows);
        let compute = began.elapsed();
        if spans.iter().any(|span| span.rows > 1) {
            let whole = jobs.iter().any(|job| job.whole);
            let count = rows.len() / width;
            self.pieces.lock().note(whole, count, compute);
        }
        let mut rest = rows;
        let done = spans.iter().map(|span| {
            let tail = rest.split_off(span.rows as usize * width);
            let rows = std::mem::replace(&mut rest, tail);
            Done { rows, compute }
        });
        Ok(done.collect())
    }
}

pub type LoadEngine = Box<dyn Fn() -> Result<SharedEngine, ChatError> + Send + Sync>;

/// Engine that is loaded on demand, shared by concurrent chats, and unloaded with the last one.
pub struct EngineOnDemand {
    load: LoadEngine,
    loaded: Mutex<Weak<Shared>>,
}

impl EngineOnDemand {
    pub fn new(load: LoadEngine) -> Self {
        Self {
            load,
            loaded: Mutex::new(Weak::new()),
        }
    }

    /// Opens a sequence. Loading the engine may take seconds.
    ///
    /// # Errors
    /// Those of loading and of [`SharedEngine::open`].
    pub fn open(&self) -> Result<LocalBackend, ChatError> {
        // Held while loading, so that concurrent chats load the engine once.
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

/// Sequence on the exact engine.
pub struct LocalBackend {
    pub(crate) engine: SharedEngine,
    seq: SeqId,
    /// True if hosts run the layers before or behind.
    pub(crate) hosted: bool,
    /// Set during a call.
    present: Option<AttendanceGuard>,
    pipeline: PipelineId,
    clock: HopClock,
    /// Latest time per row and layer.
    pub(crate) per_layer: Option<Duration>,
    /// Rows submitted since the last output, and the position of the first one.
    submitted: (u32, Vec<f32>),
    /// True if the output has all rows, false if it has only the last.
    all: bool,
}

impl LocalBackend {
    /// Runs rows through the layers, batched with other chats. `whole`: the chunk has the maximum
    /// number of rows.
    pub(crate) async fn rows(
        &mut self,
        position: u32,
        rows: Vec<f32>,
        whole: bool,
        cancel: &Cancel,
    ) -> Result<Vec<f32>, ChatError> {
        let asked = Instant::now();
        let (before, _) = self.engine.0.row_values();
        let count = u32::try_from(rows.len() / before.max(1)).unwrap_or(u32::MAX);
        let job = Job {
            seq: self.seq,
            position,
            rows,
            whole,
            cancel: cancel.clone(),
        };
        let shared = Arc::clone(&self.engine.0);
        let work = move |jobs| shared.compute(jobs);
        let done = self.engine.0.batcher.run(job, work).await;
        let failed = || Err(ChatError::Engine("it failed in another chat".into()));
        let Done { rows, compute } = done.unwrap_or_else(failed)?;
        let layers = self.engine.0.layers.len() as u32;
        self.per_layer = compute.checked_div(count.saturating_mul(layers));
        if count == 1 {
            let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
            let took = asked.elapsed();
            self.clock
                .record(took, us(compute), us(took.saturating_sub(compute)));
        }
        Ok(rows)
    }

    /// See [`Backend::fork`].
    pub(crate) async fn forked(&mut self) -> Option<Self> {
        let (engine, seq) = (self.engine.clone(), self.seq);
        let forked = beside_batches(move || engine.fork(seq)).await.flatten();
        let in_call = self.present.is_some();
        Some(Self {
            engine: self.engine.clone(),
            seq: forked?,
            hosted: self.hosted,
            present: in_call.then(|| self.engine.0.batcher.attend(self.hosted)),
            pipeline: PipelineId::draw(),
            clock: HopClock::default(),
            per_layer: self.per_layer,
            submitted: (0, Vec::new()),
            all: false,
        })
    }

    /// Runs the submitted rows in chunks.
    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        let ((before, width), has_last) = (self.engine.0.row_values(), self.engine.0.has_last);
        let (position, mut rows) = (self.submitted.0, std::mem::take(&mut self.submitted.1));
        let total = rows.len() / before;
        let (mut done, mut out) = (0, Vec::new());
        while done < total {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let asking = self.engine.0.batcher.asking() + 1;
            let most = match self.engine.0.whole_texts {
                true => total,
                false => self.engine.0.pieces.lock().rows(asking),
            };
            let count = most.min(total - done);
            let rest = rows.split_off(count * before);
            let piece = std::mem::replace(&mut rows, rest);
            let at = position + done as u32;
            let through = self.rows(at, piece, count == most, run.cancel).await?;
            done += count;
            // Progress is reported only by the last layers of a sequence.
            if total > 1 && has_last {
                let until =
                    |n: usize| position.saturating_add(u32::try_from(n).unwrap_or(u32::MAX));
                (run.notify)(Frame::PromptProgress {
                    done: until(done),
                    total: until(total),
                });
            }
            let wanted = match has_last && !self.all {
                false => 0,
                true if done < total => continue,
                true => through.len().saturating_sub(width),
            };
            out.extend_from_slice(through.get(wanted..).unwrap_or_default());
        }
        Ok(out)
    }
}

/// Calls `work` when the engine has time for it. It may be computing for other chats, which must not
/// stop the step loop.
async fn beside_batches<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match chat_loop::is_alone() {
        true => Some(work()),
        false => tokio::task::spawn_blocking(work).await.ok(),
    }
}

impl Backend for LocalBackend {
    fn rewind(&mut self, position: u32) -> LocalBoxFuture<'_, Result<u32, ChatError>> {
        let (engine, seq) = (self.engine.clone(), self.seq);
        let rewound = beside_batches(move || engine.rewind(seq, position));
        let failed = || Err(ChatError::Engine("it failed in another chat".into()));
        async move { rewound.await.unwrap_or_else(failed) }.boxed_local()
    }

    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        if self.submitted.1.is_empty() {
            self.submitted.0 = rows.position;
        }
        self.all = rows.all;
        self.submitted.1.extend_from_slice(rows.values);
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        let forked = async move { Some(Box::new(self.forked().await?) as Box<dyn Backend>) };
        forked.boxed_local()
    }

    fn route(&self) -> Vec<RouteHop> {
        let shared = &self.engine.0;
        let kv_bytes = shared.kv_bytes.load(Ordering::Relaxed);
        vec![RouteHop {
            shard_id: shared.shard_id.clone(),
            host: None,
            endpoint: None,
            layers: (shared.layers.start, shared.layers.end.saturating_sub(1)),
            memory_mb: (shared.weight_bytes + kv_bytes) >> 20,
            arithmetic: ARITHMETIC.to_owned(),
            policy: "".into(),
        }]
    }

    fn times(&self) -> Vec<HopTimes> {
        vec![self.clock.summary()]
    }

    fn pipeline(&self) -> Option<PipelineId> {
        Some(self.pipeline)
    }

    fn begin_call(&mut self, _: u32) {
        self.clock = HopClock::default();
        self.present = Some(self.engine.0.batcher.attend(self.hosted));
    }

    fn end_call(&mut self) {
        self.present = None;
    }
}

impl Drop for LocalBackend {
    fn drop(&mut self) {
        // A failed engine frees its memory when it is dropped.
        let _ = self.engine.0.with(|engine| engine.close(self.seq));
    }
}

fn engine_error(error: EngineError) -> ChatError {
    match error {
        EngineError::ContextFull { .. } => ChatError::BadRequest(error.to_string()),
        EngineError::BoundaryOverflow { .. } => ChatError::BoundaryOverflow(error.to_string()),
        _ => ChatError::Engine(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
