//! What a model file is, for people and machines.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::gguf::{Gguf, TensorType};
use crate::manifest::WeightsId;
use crate::model_file::ModelFile;
use crate::spec::{ModelSpec, RopeScaling};

/// Description of a model file. Its `Display` is a table for people; serialised it is for
/// machines, with sizes in bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// Where the file is, if it was opened from one.
    pub path: Option<String>,
    /// Size of the file.
    pub file_bytes: u64,
    /// Version of the GGUF format.
    pub gguf_version: u32,
    /// What the file calls itself.
    pub name: Option<String>,
    /// SPDX identifier or other name of the licence that the file states.
    pub license: Option<String>,
    /// Number of weights.
    pub parameters: u64,
    /// Hyperparameters.
    pub spec: ModelSpec,
    /// Types of tensors, the one with most bytes first.
    pub tensor_types: Vec<TypeUse>,
    /// Bytes of each layer's weights.
    pub layer_bytes: Vec<u64>,
    /// Bytes of the tensors outside the layers: embedding, last norm, output matrix.
    pub head_bytes: u64,
    /// Bytes of keys and values that one position of a sequence takes in one layer.
    pub kv_bytes_per_position_and_layer: u64,
    /// The tokenizer in the file, if there is one.
    pub tokenizer: Option<TokenizerInfo>,
    /// Whether the file has a chat template.
    pub chat_template: bool,
    /// Identity of the weights.
    pub weights: WeightsId,
}

/// How often a tensor type is used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TypeUse {
    /// The type.
    pub dtype: TensorType,
    /// Number of tensors.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What the metadata says about the tokenizer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TokenizerInfo {
    /// Its algorithm, as `tokenizer.ggml.model` names it: `gpt2` is byte-level BPE, `llama`
    /// SentencePiece.
    pub model: String,
    /// How text is split before it, as `tokenizer.ggml.pre` names it.
    pub pre: Option<String>,
    /// Number of tokens.
    pub tokens: u64,
}

/// Describes a file. `weights` is its identity, from [`ModelFile::manifest`].
pub fn inspect(model: &ModelFile, weights: WeightsId) -> Inspection {
    let gguf = model.gguf();
    let spec = model.spec();
    let mut types: BTreeMap<TensorType, TypeUse> = BTreeMap::new();
    for info in gguf.tensors() {
        let used = types.entry(info.dtype).or_insert(TypeUse {
            dtype: info.dtype,
            tensors: 0,
            bytes: 0,
        });
        used.tensors += 1;
        used.bytes += info.bytes;
    }
    let mut tensor_types: Vec<TypeUse> = types.into_values().collect();
    tensor_types.sort_by_key(|used| std::cmp::Reverse(used.bytes));
    Inspection {
        path: model.path().map(|path| path.display().to_string()),
        file_bytes: gguf.file_bytes(),
        gguf_version: gguf.version(),
        name: text(gguf, "general.name"),
        license: text(gguf, "general.license"),
        parameters: gguf
            .tensors()
            .iter()
            .map(|info| info.dims.iter().product::<u64>())
            .sum(),
        spec: spec.clone(),
        tensor_types,
        layer_bytes: (0..spec.layers)
            .map(|layer| model.layer_bytes(layer))
            .collect(),
        head_bytes: model.head_bytes(),
        kv_bytes_per_position_and_layer: spec.kv_bytes_per_position_and_layer(),
        tokenizer: text(gguf, "tokenizer.ggml.model").map(|model| TokenizerInfo {
            model,
            pre: text(gguf, "tokenizer.ggml.pre"),
            tokens: match gguf.array("tokenizer.ggml.tokens") {
                Ok(Some(tokens)) => tokens.len() as u64,
                _ => 0,
            },
        }),
        chat_template: matches!(gguf.str("tokenizer.chat_template"), Ok(Some(_))),
        weights,
    }
}

