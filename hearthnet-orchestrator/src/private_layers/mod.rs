//! Layers that the caller computes itself: the first ones, so that no host sees the rows of the
//! embedding table, and, where it is asked for, the last ones.
//!
//! Rows that enter layer 0 are rows of a public table: looking them up gives the prompt back, word
//! by word. Rows that have been through some layers here are not in any table. What they still
//! tell is measured by `cargo run --release -p hearthnet-model --example leakage`.
//!
//! ```text
//!           embed     first layers       layers on hosts       last layers     head
//! tokens ────────► here ──────────► here ───────────────► ... ─────────► here ────► logits
//!                        boundary k                      boundary n - m
//! ```
//!
//! [`PrivateLayers`] is one engine per end, with the weights once for all chats of the process.
//! [`PrivateLayers::around`] wraps what runs the layers in between: hosts, or this machine when it
//! has taken over from them. Either is given the rows of boundary `k`, and keeps those for replay;
//! the layers here keep their keys and values whatever becomes of the hosts. A prompt goes in
//! pieces: while a piece is with the hosts the next one is computed here. Rows of several chats
//! are computed as one batch ([`batcher`](crate::batcher)).
//!
//! The residual stream is rounded after every block, so where the layers run cannot change a bit
//! of an answer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearthnet_bus::Descriptor;
use hearthnet_bus::flight::PipelineId;
use hearthnet_model::ModelFile;
use hearthnet_model::engine::{Engine, EngineError, EngineOptions, Head, LoadError, SeqId, Span};

use crate::Cancel;
use crate::backend::{Backend, HopClock, HopTimes, RouteHop, Run};
use crate::batcher::{Batcher, Present};
use crate::error::ChatError;
use crate::pipeline::even_cut;
use crate::write_batch::WriteBatch;

/// Most rows of different chats in one batch, pieces of prompts counted as one.
const BATCH: usize = 32;
/// Rows of a piece for the last layers: as many as the engine takes through its layers at once.
const LAST_PIECE: usize = 64;

/// The first and last layers of a model on this machine, for all chats of this process that run
/// the others on hosts. Clones share them.
#[derive(Debug, Clone)]
pub struct PrivateLayers {
    total: u32,
    /// Rows of prompt that are handed on at a time.
    piece_rows: usize,
    first: Option<Arc<Layers>>,
    last: Option<Arc<Layers>>,
}

impl PrivateLayers {
    /// No layers of a model that has `total`: hosts run all of them.
    pub fn none(total: u32) -> Self {
        Self {
            total,
            piece_rows: 1,
            first: None,
            last: None,
        }
    }

    /// Loads the first `first` and the last `last` layers of a model, which must leave at least
    /// one for hosts. `options` bound the memory for keys and values of each end, and the number
    /// of conversations. A prompt is handed on `piece_rows` rows at a time, at least 1.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(
        file: &ModelFile,
        model_id: &str,
        (first, last): (u32, u32),
        piece_rows: usize,
        options: &EngineOptions,
    ) -> Result<Self, LoadError> {
        let total = file.spec().layers;
        let load = |range: Range<u32>| {
            (!range.is_empty())
                .then(|| Engine::load(file, range, options, &mut |_, _| {}))
                .transpose()
                .map(|engine| engine.map(|engine| Arc::new(Layers::new(engine, model_id))))
        };
        if first.saturating_add(last) >= total {
            return Err(LoadError::Layers {
                range: first..total.saturating_sub(last),
                layers: total,
            });
        }
        Ok(Self {
            total,
            piece_rows: piece_rows.max(1),
            first: load(0..first)?,
            last: load(total - last..total)?,
        })
    }

    /// The layers in between, which hosts run, half-open.
    pub fn hosted(&self) -> Range<u32> {
        let first = self.first.as_ref().map_or(0, |first| first.range.end);
        let last = self
            .last
            .as_ref()
            .map_or(self.total, |last| last.range.start);
        first..last
    }

    /// Memory that the weights take, in bytes.
    pub fn weight_bytes(&self) -> u64 {
        let ends = self.first.iter().chain(&self.last);
        ends.map(|layers| layers.weight_bytes).sum()
    }

    /// What lies outside the blocks, on the threads of the layers here if there are any: they take
    /// turns.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn head(&self, file: &ModelFile, options: &EngineOptions) -> Result<Head, LoadError> {
        match self.first.as_ref().or(self.last.as_ref()) {
            Some(layers) => match layers.engine.lock() {
                Ok(engine) => Head::beside(file, &engine),
                Err(_) => Head::load(file, options),
            },
            None => Head::load(file, options),
        }
    }

    /// A sequence that runs the first and last layers here, and those in between in `between`.
    ///
    /// # Errors
    /// [`ChatError::Busy`] when there are as many conversations as may be.
    pub fn around(&self, between: Box<dyn Backend>) -> Result<Box<dyn Backend>, ChatError> {
        if self.first.is_none() && self.last.is_none() {
            return Ok(between);
        }
        let open = |layers: &Option<Arc<Layers>>| layers.as_ref().map(Sequence::open).transpose();
        Ok(Box::new(Around {
            piece_rows: self.piece_rows,
            first: open(&self.first)?,
            between,
            last: open(&self.last)?,
            submitted: Submitted::default(),
            write_batch: None,
        }))
    }
}

