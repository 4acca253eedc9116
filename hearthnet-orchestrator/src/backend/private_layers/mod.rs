//! Layers that the caller computes itself: the first ones, so that no host sees rows of the
//! embedding table, and optionally the last ones.
//!
//! Rows that enter layer 0 come from a public table: looking them up reveals the prompt, token by
//! token. Rows after some local layers are in no table. The remaining leakage is measured by
//! `cargo run --release -p hearthnet-engine --example leakage`.
//!
//! ```text
//!           embed     first layers       layers on hosts       last layers     head
//! tokens ────────► here ──────────► here ───────────────► ... ─────────► here ────► logits
//!                        boundary k                      boundary n - m
//! ```
//!
//! [`PrivateLayers`] has one engine per end, with the weights once for all chats of the process.
//! [`PrivateLayers::around`] wraps the backend of the layers in between: hosts, or this machine
//! after a fallback. That backend gets the rows of boundary `k` and keeps them for replay; the
//! private layers keep their KV when hosts are replaced. A prompt is run in chunks: while hosts
//! compute one, the next is computed here. Each end is a sequence on a shared engine
//! ([`local`](crate::backend::local)), batched with other chats.
//!
//! The residual stream is rounded after every block, so the placement of layers does not change a
//! bit of an answer.
//!
//! If a model has per-layer inputs, hosts get those of their layers with each row. They are a
//! function of the token, so these hosts can tell the tokens. Private layers do not hide them.

use std::ops::Range;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_engine::{Engine, EngineOptions, Head, LoadError};
use hearthnet_files::ModelFile;
use hearthnet_files::spec::RowShape;

use crate::Cancel;
use crate::backend::local::{LocalBackend, SharedEngine};
use crate::backend::pipeline::even_cut;
use crate::backend::{Backend, HopTimes, Output, RouteHop, Rows, Run};
use crate::error::ChatError;

/// Rows per chunk of the last layers: as many as the engine runs through its layers at once.
const LAST_PIECE: usize = 64;

/// First and last layers of a model on this machine, for all chats of this process. Clones share
/// them.
#[derive(Debug, Clone)]
pub struct PrivateLayers {
    total: u32,
    /// Prompt rows per chunk.
    piece_rows: usize,
    first: Option<SharedEngine>,
    last: Option<SharedEngine>,
}

impl PrivateLayers {
    /// No private layers: hosts run all `total` layers.
    pub fn none(total: u32) -> Self {
        Self {
            total,
            piece_rows: 1,
            first: None,
            last: None,
        }
    }

    /// Loads the first `first` and the last `last` layers of a model, which must leave at least one
    /// layer to hosts. `options` limits the KV memory and the number of conversations of each end.
    /// Prompts are run in chunks of `piece_rows` rows, at least 1.
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
                // The engine's own options bound its KV memory.
                .map(|engine| engine.map(|engine| SharedEngine::new(engine, model_id, u64::MAX)))
        };
        if last > 0 && file.spec().per_layer.is_some() {
            return Err(LoadError::Unsupported(
                "private last layers of a model with per-layer embeddings".into(),
            ));
        }
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

    /// Layers that hosts run, half-open.
    pub fn hosted(&self) -> Range<u32> {
        let first = self.first.as_ref().map_or(0, |first| first.0.layers.end);
        let last = self.last.as_ref();
        first..last.map_or(self.total, |last| last.0.layers.start)
    }

    pub fn weight_bytes(&self) -> u64 {
        let ends = self.first.iter().chain(&self.last);
        ends.map(|end| end.0.weight_bytes).sum()
    }

    /// Loads the output head. It uses the threads of a private engine, if there is one: they take
    /// turns.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn head(&self, file: &ModelFile, options: &EngineOptions) -> Result<Head, LoadError> {
        let end = self.first.as_ref().or(self.last.as_ref());
        match end.map(|end| end.0.with(|engine| Head::beside(file, engine))) {
            Some(Ok(head)) => head,
            Some(Err(_)) | None => Head::load(file, options),
        }
    }

    /// Wraps a backend, so that the first and last layers run here.
    ///
    /// # Errors
    /// [`ChatError::Busy`] if the maximum number of conversations is open.
    pub fn around(&self, middle: Box<dyn Backend>) -> Result<Box<dyn Backend>, ChatError> {
        if self.first.is_none() && self.last.is_none() {
            return Ok(middle);
        }
        let open = |end: &Option<SharedEngine>| -> Result<_, ChatError> {
            let Some(end) = end else { return Ok(None) };
            let mut backend = end.open()?;
            backend.hosted = true;
            Ok(Some(backend))
        };
        let rows = self.first.as_ref().or(self.last.as_ref());
        Ok(Box::new(PrivateEnds {
            shape: rows.map_or(RowShape::plain(1), |end| end.0.shape),
            layers: self.total,
            piece_rows: self.piece_rows,
            first: open(&self.first)?,
            middle,
            last: open(&self.last)?,
            submitted: Submitted::default(),
        }))
    }
}

