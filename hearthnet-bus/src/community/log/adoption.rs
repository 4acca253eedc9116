//! Model that a community adopts: what a node has to know to fetch parts of its file and check them.

use serde::{Deserialize, Serialize};

use crate::community::invite::{fits_log, is_line};
use crate::identity::by_format;
use crate::identity::cbor::MAX_NUMBER;

/// Maximum number of sources of a model.
pub const MAX_SOURCES: usize = 8;
/// Maximum length of a source in bytes.
pub const MAX_SOURCE_BYTES: usize = 512;
/// Maximum number of layers of a model.
pub const MAX_MODEL_LAYERS: u32 = 4096;
/// Maximum length of a file's head in bytes: the largest tokenizers have some 20 MiB.
pub const MAX_HEAD_BYTES: u64 = 64 << 20;
/// Maximum length of a manifest in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 8 << 20;

/// Adopted model (`model.adopt`). Part of the state hash, so its fields stand in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adoption {
    /// SHA-256 of the first `head_bytes` of the file.
    #[serde(with = "by_format::hash")]
    pub head: [u8; 32],
    /// Display name and catalogue name: 1 to 64 bytes, no control characters.
    pub name: String,
    /// Number of layers, 1 to [`MAX_MODEL_LAYERS`].
    pub layers: u32,
    /// SHA-256 of the piece list.
    #[serde(with = "by_format::hash")]
    pub pieces: [u8; 32],
    /// Hub references or URLs, at most [`MAX_SOURCES`] of 1 to [`MAX_SOURCE_BYTES`] bytes. Members
    /// may have the file even if there are none.
    pub sources: Vec<String>,
    /// Weights id: SHA-256 of the manifest.
    #[serde(with = "by_format::hash")]
    pub weights: [u8; 32],
    /// Length of the GGUF file.
    pub file_bytes: u64,
    /// Length of all that precedes the first tensor's data, at most [`MAX_HEAD_BYTES`]; less than
    /// `file_bytes`.
    pub head_bytes: u64,
    /// Length of the manifest, at most [`MAX_MANIFEST_BYTES`].
    pub manifest_bytes: u64,
}

impl Adoption {
    /// Checks lengths and ranges. The error is the rule that is broken.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let is_source = |text: &String| !text.is_empty() && is_line(text, MAX_SOURCE_BYTES);
        let rules = [
            (
                fits_log(&self.name),
                "the model's name is not a line of 1 to 64 bytes",
            ),
            (
                self.sources.len() <= MAX_SOURCES && self.sources.iter().all(is_source),
                "a model has at most 8 sources, lines of 1 to 512 bytes",
            ),
            (
                (1..=MAX_MODEL_LAYERS).contains(&self.layers),
                "a model has 1 to 4096 layers",
            ),
            (
                (1..=MAX_HEAD_BYTES).contains(&self.head_bytes)
                    && (1..=MAX_MANIFEST_BYTES).contains(&self.manifest_bytes)
                    && self.head_bytes < self.file_bytes
                    && self.file_bytes <= MAX_NUMBER,
                "the lengths of the model's file, head or manifest are out of their ranges",
            ),
        ];
        let mut rules = rules.into_iter();
        rules.try_for_each(|(fits, rule)| match fits {
            true => Ok(()),
            false => Err(rule),
        })
    }
}
