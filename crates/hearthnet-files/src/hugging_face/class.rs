//! Description of a class of models.

use crate::schema::Requirement;

#[derive(Debug)]
pub(super) struct Class {
    /// First element of `architectures`.
    pub(super) name: &'static str,
    /// Key that tells this class from a later one of the same name, which lacks it. Empty if there
    /// is none.
    pub(super) with: &'static str,
    /// Accepted values of `model_type`.
    pub(super) model_types: &'static [&'static str],
    /// Family: `general.architecture`.
    pub(super) architecture: &'static str,
    /// Parts of the rotary dimensions that are written for positions in images.
    pub(super) image_axes: Option<[i32; 4]>,
    /// Keys that become metadata.
    pub(super) keys: &'static [&'static [Key]],
    /// Keys that must have certain values.
    pub(super) requirements: &'static [&'static [Requirement]],
    /// Keys without influence on the computation, beside `IGNORED` in `config.rs`, with spaces
    /// between.
    pub(super) ignored: &'static str,
    /// Accepted kinds of RoPE beside the default one.
    pub(super) ropes: &'static [&'static str],
    /// Whether YaRN's ramp begins and ends at fractional pairs (`truncate` is false).
    pub(super) yarn_exact: bool,
    /// Whether YaRN's correction multiplies the scores of attention.
    pub(super) yarn_scales_scores: bool,
    /// Whether LongRoPE is never stretched: the context is that of the original training.
    pub(super) long_rope_plain: bool,
    /// Names of a block's tensors: in the model file, and in the directory behind `layers.N.`. Both
    /// omit `.weight` and `.bias` if these are the same. The first match counts; `{}` is the index
    /// of an expert.
    pub(super) names: &'static [&'static [(&'static str, &'static str)]],
    /// Names of tensors outside the blocks: in the model file, and in the directory.
    pub(super) outer: &'static [(&'static str, &'static str)],
    /// Name of the list of blocks in the directory.
    pub(super) blocks: &'static str,
    /// Accepted name prefixes: of embedding, last norm and blocks, and of the output matrix.
    pub(super) prefixes: &'static [(&'static str, &'static str)],
    /// Name prefixes of tensors of other parts, such as a vision tower.
    pub(super) others: &'static [&'static str],
    /// Key with the number of blocks for multi-token prediction behind the others; they are left
    /// out. Empty: there are none.
    pub(super) prediction: &'static str,
    /// Whether the choice of experts has a correction.
    pub(super) correction: bool,
    /// Default of `tie_word_embeddings`.
    pub(super) tied: bool,
    /// Whether there is never an output matrix, even if the file has one.
    pub(super) always_tied: bool,
    /// Whether rows of queries and keys are reordered for interleaved RoPE.
    pub(super) permuted: bool,
    /// Whether the experts of a block are stacked in one tensor, gates and ups together, as
    /// columns.
    pub(super) stacked_experts: bool,
    /// Tensors that may be rows of another one.
    pub(super) stacked_rows: StackedRows,
    /// Where the file says which blocks have attention.
    pub(super) mixers: Mixers,
    /// Whether the experts of a block are stacked in one tensor as in the model file.
    pub(super) whole_experts: bool,
    /// Whether the model has token types, and its file states that it is not causal, as BERT.
    pub(super) token_types: bool,
    /// Whether matrices behind the pooled state may be in folders of their own: see `modules.rs`.
    pub(super) projection: bool,
    /// Whether blocks with a window have heads of their own: see `gemma4.rs`.
    pub(super) window_heads: bool,
    /// Whether norm weights are stored minus 1.
    pub(super) norms_around_zero: bool,
    /// Whether the last norm is stored as it is nevertheless.
    pub(super) plain_last_norm: bool,
    /// Whether norms of queries and keys without weights become norms with weights, of which those
    /// of the queries are `qk_scale_factor`.
    pub(super) computed_qk_norm: bool,
    /// Whether it is written which blocks have a window.
    pub(super) window_pattern: bool,
    /// Whether the vocabulary's size is written.
    pub(super) vocab_size: bool,
    /// Rotary dimensions of a head.
    pub(super) rope_dims: RopeDims,
    /// Base of RoPE's frequencies.
    pub(super) rope_base: RopeBase,
    /// Space prefix of SentencePiece texts.
    pub(super) space_prefix: SpacePrefix,
    /// Whether tokens added to a SentencePiece vocabulary keep their text and kind, including those
    /// of `tokenizer.json`.
    pub(super) plain_added: bool,
    /// Special tokens recognised by text if no other key names them.
    pub(super) special: &'static [(&'static str, &'static str)],
    /// Aliases of pre-tokenisers in this class.
    pub(super) pre: &'static [(&'static str, &'static str)],
}