/// Rows submitted since the last output.
#[derive(Default)]
struct Submitted {
    /// Position of the first row.
    position: u32,
    /// Number of rows, including those already handed on.
    count: usize,
    /// Rows that have not been through the first layers.
    waiting: Vec<f32>,
    /// Number of rows announced to follow.
    more: u32,
    /// True if the output has all rows, false if it has only the last.
    all: bool,
    /// Error, to be returned by the output.
    failed: Option<ChatError>,
}

/// Sequence with its first and last layers here and the others in `middle`.
struct PrivateEnds {
    shape: RowShape,
    /// Layers of the model.
    layers: u32,
    piece_rows: usize,
    first: Option<LocalBackend>,
    middle: Box<dyn Backend>,
    last: Option<LocalBackend>,
    submitted: Submitted,
}

impl PrivateEnds {
    fn ends(&mut self) -> impl Iterator<Item = &mut LocalBackend> {
        self.first.iter_mut().chain(&mut self.last)
    }

    /// Backends in layer order.
    fn parts(&self) -> impl Iterator<Item = &dyn Backend> {
        let first = self.first.iter().map(|first| first as &dyn Backend);
        let last = self.last.iter().map(|last| last as &dyn Backend);
        first.chain([self.middle.as_ref()]).chain(last)
    }

    /// Runs the next waiting rows through the first layers and submits them to `middle`.
    async fn hand_on(&mut self, rows: usize, cancel: &Cancel) -> Result<(), ChatError> {
        let values = self.row_values();
        let submitted = &mut self.submitted;
        let waiting = submitted.waiting.len() / values;
        let rest = submitted.waiting.split_off(rows.min(waiting) * values);
        let mut piece = std::mem::replace(&mut submitted.waiting, rest);
        let position = submitted.position + (submitted.count - waiting) as u32;
        let more = (submitted.waiting.len() / values) as u32 + submitted.more;
        if let Some(first) = &mut self.first {
            let own = self.shape.before(first.engine.0.layers.len());
            let (rows, inputs) = split_rows(piece, values, own);
            let rows = first.rows(position, rows, true, cancel).await?;
            piece = join_rows(rows, self.shape.width as usize, &inputs, values - own);
            if let Some(per_layer) = first.per_layer {
                self.middle.set_reference_speed(per_layer);
            }
        }
        let rows = Rows {
            position,
            values: &piece,
            more,
            all: self.submitted.all,
        };
        self.middle.submit(rows, cancel).await;
        Ok(())
    }

    /// Values of a submitted row.
    fn row_values(&self) -> usize {
        self.shape.before(self.layers as usize)
    }

