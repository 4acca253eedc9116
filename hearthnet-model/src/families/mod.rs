//! Model families as data: which metadata and which tensors make up a model.
//!
//! A family is one file with one constant [`Family`], listed in [`ALL`]. It says how the tensors
//! of a block are called and shaped, which kind of RoPE it uses, and which further metadata it
//! tolerates, with which value. The code here turns a file and its family into a [`ModelSpec`]
//! that the engine interprets; what neither the family nor this code knows (an architecture, a
//! hyperparameter, a tensor) is a clear error and never a guess, because ignoring it would give
//! plausible wrong answers.
//!
//! To add a family whose blocks need something new (biases, QK norm, scales, soft caps): add the
//! role to [`LayerTensor`](crate::spec::LayerTensor) or the field to [`ModelSpec`], teach the
//! engine to interpret it, then describe the family. Families that need nothing new are one file.

pub mod llama;

use crate::boundary::BoundaryDtype;
use crate::error::ModelError;
use crate::gguf::{Gguf, MetadataError, Value};
use crate::spec::{Dim, LayerTensor, ModelSpec, RopeKind, RopeSpec};

/// Every family that can be run.
pub const ALL: &[&Family] = &[&llama::FAMILY];

/// Metadata key by which a file overrides its family's boundary dtype (`f16`, `bf16`, `f32`).
pub const BOUNDARY_KEY: &str = "hearthnet.boundary_dtype";

/// Token embedding, `[width, vocab]`.
pub const EMBEDDING: &str = "token_embd.weight";
/// Norm before the output matrix, `[width]`.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// Output matrix, `[width, vocab]`; a file without it uses the embedding.
pub const OUTPUT: &str = "output.weight";

/// More positions than any model has been made for; keeps sizes far from overflow.
const MAX_CONTEXT: u32 = 1 << 24;
/// Likewise for the lengths of rows and columns.
const MAX_WIDTH: u32 = 1 << 24;

/// Description of a family.
#[derive(Debug)]
pub struct Family {
    /// Value of `general.architecture`, and prefix of the family's metadata keys.
    pub architecture: &'static str,
    /// Which values RoPE pairs.
    pub rope: RopeKind,
    /// Format of the residual stream between blocks, unless the file names another.
    pub boundary: BoundaryDtype,
    /// The tensors of a block, in the order of their use.
    pub layer: &'static [Rule],
    /// Metadata that may be present, with the one value that the engine's arithmetic implies.
    pub fixed: &'static [Fixed],
}

/// A tensor that every block must have.
#[derive(Debug)]
pub struct Rule {
    /// What it does.
    pub tensor: LayerTensor,
    /// Its name after `blk.N.`.
    pub name: &'static str,
    /// Its shape, row length first: one dimension for a vector, two for a matrix.
    pub dims: &'static [Dim],
}

impl Rule {
    /// The tensor's full name in block `layer`.
    pub fn full_name(&self, layer: u32) -> String {
        format!("blk.{layer}.{}", self.name)
    }
}

/// A metadata key that may be present as long as it changes nothing.
#[derive(Debug)]
pub struct Fixed {
    /// The key after the architecture's prefix.
    pub key: &'static str,
    /// The only value that is accepted.
    pub only: Only,
}

/// The value that a [`Fixed`] key must have.
#[derive(Debug)]
pub enum Only {
    /// This number, stored as integer or float.
    Number(f64),
    /// This boolean.
    Bool(bool),
    /// This string.
    Text(&'static str),
    /// The key has no influence on the arithmetic.
    Anything,
}

impl Only {
    fn accepts(&self, value: Value<'_>) -> bool {
        match *self {
            Self::Number(n) => match value.as_integer() {
                Some(v) => v as f64 == n,
                None => value.as_float() == Some(n),
            },
            Self::Bool(b) => value.as_bool() == Some(b),
            Self::Text(t) => value.as_str() == Some(t),
            Self::Anything => true,
        }
    }
}

/// Keys that [`Family::spec`] reads, after the architecture's prefix.
const READ: [&str; 12] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
];