/// A range of layers on this machine, for several chats.
#[derive(Debug)]
struct Layers {
    shard_id: String,
    range: Range<u32>,
    width: usize,
    weight_bytes: u64,
    /// Of all sequences, as it was after the last batch.
    kv_bytes: AtomicU64,
    engine: Mutex<Engine>,
    batcher: Batcher<Job, Result<Done, ChatError>>,
}

/// Rows that want to go through the layers.
struct Job {
    seq: SeqId,
    position: u32,
    rows: Vec<f32>,
}

/// Rows that have been through the layers.
struct Done {
    rows: Vec<f32>,
    compute_us: u32,
}

impl Layers {
    fn new(engine: Engine, model_id: &str) -> Self {
        let range = engine.layers();
        let last = range.end.saturating_sub(1);
        Self {
            shard_id: Descriptor::shard_id(model_id, range.start, last),
            width: engine.spec().width as usize,
            weight_bytes: engine.weight_bytes(),
            kv_bytes: AtomicU64::new(0),
            engine: Mutex::new(engine),
            batcher: Batcher::new(BATCH),
            range,
        }
    }

    fn with<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> Result<T, ChatError> {
        let mut engine = self.engine.lock().map_err(|_| failed())?;
        let result = f(&mut engine);
        let kv_bytes = engine.kv_bytes_in_use();
        self.kv_bytes.store(kv_bytes, Ordering::Relaxed);
        Ok(result)
    }

    /// Runs jobs as one batch; should that not go, each by itself.
    fn run(&self, jobs: Vec<Job>) -> Vec<Result<Done, ChatError>> {
        let count = jobs.len();
        let together = self.with(|engine| self.forward(engine, &jobs));
        match together.and_then(|done| done) {
            Ok(done) => done.into_iter().map(Ok).collect(),
            Err(error) if count == 1 => vec![Err(error)],
            // What cannot be computed is the failure of its own chat only.
            Err(_) => jobs
                .into_iter()
                .flat_map(|job| self.run(vec![job]))
                .collect(),
        }
    }

    fn forward(&self, engine: &mut Engine, jobs: &[Job]) -> Result<Vec<Done>, ChatError> {
        let began = Instant::now();
        let mut spans = Vec::with_capacity(jobs.len());
        let mut rows = Vec::with_capacity(jobs.iter().map(|job| job.rows.len()).sum());
        for job in jobs {
            // What the sequence held from there on is forgotten.
            engine
                .truncate(job.seq, job.position)
                .map_err(engine_error)?;
            spans.push(Span {
                seq: job.seq,
                position: job.position,
                rows: u32::try_from(job.rows.len() / self.width).unwrap_or(u32::MAX),
            });
            rows.extend_from_slice(&job.rows);
        }
        engine.forward(&spans, &mut rows).map_err(engine_error)?;
        let compute_us = us(began);
        let mut rest = rows;
        let done = jobs.iter().map(|job| {
            let tail = rest.split_off(job.rows.len());
            Done {
                rows: std::mem::replace(&mut rest, tail),
                compute_us,
            }
        });
        Ok(done.collect())
    }
}

