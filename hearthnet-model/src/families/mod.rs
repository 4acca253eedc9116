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
//! role to [`LayerTensor`] or the field to [`ModelSpec`], teach the
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

/// The tensors outside the blocks, with their shapes.
const HEAD: [(&str, &[Dim]); 3] = [
    (EMBEDDING, &[Dim::Width, Dim::Vocab]),
    (OUTPUT_NORM, &[Dim::Width]),
    (OUTPUT, &[Dim::Width, Dim::Vocab]),
];

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
    /// The family of that name.
    pub fn named(architecture: &str) -> Option<&'static Self> {
        ALL.iter()
            .find(|family| family.architecture == architecture)
            .copied()
    }

    /// The family of a file, by its `general.architecture`.
    ///
    /// # Errors
    /// When the key is missing or no string, or the architecture is none of [`ALL`].
    pub fn of(gguf: &Gguf) -> Result<&'static Self, ModelError> {
        let key = "general.architecture";
        let missing = || MetadataError::Missing {
            key: key.to_owned(),
        };
        let architecture = gguf.str(key)?.ok_or_else(missing)?;
        Self::named(architecture).ok_or_else(|| ModelError::UnknownArchitecture {
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

        let width = keys.u32("embedding_length")?;
        let heads = keys.u32("attention.head_count")?;
        let head_dim = match keys.optional_u32("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if heads > 0 && width.is_multiple_of(heads) => width / heads,
            None => return Err(keys.bad("attention.head_count", "must divide embedding_length")),
        };
        if keys
            .optional_u32("attention.value_length")?
            .is_some_and(|dim| dim != head_dim)
        {
            return Err(keys.bad("attention.value_length", "must equal attention.key_length"));
        }
        let norm_eps = keys.float("attention.layer_norm_rms_epsilon")?;
        let spec = ModelSpec {
            architecture: self.architecture.to_owned(),
            layers: keys.u32("block_count")?,
            width,
            heads,
            kv_heads: keys
                .optional_u32("attention.head_count_kv")?
                .unwrap_or(heads),
            head_dim,
            ffn: keys.u32("feed_forward_length")?,
            vocab: vocab(gguf, &keys)?,
            context: keys.u32("context_length")?,
            norm_eps: norm_eps.ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?
                as f32,
            rope: RopeSpec {
                kind: self.rope,
                dims: keys
                    .optional_u32("rope.dimension_count")?
                    .unwrap_or(head_dim),
                // llama.cpp's default.
                theta: keys.float("rope.freq_base")?.unwrap_or(10_000.0),
            },
            boundary: match gguf.str(BOUNDARY_KEY)? {
                None => self.boundary,
                Some(name) => name.parse().map_err(|_| ModelError::Hyperparameter {
                    key: BOUNDARY_KEY.to_owned(),
                    reason: "must be f16, bf16 or f32",
                })?,
            },
            tied_embedding: gguf.tensor(OUTPUT).is_none(),
        };
        spec.check()
            .map_err(|error| keys.bad(key_of(error.field), error.reason))?;
        Ok(spec)
    }

    /// Name and shape (row length first) of every tensor of a model of this family, those outside
    /// the blocks first.
    pub fn tensors(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, &'static [Dim])> {
        let layers = (0..spec.layers).flat_map(|layer| {
            self.layer
                .iter()
                .map(move |rule| (rule.full_name(layer), rule.dims))
        });
        HEAD.iter()
            .filter(|(name, _)| !(spec.tied_embedding && *name == OUTPUT))
            .map(|(name, dims)| ((*name).to_owned(), *dims))
            .chain(layers)
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

/// The metadata key, after the architecture's prefix, that a field of [`ModelSpec`] comes from.
fn key_of(field: &'static str) -> &'static str {
    match field {
        "layers" => "block_count",
        "width" => "embedding_length",
        "heads" => "attention.head_count",
        "kv_heads" => "attention.head_count_kv",
        "head_dim" => "attention.key_length",
        "ffn" => "feed_forward_length",
        "vocab" => "vocab_size",
        "context" => "context_length",
        "norm_eps" => "attention.layer_norm_rms_epsilon",
        "rope.dims" => "rope.dimension_count",
        "rope.theta" => "rope.freq_base",
        other => other,
    }
}

/// The number of embeddings: from the metadata where it says so, else from the embedding tensor.
/// (That the two agree is checked with the shapes.)
fn vocab(gguf: &Gguf, keys: &Keys<'_>) -> Result<u32, ModelError> {
    let from_tensor = match gguf.tensor(EMBEDDING).map(|info| info.dims.as_slice()) {
        Some(&[_, rows]) => u32::try_from(rows).ok(),
        _ => None,
    };
    let from_metadata = keys.optional_u32("vocab_size")?;
    from_metadata
        .or(from_tensor)
        .ok_or_else(|| keys.missing("vocab_size"))
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

    fn missing(&self, key: &str) -> ModelError {
        MetadataError::Missing {
            key: self.full(key),
        }
        .into()
    }

    fn u32(&self, key: &str) -> Result<u32, ModelError> {
        self.optional_u32(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        Ok(self.gguf.u32(&self.full(key))?)
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        Ok(self.gguf.f64(&self.full(key))?)
    }
}