impl Family {
    /// The family of a file, by its `general.architecture`.
    ///
    /// # Errors
    /// When the key is missing or no string, or the architecture is none of [`ALL`].
    pub fn of(gguf: &Gguf) -> Result<&'static Self, ModelError> {
        let key = "general.architecture";
        let architecture = gguf.str(key)?.ok_or_else(|| missing(key))?;
        ALL.iter()
            .find(|family| family.architecture == architecture)
            .copied()
            .ok_or_else(|| ModelError::UnknownArchitecture {
                architecture: architecture.chars().take(60).collect(),
                known: ALL
                    .iter()
                    .map(|f| f.architecture)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// The hyperparameters of a file of this family.
    ///
    /// # Errors
    /// When a key is missing, of the wrong type, out of range or at odds with another, or when
    /// the file asks for something that the engine does not do.
    pub fn spec(&self, gguf: &Gguf) -> Result<ModelSpec, ModelError> {
        self.refuse_unknown_keys(gguf)?;
        let keys = Keys {
            gguf,
            prefix: self.architecture,
        };

        let layers = keys.size("block_count")?;
        let width = keys.size("embedding_length")?;
        let ffn = keys.size("feed_forward_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = keys.size_or("attention.head_count_kv", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.bad("attention.head_count_kv", "must divide the number of heads"));
        }
        if gguf.get(&keys.full("attention.key_length")).is_none() && !width.is_multiple_of(heads) {
            return Err(keys.bad("attention.head_count", "must divide the embedding length"));
        }
        let head_dim = keys.size_or("attention.key_length", width / heads)?;
        if keys.size_or("attention.value_length", head_dim)? != head_dim {
            return Err(keys.bad("attention.value_length", "must equal attention.key_length"));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(keys.bad("attention.key_length", "must be even"));
        }
        if heads
            .checked_mul(head_dim)
            .is_none_or(|queries| queries > MAX_WIDTH)
        {
            return Err(keys.bad("attention.head_count", "the heads are too wide"));
        }
        let dims = keys.size_or("rope.dimension_count", head_dim)?;
        if dims > head_dim || !dims.is_multiple_of(2) {
            return Err(keys.bad(
                "rope.dimension_count",
                "must be even and at most the head's width",
            ));
        }
        let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
        if theta < 1.0 {
            return Err(keys.bad("rope.freq_base", "must be at least 1"));
        }
        let norm_eps = keys
            .float("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| missing(&keys.full("attention.layer_norm_rms_epsilon")))?;
        if !(f64::from(f32::MIN_POSITIVE)..1.0).contains(&norm_eps) {
            return Err(keys.bad(
                "attention.layer_norm_rms_epsilon",
                "must lie between 0 and 1",
            ));
        }
        let context = keys.size("context_length")?;
        if context > MAX_CONTEXT {
            return Err(keys.bad("context_length", "must be at most 16777216"));
        }
        Ok(ModelSpec {
            architecture: self.architecture.to_owned(),
            layers,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn,
            vocab: vocab(gguf, &keys)?,
            context,
            norm_eps: norm_eps as f32,
            rope: RopeSpec {
                kind: self.rope,
                dims,
                theta,
            },
            boundary: match gguf.str(BOUNDARY_KEY)? {
                None => self.boundary,
                Some(name) => name.parse().map_err(|_| ModelError::Hyperparameter {
                    key: BOUNDARY_KEY.to_owned(),
                    reason: "must be f16, bf16 or f32",
                })?,
            },
            tied_embedding: gguf.tensor(OUTPUT).is_none(),
        })
    }

    fn refuse_unknown_keys(&self, gguf: &Gguf) -> Result<(), ModelError> {
        for (key, value) in gguf.metadata() {
            let Some(rest) = key
                .strip_prefix(self.architecture)
                .and_then(|k| k.strip_prefix('.'))
            else {
                continue;
            };
            if READ.contains(&rest) {
                continue;
            }
            match self.fixed.iter().find(|fixed| fixed.key == rest) {
                Some(fixed) if fixed.only.accepts(value) => {}
                _ => {
                    return Err(ModelError::Unsupported {
                        what: format!("metadata {key:?} = {value}"),
                        architecture: self.architecture,
                    });
                }
            }
        }
        Ok(())
    }
}

/// The number of embeddings: from the metadata where it says so, else from the embedding tensor.
/// (That the two agree is checked with the shapes.)
fn vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, ModelError> {
    let from_tensor = match gguf.tensor(EMBEDDING).map(|info| info.dims.as_slice()) {
        Some(&[_, rows]) => u32::try_from(rows).ok().filter(|rows| *rows <= MAX_WIDTH),
        _ => None,
    };
    match from_tensor {
        Some(rows) => keys.size_or("vocab_size", rows),
        None => keys.size("vocab_size"),
    }
}

fn missing(key: &str) -> ModelError {
    MetadataError::Missing {
        key: key.to_owned(),
    }
    .into()
}

/// Reads keys of one architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'static str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn bad(&self, key: &str, reason: &'static str) -> ModelError {
        ModelError::Hyperparameter {
            key: self.full(key),
            reason,
        }
    }

    /// A count that must be there: 1 to 2^24.
    fn size(&self, key: &str) -> Result<u32, ModelError> {
        let full = self.full(key);
        let value = self.gguf.u32(&full)?.ok_or_else(|| missing(&full))?;
        self.in_range(key, value)
    }

    fn size_or(&self, key: &str, default: u32) -> Result<u32, ModelError> {
        let value = self.gguf.u32(&self.full(key))?.unwrap_or(default);
        self.in_range(key, value)
    }

    fn in_range(&self, key: &str, value: u32) -> Result<u32, ModelError> {
        match value {
            1..=MAX_WIDTH => Ok(value),
            _ => Err(self.bad(key, "must be between 1 and 16777216")),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        Ok(self.gguf.f64(&self.full(key))?)
    }
}
