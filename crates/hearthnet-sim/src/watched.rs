//! Engine of a host: the exact engine, which the observer watches, and which may lie.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use hearthnet_bus::NodeId;
use hearthnet_engine::{Engine, SeqId};
use hearthnet_shard::{Footprint, LayerEngine, Span, StreamFault};

use crate::lies::Lies;
use crate::model::Model;
use crate::observer::Actor;
use crate::random::Random;

/// Counters and faults of a host's engine.
#[derive(Clone)]
pub(crate) struct Watch {
    pub(crate) model: Arc<Model>,
    pub(crate) host: NodeId,
    pub(crate) actor: Actor,
    pub(crate) spoiled: Arc<AtomicU32>,
    pub(crate) lying: Arc<AtomicBool>,
    pub(crate) lies: Lies,
    pub(crate) sequences: Arc<AtomicU64>,
}

/// The engine. It must compute rows of fault-free runs, and rows that follow from lies.
pub(crate) struct Watched {
    engine: Engine,
    watch: Watch,
    open: u64,
    /// First position of each sequence that follows from another host's lie.
    misled: BTreeMap<SeqId, u32>,
}

/// Each span with its rows.
fn rows_of<'a>(
    spans: &'a [Span<SeqId>],
    mut x: &'a [f32],
    width: usize,
) -> impl Iterator<Item = (&'a Span<SeqId>, &'a [f32])> {
    spans.iter().map(move |span| {
        let (rows, rest) = x.split_at(span.rows as usize * width);
        x = rest;
        (span, rows)
    })
}

impl Watched {
    pub(crate) fn new(engine: Engine, watch: Watch) -> Self {
        Self {
            engine,
            watch,
            open: 0,
            misled: BTreeMap::new(),
        }
    }

    fn count(&mut self, open: u64) {
        let (before, all) = (
            std::mem::replace(&mut self.open, open),
            &self.watch.sequences,
        );
        all.fetch_add(open, Ordering::Relaxed);
        all.fetch_sub(before, Ordering::Relaxed);
    }

    /// Checks the rows that it receives.
    fn check_inputs(&mut self, layers: (u32, u32), spans: &[Span<SeqId>], x: &[f32]) {
        let Watch {
            model, actor, lies, ..
        } = &self.watch;
        let width = model.width();
        for (span, rows) in rows_of(spans, x, width) {
            let (position, count) = (span.position, span.rows);
            actor.note(format!("layers {layers:?}, {count} rows from {position}"));
            if model.knows(layers.0, position, rows, |_, _| false) {
                continue;
            }
            let is_lie = |position, row: &[f32]| lies.explain(layers.0, position, row);
            let is_known = model.knows(layers.0, position, rows, is_lie);
            actor.check(is_known, || {
                format!(
                    "rows {position}+{count} before layer {} are of no transcript",
                    layers.0
                )
            });
            let mut lies = (position..).zip(rows.chunks(width));
            if let Some((first, _)) = lies.find(|(position, row)| is_lie(*position, row)) {
                self.misled.entry(span.seq).or_insert(first);
            }
        }
    }

    /// Notes the rows that are wrong because another host has lied.
    fn note_outputs(&self, layers: (u32, u32), spans: &[Span<SeqId>], x: &[f32]) {
        let width = self.watch.model.width();
        for (span, rows) in rows_of(spans, x, width) {
            let from = match self.watch.lying.load(Ordering::Relaxed) {
                true => Some(0),
                false => self.misled.get(&span.seq).copied(),
            };
            let rows = (span.position..).zip(rows.chunks(width));
            for (position, row) in rows.filter(|(at, _)| from.is_some_and(|from| *at >= from)) {
                self.watch.lies.note(layers.1 + 1, position, row);
            }
        }
    }

    /// Changes all values by 0.4%, which no check of rows can find: each up or down, as this host
    /// always does it, so that no other host tells the same lie.
    fn lie(&self, x: &mut [f32]) {
        let Watch { model, host, .. } = &self.watch;
        let seed = host.as_bytes().iter().fold(0, |seed: u64, byte| {
            seed.wrapping_mul(257).wrapping_add(u64::from(*byte))
        });
        for row in x.chunks_mut(model.width()) {
            let mut random = Random::new(seed, 28);
            for value in row {
                *value *= match random.one_in(2) {
                    true => 1.0 + 1.0 / 256.0,
                    false => 1.0 - 1.0 / 256.0,
                };
            }
        }
        // As the caller receives them.
        let (mut encoded, mut decoded) = (Vec::new(), Vec::new());
        model.boundary().encode(x, &mut encoded);
        if model.boundary().decode(&encoded, &mut decoded).is_ok() {
            x.copy_from_slice(&decoded);
        }
        self.watch.lies.told_by(*host);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.count(0);
    }
}

impl LayerEngine for Watched {
    type Seq = SeqId;

    fn open(&mut self) -> Result<SeqId, StreamFault> {
        let seq = LayerEngine::open(&mut self.engine);
        self.count(self.engine.sequences() as u64);
        seq
    }

    fn fork(&mut self, seq: SeqId, length: u32) -> Result<SeqId, StreamFault> {
        let fork = LayerEngine::fork(&mut self.engine, seq, length);
        self.count(self.engine.sequences() as u64);
        let first = self.misled.get(&seq).copied();
        if let (Ok(fork), Some(first)) = (&fork, first.filter(|first| *first < length)) {
            self.misled.insert(*fork, first);
        }
        fork
    }

    fn close(&mut self, seq: SeqId) {
        LayerEngine::close(&mut self.engine, seq);
        self.misled.remove(&seq);
        self.count(self.engine.sequences() as u64);
    }

    fn len(&self, seq: SeqId) -> u32 {
        LayerEngine::len(&self.engine, seq)
    }

    fn truncate(&mut self, seq: SeqId, length: u32) -> Result<u32, StreamFault> {
        let kept = LayerEngine::truncate(&mut self.engine, seq, length)?;
        self.misled
            .retain(|one, first| *one != seq || *first < kept);
        Ok(kept)
    }

    fn forward(
        &mut self,
        layers: (u32, u32),
        spans: &[Span<SeqId>],
        x: &mut [f32],
    ) -> Result<(), StreamFault> {
        self.check_inputs(layers, spans, x);
        let sent = x.to_vec();
        LayerEngine::forward(&mut self.engine, layers, spans, x)?;
        if self.watch.lying.load(Ordering::Relaxed) {
            self.lie(x);
        }
        self.note_outputs(layers, spans, x);
        let spoiled = &self.watch.spoiled;
        let spoil = |left: u32| left.checked_sub(1);
        if let Ok(left) = spoiled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spoil) {
            self.watch.actor.note("spoils rows");
            self.watch.lies.told_by(self.watch.host);
            match left % 3 {
                0 => x.fill(f32::NAN),
                1 => x.copy_from_slice(&sent),
                _ => x.fill(0.0),
            }
        }
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        LayerEngine::weight_bytes(&self.engine)
    }

    fn footprint(&self) -> Footprint {
        LayerEngine::footprint(&self.engine)
    }

    fn kv_bytes_in_use(&self) -> u64 {
        LayerEngine::kv_bytes_in_use(&self.engine)
    }
}