/// One chat's sequence in a range of layers here.
struct Sequence {
    layers: Arc<Layers>,
    seq: SeqId,
    clock: HopClock,
    /// While a call runs.
    present: Option<Present>,
    /// What a row took a layer last.
    per_layer: Option<Duration>,
}

impl Sequence {
    fn open(layers: &Arc<Layers>) -> Result<Self, ChatError> {
        let seq = layers.with(|engine| match engine.open() {
            Err(EngineError::TooManySequences(limit)) => Err(ChatError::Busy(format!(
                "this machine runs its own layers for {limit} conversations at once"
            ))),
            seq => seq.map_err(engine_error),
        })??;
        Ok(Self {
            layers: Arc::clone(layers),
            seq,
            clock: HopClock::default(),
            present: None,
            per_layer: None,
        })
    }

    /// Takes rows through the layers, with those of other chats.
    fn run(
        &mut self,
        position: u32,
        rows: Vec<f32>,
        write_batch: Option<WriteBatch>,
    ) -> Result<(Vec<f32>, Option<WriteBatch>), ChatError> {
        let asked = Instant::now();
        let one = rows.len() == self.layers.width;
        let count = (rows.len() / self.layers.width.max(1)) as u32;
        let job = Job {
            seq: self.seq,
            position,
            rows,
        };
        let work = |jobs| self.layers.run(jobs);
        // A piece of a prompt is a batch by itself.
        let done = self.layers.batcher.run(job, write_batch, one, work);
        let (done, write_batch) = done.ok_or_else(failed)?;
        let Done { rows, compute_us } = done?;
        let work = count.saturating_mul(self.layers.range.len() as u32);
        let compute = Duration::from_micros(compute_us.into());
        self.per_layer = compute.checked_div(work);
        if one {
            let took = asked.elapsed();
            self.clock
                .record(took, compute_us, us(asked).saturating_sub(compute_us));
        }
        Ok((rows, write_batch))
    }

    fn begin_call(&mut self) {
        self.clock.clear();
        self.present = Some(self.layers.batcher.attend());
    }

    fn hop(&self) -> RouteHop {
        let Range { start, end } = self.layers.range;
        RouteHop {
            shard_id: self.layers.shard_id.clone(),
            host: None,
            endpoint: None,
            layers: (start, end.saturating_sub(1)),
            memory_mb: (self.layers.weight_bytes + self.layers.kv_bytes.load(Ordering::Relaxed))
                >> 20,
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // An engine that has failed frees its memory when it goes itself.
        let _ = self.layers.with(|engine| engine.close(self.seq));
    }
}

/// What was submitted since the last output.
#[derive(Default)]
struct Submitted {
    /// Of the first of them.
    position: u32,
    /// How many there are, handed on or not.
    count: usize,
    /// Those that have not been through the first layers.
    waiting: Vec<f32>,
    /// Announced to follow.
    more: u32,
    /// What went wrong, to be told by the output.
    failed: Option<ChatError>,
}

/// One sequence: its first and last layers here, those in between elsewhere.
struct Around {
    piece_rows: usize,
    first: Option<Sequence>,
    between: Box<dyn Backend>,
    last: Option<Sequence>,
    submitted: Submitted,
    /// Of the last layers' last batch.
    write_batch: Option<WriteBatch>,
}

impl Around {
    fn ends(&self) -> impl Iterator<Item = &Sequence> {
        self.first.iter().chain(&self.last)
    }

    /// Takes the next waiting rows through the first layers, and hands them on.
    fn hand_on(&mut self, rows: usize, width: usize, cancel: &Cancel) -> Result<(), ChatError> {
        let submitted = &mut self.submitted;
        let waiting = submitted.waiting.len() / width;
        let rest = submitted.waiting.split_off(rows.min(waiting) * width);
        let mut piece = std::mem::replace(&mut submitted.waiting, rest);
        let position = submitted.position + (submitted.count - waiting) as u32;
        let more = (submitted.waiting.len() / width) as u32 + submitted.more;
        if let Some(first) = &mut self.first {
            let write_batch;
            (piece, write_batch) = first.run(position, piece, self.write_batch.take())?;
            if let Some(write_batch) = write_batch {
                self.between.join(write_batch);
            }
            if let Some(per_layer) = first.per_layer {
                self.between.beside(per_layer);
            }
        }
        self.between.submit_part(position, &piece, more, cancel);
        Ok(())
    }

