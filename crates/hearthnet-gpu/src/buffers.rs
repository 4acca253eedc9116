//! Memory on the card.

use std::ops::Range;
use std::sync::{Arc, Weak};

use hearthnet_files::blocks::WeightType;

use crate::bind_groups::GroupCache;

/// Words on the card. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Unique among the buffers of a card.
    pub(crate) id: u64,
    pub(crate) words: u64,
    pub(crate) buffer: wgpu::Buffer,
    /// Holds bind groups, which would keep the memory.
    pub(crate) groups: Weak<GroupCache>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(groups) = self.groups.upgrade() {
            groups.forget(self.id);
        }
    }
}

impl Buffer {
    /// Length in words of four bytes.
    pub fn words(&self) -> u64 {
        self.inner.words
    }
}

/// Rows of words in a buffer: row r begins at `offset + r * stride`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub buffer: &'a Buffer,
    /// In words.
    pub offset: u32,
    /// In words; 0 if all rows are the same.
    pub stride: u32,
}

impl Buffer {
    /// Rows of `stride` words from the start of the buffer.
    pub fn rows(&self, stride: u32) -> View<'_> {
        self.rows_at(0, stride)
    }

    /// Rows of `stride` words from word `offset` on.
    pub fn rows_at(&self, offset: u32, stride: u32) -> View<'_> {
        View {
            buffer: self,
            offset,
            stride,
        }
    }
}

/// Activations that a matrix is multiplied with.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Values, for F32, F16 and BF16.
    Plain(View<'a>),
    /// Rows of [`crate::Step::quantise`], for all other types.
    Quantised(&'a Buffer),
}

impl<'a> Input<'a> {
    /// The form that a type of weights reads: rows `x`, or `act` with these rows quantised.
    pub fn of(weight_type: WeightType, x: View<'a>, act: &'a Buffer) -> Self {
        match weight_type.quantised() {
            true => Self::Quantised(act),
            false => Self::Plain(x),
        }
    }
}

/// Weights on the card: the panels of the processor (`hearthnet_engine::kernels::Packed`), of quantised
/// types in the order of `panels.rs`.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(crate) weight_type: WeightType,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) bytes: u64,
    /// Chains must be computed on the bits whatever the activations are: an MXFP4 scale is below 2^-24,
    /// or a scale is not finite.
    pub(crate) careful: bool,
    /// Buffers with the panels, each no larger than the driver can bind.
    pub(crate) parts: Vec<(Range<u32>, Buffer)>,
}

impl Matrix {
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Outputs.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Number of groups of 16 outputs.
    pub fn panels(&self) -> u32 {
        self.rows.div_ceil(16)
    }

    /// Bytes on the card.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Words that [`crate::Step::attention`] needs for scores.
pub fn attention_words(rows: u32, heads: u32, positions: u32) -> u64 {
    u64::from(rows) * u64::from(heads) * (u64::from(positions) + 1)
}

/// Layout of a page of one layer and key/value head: 32 positions, two binary16 components a word,
/// the one with the smaller index in the low half.
pub mod kv_layout {
    /// Positions of a page.
    pub const PAGE: u32 = 32;

    /// Words of a page.
    pub const fn page_words(head_dim: u32) -> u32 {
        PAGE * head_dim
    }

    /// Word with components `2 pair` and `2 pair + 1` of the key at `slot` (position modulo 32).
    pub const fn key_word(slot: u32, pair: u32) -> u32 {
        pair * PAGE + slot
    }

    /// Word with components `2 pair` and `2 pair + 1` of the value at `slot`.
    pub const fn value_word(head_dim: u32, slot: u32, pair: u32) -> u32 {
        PAGE / 2 * head_dim + slot * (head_dim / 2) + pair
    }
}
