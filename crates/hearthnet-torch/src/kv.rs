//! KV cache of all sequences, in tensors on the device.
//!
//! A sequence has two tensors for each layer of the engine, with room for whole pages of 32
//! positions. A sequence that outgrows its tensors is copied into larger ones, layer by layer. That
//! happens once in 32 positions, each of which reads all of them anyway. A fork shares the tensors
//! until one of the two sequences appends.
//!
//! Freed tensors are overwritten with zeros first, so that no caller's text outlives its sequence.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use hearthnet_engine::Span;
use tch::{Device, TchError, Tensor};

use crate::error::TorchError;
use crate::options::Dtype;

pub(crate) const PAGE: u32 = 32;

/// Id of a sequence in one engine. Ids are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Seq(u64);

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Shape and format of the keys and values of one position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// First layer of the engine.
    pub(crate) first_layer: u32,
    pub(crate) layers: u32,
    pub(crate) heads: u32,
    /// Values per head.
    pub(crate) key: u32,
    pub(crate) value: u32,
    pub(crate) dtype: Dtype,
    pub(crate) device: Device,
}

impl Geometry {
    /// Bytes per position over all layers.
    pub(crate) fn position_bytes(&self) -> u64 {
        let values = u64::from(self.heads) * u64::from(self.key + self.value);
        values * u64::from(self.layers) * self.dtype.bytes() as u64
    }

    fn page_bytes(&self) -> u64 {
        self.position_bytes() * u64::from(PAGE)
    }

    pub(crate) fn layer_range(&self) -> Range<u32> {
        self.first_layer..self.first_layer.saturating_add(self.layers)
    }