    /// Runs the submitted rows through all layers.
    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        let (values, width) = (self.row_values(), self.shape.width as usize);
        if let Some(failed) = self.submitted.failed.take() {
            return Err(failed);
        }
        let piece = even_cut(self.submitted.waiting.len() / values, self.piece_rows);
        while !self.submitted.waiting.is_empty() {
            // A cancelled chat must not compute further chunks.
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            self.hand_on(piece, run.cancel).await?;
        }
        let mut rows = self.middle.output(run).await?;
        let Some(last) = &mut self.last else {
            return Ok(rows);
        };
        // Earlier rows precede them if hosts ran them again, or this machine did: the last layers
        // then run them again as well, because the rows before may have been wrong.
        let (count, all) = (self.submitted.count, self.submitted.all);
        let end = self.submitted.position as usize + count;
        let mut at = end.saturating_sub(rows.len() / width) as u32;
        let mut out = Vec::new();
        while !rows.is_empty() {
            if run.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let rest = rows.split_off(rows.len().min(LAST_PIECE * width));
            let piece = (rows.len() / width) as u32;
            if !all {
                out.clear();
            }
            out.extend(last.rows(at, rows, true, run.cancel).await?);
            (at, rows) = (at + piece, rest);
        }
        let wanted = if all { count } else { 1 };
        out.drain(..out.len().saturating_sub(wanted * width));
        Ok(out)
    }
}

/// Cuts each row of `values` values behind the first `own`.
fn split_rows(rows: Vec<f32>, values: usize, own: usize) -> (Vec<f32>, Vec<f32>) {
    if values == own {
        return (rows, Vec::new());
    }
    let (mut firsts, mut rests) = (Vec::new(), Vec::new());
    for row in rows.chunks_exact(values) {
        let (first, rest) = row.split_at(own.min(values));
        firsts.extend_from_slice(first);
        rests.extend_from_slice(rest);
    }
    (firsts, rests)
}

/// Appends `rest` values to each row of `width` values.
fn join_rows(rows: Vec<f32>, width: usize, rests: &[f32], rest: usize) -> Vec<f32> {
    if rest == 0 {
        return rows;
    }
    let mut joined = Vec::with_capacity(rows.len() + rests.len());
    for (row, rest) in rows.chunks_exact(width).zip(rests.chunks_exact(rest)) {
        joined.extend_from_slice(row);
        joined.extend_from_slice(rest);
    }
    joined
}

impl Backend for PrivateEnds {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let count = rows.values.len() / self.row_values();
        let submitted = &mut self.submitted;
        if submitted.more == 0 {
            *submitted = Submitted {
                position: rows.position,
                ..Submitted::default()
            };
        }
        submitted.count += count;
        submitted.waiting.extend_from_slice(rows.values);
        (submitted.more, submitted.all) = (rows.more, rows.all);
        // The rows of a prompt are computed by `output`.
        let at_once = self.first.is_none() || submitted.count == 1;
        async move {
            if at_once {
                self.submitted.failed = self.hand_on(count, cancel).await.err();
            }
        }
        .boxed_local()
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        let forked = async move {
            let middle = self.middle.fork().await?;
            let mut ends = [None, None];
            for (fork, end) in ends.iter_mut().zip([&mut self.first, &mut self.last]) {
                if let Some(end) = end {
                    *fork = Some(end.forked().await?);
                }
            }
            let [first, last] = ends;
            let fork = Self {
                shape: self.shape,
                layers: self.layers,
                piece_rows: self.piece_rows,
                first,
                middle,
                last,
                submitted: Submitted::default(),
            };
            Some(Box::new(fork) as Box<dyn Backend>)
        };
        forked.boxed_local()
    }

    fn rewind(&mut self, position: u32) -> LocalBoxFuture<'_, Result<u32, ChatError>> {
        let rewound = async move {
            // All layers end at the same position. Each round lowers it, or is the last one.
            let mut left = position;
            loop {
                let asked = left;
                for end in self.ends() {
                    left = end.rewind(left).await?;
                }
                left = self.middle.rewind(left).await?;
                if left == asked {
                    return Ok(left);
                }
            }
        };
        rewound.boxed_local()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.middle.as_ref())
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        Some(self.middle.as_mut())
    }

    fn route(&self) -> Vec<RouteHop> {
        self.parts().flat_map(Backend::route).collect()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.parts().flat_map(Backend::times).collect()
    }

    fn begin_call(&mut self, positions: u32) {
        self.ends().for_each(|end| end.begin_call(positions));
        self.middle.begin_call(positions);
    }

    fn end_call(&mut self) {
        self.ends().for_each(Backend::end_call);
        self.middle.end_call();
    }
}

#[cfg(test)]
mod tests;