fn text(gguf: &Gguf, key: &str) -> Option<String> {
    gguf.str(key).ok().flatten().map(str::to_owned)
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let mut row = |name: &str, value: String| writeln!(f, "{name:<14}{}", printable(&value));
        if let Some(path) = &self.path {
            row("file", path.clone())?;
        }
        row(
            "size",
            format!("{} ({} bytes)", size(self.file_bytes), self.file_bytes),
        )?;
        if let Some(name) = &self.name {
            row("name", name.clone())?;
        }
        if let Some(license) = &self.license {
            row("license", license.clone())?;
        }
        row("format", format!("GGUF {}", self.gguf_version))?;
        row("architecture", spec.architecture.clone())?;
        row(
            "parameters",
            format!("{:.1} million", self.parameters as f64 / 1e6),
        )?;
        row("layers", spec.layers.to_string())?;
        row(
            "width",
            format!("{}, feed-forward {}", spec.width, spec.ffn),
        )?;
        if let Some(experts) = spec.experts {
            let text = format!("{} per layer, {} per token", experts.count, experts.used);
            row("experts", text)?;
        }
        let heads = format!(
            "{} query, {} key/value, {} wide",
            spec.heads, spec.kv_heads, spec.head_dim
        );
        row("heads", heads)?;
        if let Some(latent) = spec.attention.latent {
            let text = format!(
                "queries by way of {}, keys and values of {}",
                latent.queries, latent.keys
            );
            row("latent", text)?;
        }
        row("vocabulary", format!("{} tokens", spec.vocab))?;
        row("context", format!("{} positions", spec.context))?;
        let rope = format!(
            "{:?}, {} wide, base {}",
            spec.rope.kind, spec.rope.dims, spec.rope.theta
        );
        let scaling = match spec.rope.scaling {
            None => String::new(),
            Some(RopeScaling::Linear { factor }) => format!(", stretched {factor} times"),
            Some(RopeScaling::Yarn(yarn)) => {
                format!(
                    ", YaRN, stretched {} times from {}",
                    yarn.factor, yarn.original
                )
            }
            Some(RopeScaling::Factors | RopeScaling::Long { .. }) => ", with factors".to_owned(),
        };
        row("rope", rope.to_lowercase() + &scaling)?;
        if let Some(window) = spec.attention.window {
            let layers = match window.global_every {
                None => "in all layers".to_owned(),
                Some(every) => format!("except in every {every}th layer"),
            };
            row(
                "window",
                format!("{} positions, {layers}", window.positions),
            )?;
        }
        row("boundary", spec.boundary.to_string())?;
        let tied = if spec.tied_embedding {
            "the embedding"
        } else {
            "a matrix of its own"
        };
        row("output", tied.to_owned())?;
        let names = self.tensor_types.iter().map(|used| used.dtype.name().len());
        let width = names.fold(5, usize::max);
        for (index, used) in self.tensor_types.iter().enumerate() {
            let name = if index == 0 { "tensors" } else { "" };
            let used = format!(
                "{:<width$} {:>4} x, {}",
                used.dtype,
                used.tensors,
                size(used.bytes)
            );
            row(name, used)?;
        }
        let least = self.layer_bytes.iter().min().copied().unwrap_or_default();
        let most = self.layer_bytes.iter().max().copied().unwrap_or_default();
        let layer = match least == most {
            true => size(most),
            false => format!("{} to {}", size(least), size(most)),
        };
        row("per layer", format!("{layer} of weights"))?;
        let layers: u64 = self.layer_bytes.iter().sum();
        row("all layers", format!("{} of weights", size(layers)))?;
        row(
            "head",
            format!("{} (embedding, last norm, output)", size(self.head_bytes)),
        )?;
        let kv = self.kv_bytes_per_position_and_layer;
        let sequence = kv
            .saturating_mul(spec.layers.into())
            .saturating_mul(spec.context.into());
        row(
            "kv cache",
            format!(
                "{kv} bytes per position and layer, {} for a full context",
                size(sequence)
            ),
        )?;
        match &self.tokenizer {
            Some(tokenizer) => {
                let pre = tokenizer.pre.as_deref().unwrap_or("unnamed");
                let text = format!(
                    "{}, {pre} pre-tokenizer, {} tokens",
                    tokenizer.model, tokenizer.tokens
                );
                row("tokenizer", text)?;
            }
            None => row("tokenizer", "none".to_owned())?,
        }
        row(
            "chat template",
            if self.chat_template { "yes" } else { "no" }.to_owned(),
        )?;
        write!(f, "{:<14}{}", "weights", self.weights)
    }
}

/// Binary units with one decimal.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} bytes"),
        0x400..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / 1024f64.powi(2)),
        _ => format!("{:.1} GiB", bytes as f64 / 1024f64.powi(3)),
    }
}

/// A string of a file as it may be shown on a terminal: on one line, with control characters and
/// those that change the direction of writing escaped.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}'
            | '\u{feff}' => {
                out.extend(c.escape_unicode());
            }
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_move_the_cursor_is_escaped() {
        assert_eq!(printable("Käse 🧀 \\ 'x'"), "Käse 🧀 \\ 'x'");
        assert_eq!(
            printable("a\x1b[2Jb\r\n\u{9b}c\u{202e}d"),
            "a\\u{1b}[2Jb\\r\\n\\u{9b}c\\u{202e}d"
        );
    }

    #[test]
    fn sizes_have_one_decimal() {
        assert_eq!(size(1023), "1023 bytes");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(98_362_432), "93.8 MiB");
        assert_eq!(size(5 << 30), "5.0 GiB");
    }
}