    /// An unwritten tensor `[heads, positions, width]`.
    fn tensor(&self, pages: u32, width: u32) -> Result<Tensor, TchError> {
        let size = [
            self.heads.into(),
            i64::from(pages) * i64::from(PAGE),
            width.into(),
        ];
        Tensor::f_empty(size, (self.dtype.kind(), self.device))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Budget for pages, in bytes.
    pub(crate) bytes: u64,
    /// Positions per sequence.
    pub(crate) context: u32,
    pub(crate) sequences: usize,
}

/// Keys and values of one sequence, or of several forks.
pub(crate) struct Buffers {
    /// Per layer, keys and values: `[heads, positions, width]`.
    layers: Vec<(Tensor, Tensor)>,
    /// Pages that every tensor has room for.
    pages: u32,
    /// Pages charged to `in_use`: more than `pages` after a resize that failed halfway.
    counted: u32,
    /// Pages of all sequences together.
    in_use: Rc<Cell<u64>>,
}

impl Buffers {
    fn new(geometry: &Geometry, pages: u32, in_use: &Rc<Cell<u64>>) -> Result<Self, TchError> {
        let layer = |_| {
            Ok::<_, TchError>((
                geometry.tensor(pages, geometry.key)?,
                geometry.tensor(pages, geometry.value)?,
            ))
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_, _>>()?;
        in_use.set(in_use.get() + u64::from(pages));
        Ok(Self {
            layers,
            pages,
            counted: pages,
            in_use: Rc::clone(in_use),
        })
    }

    /// Keys and values of a layer, counted from the engine's first.
    pub(crate) fn layer(&self, layer: usize) -> Result<&(Tensor, Tensor), TchError> {
        let missing = || TchError::Shape(format!("no layer {layer} in the cache"));
        self.layers.get(layer).ok_or_else(missing)
    }

    /// Resizes all tensors to `pages`, keeping the first `len` positions. After an error there is
    /// still room for `len` positions, and tensors that have grown already are charged.
    fn resize(&mut self, geometry: &Geometry, pages: u32, len: u32) -> Result<(), TchError> {
        self.count(self.counted.max(pages));
        for (keys, values) in &mut self.layers {
            for (tensor, width) in [(keys, geometry.key), (values, geometry.value)] {
                let fresh = geometry.tensor(pages, width)?;
                copy(tensor, &fresh, len)?;
                let mut old = std::mem::replace(tensor, fresh);
                let _ = old.f_zero_()?;
            }
        }
        self.count(pages);
        self.pages = pages;
        Ok(())
    }

    fn count(&mut self, pages: u32) {
        let others = self.in_use.get().saturating_sub(self.counted.into());
        self.in_use.set(others + u64::from(pages));
        self.counted = pages;
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for (keys, values) in &mut self.layers {
            // If zeroing fails, the device has lost the contents anyway.
            let _ = (keys.f_zero_(), values.f_zero_());
        }
        self.count(0);
    }
}

/// Copies the first `len` positions.
fn copy(from: &Tensor, to: &Tensor, len: u32) -> Result<(), TchError> {
    let mut target = to.f_narrow(1, 0, len.into())?;
    target.f_copy_(&from.f_narrow(1, 0, len.into())?)
}

struct Sequence {
    len: u32,
    /// Layers whose keys and values are stored. Ignored while `len` is 0.
    layers: Range<u32>,
    buffers: Rc<Buffers>,
}

impl Sequence {
    fn gap(&self, seq: Seq, position: u32) -> TorchError {
        TorchError::PositionGap {
            seq,
            position,
            len: self.len,
        }
    }
}

pub(crate) struct Cache {
    geometry: Geometry,
    limits: Limits,
    sequences: BTreeMap<Seq, Sequence>,
    opened: u64,
    in_use: Rc<Cell<u64>>,
}

impl Cache {
    pub(crate) fn new(geometry: Geometry, limits: Limits) -> Self {
        Self {
            geometry,
            limits,
            sequences: BTreeMap::new(),
            opened: 0,
            in_use: Rc::default(),
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.in_use.get() * self.geometry.page_bytes()
    }

    pub(crate) fn sequences(&self) -> usize {
        self.sequences.len()
    }

    pub(crate) fn open(&mut self) -> Result<Seq, TorchError> {
        let buffers = Buffers::new(&self.geometry, 0, &self.in_use)?;
        self.insert(Sequence {
            len: 0,
            layers: self.geometry.layer_range(),
            buffers: Rc::new(buffers),
        })
    }

    fn insert(&mut self, sequence: Sequence) -> Result<Seq, TorchError> {
        let limit = self.limits.sequences;
        if self.sequences.len() >= limit {
            return Err(TorchError::TooManySequences(limit));
        }
        let seq = Seq(self.opened);
        self.opened += 1;
        self.sequences.insert(seq, sequence);
        Ok(seq)
    }

    fn get(&self, seq: Seq) -> Result<&Sequence, TorchError> {
        self.sequences
            .get(&seq)
            .ok_or(TorchError::UnknownSequence(seq))
    }

    pub(crate) fn len(&self, seq: Seq) -> Result<u32, TorchError> {
        Ok(self.get(seq)?.len)
    }

    pub(crate) fn buffers(&self, seq: Seq) -> Result<Rc<Buffers>, TorchError> {
        Ok(Rc::clone(&self.get(seq)?.buffers))
    }

    /// Returns false for an unknown id.
    pub(crate) fn close(&mut self, seq: Seq) -> bool {
        self.sequences.remove(&seq).is_some()
    }

    pub(crate) fn truncate(&mut self, seq: Seq, len: u32) -> Result<(), TorchError> {
        let sequence = self
            .sequences
            .get_mut(&seq)
            .ok_or(TorchError::UnknownSequence(seq))?;
        if len > sequence.len {
            return Err(sequence.gap(seq, len));
        }
        sequence.len = len;
        let pages = pages_for(len);
        if let Some(buffers) = Rc::get_mut(&mut sequence.buffers)
            && buffers.counted > pages
        {
            buffers.resize(&self.geometry, pages, len)?;
        }
        Ok(())
    }

    pub(crate) fn fork(&mut self, seq: Seq) -> Result<Seq, TorchError> {
        let sequence = self.get(seq)?;
        let fork = Sequence {
            len: sequence.len,
            layers: sequence.layers.clone(),
            buffers: Rc::clone(&sequence.buffers),
        };
        self.insert(fork)
    }

    /// Makes room for the rows of every span in buffers that its sequence does not share, for a run
    /// of `layers`. The caller must call [`Self::commit`] afterwards, or [`Self::roll_back`] after
    /// an error.
    pub(crate) fn reserve(
        &mut self,
        layers: &Range<u32>,
        spans: &[Span<Seq>],
    ) -> Result<(), TorchError> {
        let mut fresh = 0u64;
        for (i, span) in spans.iter().enumerate() {
            if spans.iter().take(i).any(|other| other.seq == span.seq) {
                return Err(TorchError::DuplicateSequence(span.seq));
            }
            fresh += self.need(layers, span)?;
        }
        // If two forks both append, the second needs no copy. Counting a copy for both may refuse a
        // batch that just fits, but never admits one that does not.
        self.check_budget(fresh)?;
        for span in spans {
            let Some(sequence) = self.sequences.get_mut(&span.seq) else {
                continue;
            };
            let pages = pages_for(span.position + span.rows);
            match Rc::get_mut(&mut sequence.buffers) {
                Some(own) if own.pages >= pages => {}
                Some(own) => own.resize(&self.geometry, pages, sequence.len)?,
                None => {
                    let own = Buffers::new(&self.geometry, pages, &self.in_use)?;
                    for (shared, own) in sequence.buffers.layers.iter().zip(&own.layers) {
                        copy(&shared.0, &own.0, sequence.len)?;
                        copy(&shared.1, &own.1, sequence.len)?;
                    }
                    sequence.buffers = Rc::new(own);
                }
            }
        }
        Ok(())
    }

    /// Pages needed beyond those that the span's sequence does not share.
    fn need(&self, layers: &Range<u32>, span: &Span<Seq>) -> Result<u64, TorchError> {
        let &Span {
            seq,
            position,
            rows,
        } = span;
        let sequence = self.get(seq)?;
        if position != sequence.len {
            return Err(sequence.gap(seq, position));
        }
        if rows == 0 {
            return Err(TorchError::EmptySpan(seq));
        }
        if position > 0 && sequence.layers != *layers {
            return Err(TorchError::OtherLayers {
                seq,
                ran: sequence.layers.clone(),
                asked: layers.clone(),
            });
        }
        let wanted = u64::from(position) + u64::from(rows);
        let limit = self.limits.context;
        let end = u32::try_from(wanted).ok().filter(|end| *end <= limit);
        let end = end.ok_or(TorchError::ContextFull { wanted, limit })?;
        let own = match Rc::strong_count(&sequence.buffers) {
            1 => sequence.buffers.pages,
            _ => 0,
        };
        Ok(pages_for(end).saturating_sub(own).into())
    }

    fn check_budget(&self, pages: u64) -> Result<(), TorchError> {
        let page = self.geometry.page_bytes();
        let free = (self.limits.bytes / page.max(1)).saturating_sub(self.in_use.get());
        match pages <= free {
            true => Ok(()),
            false => Err(TorchError::KvFull {
                needed: pages * page,
                free: free * page,
                limit: self.limits.bytes,
            }),
        }
    }

    /// Records the rows of the spans as part of their sequences.
    pub(crate) fn commit(&mut self, layers: &Range<u32>, spans: &[Span<Seq>]) {
        for span in spans {
            if let Some(sequence) = self.sequences.get_mut(&span.seq) {
                sequence.len = span.position + span.rows;
                sequence.layers = layers.clone();
            }
        }
    }

    /// Frees the room that was reserved for the rows of the spans.
    pub(crate) fn roll_back(&mut self, spans: &[Span<Seq>]) {
        for span in spans {
            // The length is unchanged: this only frees memory. If that fails, the sequence keeps
            // it.
            let len = self.len(span.seq).unwrap_or(0);
            let _ = self.truncate(span.seq, len);
        }
    }
}

fn pages_for(len: u32) -> u32 {
    len.div_ceil(PAGE)
}