/// Tensors whose rows lie in one tensor of the directory: name in the block of a model file, and in
/// the directory behind `layers.N.`, number of the part that it is, and number of all parts. Of the
/// tensors of experts, each expert has these parts.
pub(super) type StackedRows = &'static [(&'static str, &'static str, u64, u64)];

/// Source of the list of blocks that have attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mixers {
    /// The family.
    Family,
    /// A list; the other blocks have a gated short convolution: see `lfm2.rs`.
    Convolution,
    /// A list; the other blocks have Mamba-2, and each has a feed-forward layer: see `mamba.rs`.
    Listed,
    /// As `Listed`, but each block has one part. A feed-forward layer has this name.
    Single { feed: &'static str },
}

/// Source of `rope.dimension_count`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RopeDims {
    /// Not written: the whole head.
    Omitted,
    /// The whole head, written.
    Head,
    /// The width times `partial_rotary_factor`, divided by the number of heads.
    OfWidth,
    /// The head width times `partial_rotary_factor`, by default one half.
    Half,
    /// The whole head of a block without a window, where `partial_rotary_factor` tells how many
    /// pairs have a factor of 1.
    Proportional,
    /// As [`Self::Half`], by default one quarter. Keys of positions in images are accepted.
    Quarter,
}

/// Source of `rope.freq_base`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum RopeBase {
    /// `rope_theta`, which is required.
    Required,
    /// `rope_theta`, or else this value.
    Or(f64),
    /// `rope_theta`, written only if it is not 10,000, the default in model files.
    Unusual,
    /// `rope_theta`, if it is present.
    Optional,
    /// Not written: `rope_theta` must be 10,000, the default in model files.
    Usual,
}

/// Source of `tokenizer.ggml.add_space_prefix`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SpacePrefix {
    /// Not written.
    Omitted,
    /// `add_prefix_space` of `tokenizer_config.json`, if it is present.
    FromSettings,
    /// Always false.
    Never,
}

/// Key of `config.json` that becomes metadata of the family.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) from: &'static str,
    /// Alternative name if the first is missing; for [`Kind::Sum`] and [`Kind::Product`] the second
    /// operand.
    pub(super) other: Option<&'static str>,
    /// Metadata key after the architecture's prefix.
    pub(super) to: &'static str,
    /// Type, and default value.
    pub(super) kind: Kind,
}

/// Type of a [`Key`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Required integer.
    Integer,
    /// Integer with a default.
    IntegerOr(u32),
    /// Optional integer.
    OptionalInteger,
    /// Sum of the integers under both names, which are required.
    Sum,
    /// Product of the integers under both names, which are required.
    Product,
    /// Required float.
    Float,
    /// Float with a default.
    FloatOr(f64),
    /// Optional float.
    OptionalFloat,
    /// This integer, whatever the file has.
    Always(u32),
    /// Optional boolean.
    Flag,
    /// Optional boolean, written if it is true.
    FlagIfTrue,
    /// Optional name of the function that makes weights of the scores of experts.
    Gating,
}

pub(super) const fn key(from: &'static str, to: &'static str, kind: Kind) -> Key {
    Key {
        from,
        other: None,
        to,
        kind,
    }
}

pub(super) const fn integer(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::Integer)
}

pub(super) const fn optional(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::OptionalInteger)
}

pub(super) const fn integer_or(from: &'static str, to: &'static str, or: u32) -> Key {
    key(from, to, Kind::IntegerOr(or))
}

pub(super) const fn float(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::Float)
}

pub(super) const fn float_or(from: &'static str, to: &'static str, or: f64) -> Key {
    key(from, to, Kind::FloatOr(or))
}

pub(super) const fn optional_float(from: &'static str, to: &'static str) -> Key {
    key(from, to, Kind::OptionalFloat)
}