    fn width(&self) -> usize {
        self.ends().map(|end| end.layers.width).next().unwrap_or(1)
    }
}

impl Backend for Around {
    fn submit_part(&mut self, position: u32, rows: &[f32], more: u32, cancel: &Cancel) {
        let width = self.width();
        let count = rows.len() / width;
        let submitted = &mut self.submitted;
        if submitted.more == 0 {
            *submitted = Submitted {
                position,
                ..Submitted::default()
            };
        }
        submitted.count += count;
        submitted.waiting.extend_from_slice(rows);
        submitted.more = more;
        // A prompt is worked on while its output is waited for.
        if self.first.is_none() || submitted.count == 1 {
            let handed = self.hand_on(count, width, cancel);
            self.submitted.failed = handed.err();
        }
    }

    fn output(&mut self, out: &mut Vec<f32>, run: &mut Run<'_>) -> Result<(), ChatError> {
        let width = self.width();
        if let Some(failed) = self.submitted.failed.take() {
            return Err(failed);
        }
        let piece = even_cut(self.submitted.waiting.len() / width, self.piece_rows);
        while !self.submitted.waiting.is_empty() {
            // Whoever gave up takes no further turn.
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            self.hand_on(piece, width, run.cancel)?;
        }
        self.between.output(out, run)?;
        let Some(last) = &mut self.last else {
            return Ok(());
        };
        let mut write_batch = self.between.take_write_batch();
        // Whoever took over in between gives all rows there are.
        let Submitted {
            position, count, ..
        } = self.submitted;
        out.drain(..out.len().saturating_sub(count * width));
        let mut at = position;
        let mut rows = std::mem::take(out);
        while !rows.is_empty() {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let rest = rows.split_off(rows.len().min(LAST_PIECE * width));
            let piece = (rows.len() / width) as u32;
            (*out, write_batch) = last.run(at, rows, write_batch)?;
            (at, rows) = (at + piece, rest);
        }
        out.drain(..out.len().saturating_sub(width));
        self.write_batch = write_batch;
        Ok(())
    }

    fn take_write_batch(&mut self) -> Option<WriteBatch> {
        match self.last {
            Some(_) => self.write_batch.take(),
            None => self.between.take_write_batch(),
        }
    }

    fn join(&mut self, write_batch: WriteBatch) {
        match self.first {
            Some(_) => self.write_batch = Some(write_batch),
            None => self.between.join(write_batch),
        }
    }

    fn route(&self) -> Vec<RouteHop> {
        let mut route: Vec<RouteHop> = self.first.iter().map(Sequence::hop).collect();
        route.extend(self.between.route());
        route.extend(self.last.iter().map(Sequence::hop));
        route
    }

    fn times(&self) -> Vec<HopTimes> {
        let summary = |end: &Sequence| end.clock.summary();
        let mut times: Vec<HopTimes> = self.first.iter().map(summary).collect();
        times.extend(self.between.times());
        times.extend(self.last.iter().map(summary));
        times
    }

    fn begin_call(&mut self) {
        self.write_batch = None;
        self.first
            .iter_mut()
            .chain(&mut self.last)
            .for_each(Sequence::begin_call);
        self.between.begin_call();
    }

    fn expect(&mut self, positions: u32, cancel: &Cancel) {
        self.between.expect(positions, cancel);
    }

    fn end_call(&mut self) {
        self.write_batch = None;
        for end in self.first.iter_mut().chain(&mut self.last) {
            end.present = None;
        }
        self.between.end_call();
    }

    fn pipeline(&self) -> Option<PipelineId> {
        self.between.pipeline()
    }

    fn is_alive(&self) -> bool {
        self.between.is_alive()
    }
}

fn us(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX)
}

fn failed() -> ChatError {
    ChatError::Engine("this machine's own layers failed in an earlier chat".into())
}

fn engine_error(error: EngineError) -> ChatError {
    match error {
        EngineError::ContextFull { .. } => ChatError::BadRequest(error.to_string()),
        _ => ChatError::Engine(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
