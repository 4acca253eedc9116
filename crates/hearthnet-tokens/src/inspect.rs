//! Description of a model file.

use std::fmt;
use std::path::Path;

use hearthnet_files::ModelFile;
use hearthnet_files::convert::file_type_name;
use hearthnet_files::gguf::{Gguf, TensorInfo, TypeUse, type_uses};
use hearthnet_files::manifest::{TextId, WeightsId};
use hearthnet_files::spec::{
    BlockSpec, LatentSpec, LeadingSpec, ModelSpec, RopeScaling, WindowHeads, YarnSpec,
};
use hearthnet_text::sanitize;
use serde::Serialize;

use crate::template::{ChatMessage, TemplateTime};
use crate::text::ModelText;

/// Description of a model file. `Display` prints a table for people; the serialised form is for
/// programs, with sizes in bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// Properties of any GGUF file.
    #[serde(flatten)]
    pub container: Container,
    /// Weights used per token, without the experts that the token is not routed to.
    pub parameters_per_token: u64,
    pub spec: ModelSpec,
    /// Bytes of each layer's weights.
    pub layer_bytes: Vec<u64>,
    /// Bytes of the tensors outside the layers: embedding, last norm, output matrix.
    pub head_bytes: u64,
    /// Bytes of keys and values per position, for each layer; 0 for a layer without them.
    pub kv_bytes_per_position: Vec<u64>,
    /// Bytes of the state of all recurrent layers, whatever the length of a conversation.
    pub state_bytes: u64,
    /// How the vector of a text is made of its hidden states.
    pub pooling: &'static str,
    pub weights: WeightsId,
    /// Reason for `chat` and `serve` to refuse the file; `None` if they accept it.
    pub chat_refused: Option<String>,
    /// Defect of an accepted file.
    pub warning: Option<String>,
}

/// Properties of a GGUF file, whether or not the model can be run.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Container {
    /// Path of the file, if it was opened from one.
    pub path: Option<String>,
    pub file_bytes: u64,
    pub gguf_version: u32,
    /// `general.name`.
    pub name: Option<String>,
    /// SPDX identifier or other name of the licence, according to the file.
    pub license: Option<String>,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// Name of the quantisation according to the file, for example `Q4_K_M`, a mixture.
    pub file_type: Option<&'static str>,
    pub parameters: u64,
    /// Types of tensors, sorted by bytes, largest first.
    pub tensor_types: Vec<TypeUse>,
    /// The tokenizer in the file, if there is one.
    pub tokenizer: Option<TokenizerInfo>,
    /// Whether the file has a default chat template.
    pub chat_template: bool,
    /// Names of other chat templates, which are not used.
    pub named_chat_templates: Vec<String>,
    /// Identity of tokenizer and template, if the tokenizer is supported.
    pub text: Option<TextId>,
}

/// Tokenizer according to the metadata.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TokenizerInfo {
    /// Algorithm as in `tokenizer.ggml.model`: `gpt2` is byte-level BPE, `llama` SentencePiece.
    pub model: String,
    /// Pre-tokeniser as in `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    pub tokens: u64,
}

impl Inspection {
    fn count(&self, kind: fn(&BlockSpec<'_>) -> bool) -> u32 {
        let layers = (0..self.spec.layers).filter(|&layer| kind(&self.spec.block(layer)));
        u32::try_from(layers.count()).unwrap_or(u32::MAX)
    }
}

/// Describes a model file. `weights` comes from [`ModelFile::manifest`].
pub fn inspect(model: &ModelFile, weights: WeightsId) -> Inspection {
    let gguf = model.gguf();
    let spec = model.spec();
    let parameters_per_token = gguf
        .tensors()
        .iter()
        .map(|info| match spec.experts {
            Some(experts) if info.name.contains("_exps.") => {
                values(info) / u64::from(experts.count) * u64::from(experts.used)
            }
            _ => values(info),
        })
        .sum();
    let (chat_refused, warning) = match check_text(model) {
        Ok(warning) => (None, warning),
        Err(refused) => (Some(refused), None),
    };
    Inspection {
        chat_refused,
        warning,
        container: container(gguf, model.path()),
        parameters_per_token,
        spec: spec.clone(),
        layer_bytes: (0..spec.layers)
            .map(|layer| model.layer_bytes(layer))
            .collect(),
        head_bytes: model.head_bytes(),
        kv_bytes_per_position: (0..spec.layers)
            .map(|layer| spec.block(layer).kv_bytes_per_position())
            .collect(),
        state_bytes: spec.state_bytes(0..spec.layers),
        pooling: model.pooling().name(),
        weights,
    }
}

/// Checks tokenizer and template as `chat` does: a warning, or the reason for a refusal.
fn check_text(model: &ModelFile) -> Result<Option<String>, String> {
    let mut text = ModelText::of(model).map_err(|error| error.to_string())?;
    // The time does not matter for whether a template can be rendered.
    let clock = || TemplateTime::from_unix(0);
    text.template = text.template.map(|template| template.with_clock(clock));
    if let Some(template) = &text.template {
        let question = [ChatMessage::user("a")];
        let prompt = template.prompt_ids(&text.tokenizer, &question, true);
        prompt.map_err(|error| error.to_string())?;
    }
    Ok(text.warning())
}

/// Prefix of the keys of named chat templates.
const NAMED_TEMPLATE: &str = "tokenizer.chat_template.";

/// Describes a valid GGUF file, whatever its contents.
pub fn container(gguf: &Gguf, path: Option<&Path>) -> Container {
    let template = gguf.str("tokenizer.chat_template").ok().flatten();
    Container {
        path: path.map(|path| path.display().to_string()),
        file_bytes: gguf.file_bytes(),
        gguf_version: gguf.version(),
        name: text(gguf, "general.name"),
        license: text(gguf, "general.license"),
        architecture: text(gguf, "general.architecture"),
        file_type: gguf
            .u32("general.file_type")
            .ok()
            .flatten()
            .and_then(file_type_name),
        parameters: gguf
            .tensors()
            .iter()
            .map(values)
            .fold(0, u64::saturating_add),
        tensor_types: type_uses(gguf.tensors().iter()),
        tokenizer: text(gguf, "tokenizer.ggml.model").map(|model| TokenizerInfo {
            model,
            pre: text(gguf, "tokenizer.ggml.pre"),
            tokens: match gguf.array("tokenizer.ggml.tokens") {
                Ok(Some(tokens)) => tokens.len() as u64,
                _ => 0,
            },
        }),
        named_chat_templates: gguf
            .metadata()
            .filter_map(|(key, _)| key.strip_prefix(NAMED_TEMPLATE))
            .map(str::to_owned)
            .collect(),
        chat_template: template.is_some_and(|template| !template.trim().is_empty()),
        text: gguf.text_id().ok(),
    }
}

fn values(info: &TensorInfo) -> u64 {
    info.dims.iter().product()
}

fn text(gguf: &Gguf, key: &str) -> Option<String> {
    gguf.str(key).ok().flatten().map(str::to_owned)
}

/// Longest text of a file that is displayed, in characters.
const MAX_SHOWN: usize = 200;

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: &str) -> fmt::Result {
    let mut shown = sanitize(value).into_owned();
    if let Some((end, _)) = shown.char_indices().nth(MAX_SHOWN) {
        shown.truncate(end);
        shown.push_str("...");
    }
    writeln!(f, "{name:<14}{shown}")
}

impl Container {
    /// First rows of the table.
    fn top(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            writeln!(f, "{:<14}{}", "file", sanitize(path))?;
        }
        let bytes = format!("{} ({} bytes)", size(self.file_bytes), self.file_bytes);
        line(f, "size", &bytes)?;
        for (name, value) in [("name", &self.name), ("license", &self.license)] {
            if let Some(value) = value {
                line(f, name, value)?;
            }
        }
        line(f, "format", &format!("GGUF {}", self.gguf_version))?;
        if let Some(architecture) = &self.architecture {
            line(f, "architecture", architecture)?;
        }
        Ok(())
    }

    /// Rows about the types of the weights.
    fn types(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: u64 = self.tensor_types.iter().map(|used| used.bytes).sum();
        let bits = bytes as f64 * 8.0 / self.parameters.max(1) as f64;
        let bits = format!("{bits:.2} bits per weight");
        match self.file_type {
            Some(name) => line(f, "stored as", &format!("{name}, {bits}"))?,
            None => line(f, "stored as", &bits)?,
        }
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
            line(f, name, &used)?;
        }
        Ok(())
    }

    /// Rows about tokenizer and template.
    fn text(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokenizer = match &self.tokenizer {
            Some(tokenizer) => {
                let pre = tokenizer.pre.as_deref().unwrap_or("unnamed");
                format!(
                    "{}, {pre} pre-tokenizer, {} tokens",
                    tokenizer.model, tokenizer.tokens
                )
            }
            None => "none".to_owned(),
        };
        line(f, "tokenizer", &tokenizer)?;
        let named = self.named_chat_templates.join(", ");
        let template = match (self.chat_template, named.is_empty()) {
            (true, true) => "yes".to_owned(),
            (true, false) => format!("yes; named ones, which are not used: {named}"),
            (false, true) => "no".to_owned(),
            (false, false) => format!("no default one; named ones, which are not used: {named}"),
        };
        line(f, "chat template", &template)?;
        match self.text {
            Some(text) => writeln!(f, "{:<14}{text}", "text"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.top(f)?;
        line(f, "parameters", &count(self.parameters))?;
        self.types(f)?;
        self.text(f)
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let ModelSpec {
            width,
            ffn,
            heads,
            kv_heads,
            head_dim,
            rope,
            ..
        } = spec;
        self.container.top(f)?;
        let all = count(self.container.parameters);
        let parameters = match spec.experts {
            None => all,
            Some(_) => format!("{all}, {} per token", count(self.parameters_per_token)),
        };
        line(f, "parameters", &parameters)?;
        let mut row = |name: &str, value: String| line(f, name, &value);
        let recurrent = self.count(|block| block.is_recurrent());
        row(
            "layers",
            match recurrent {
                0 => spec.layers.to_string(),
                _ => format!("{}, {recurrent} of them recurrent", spec.layers),
            },
        )?;
        if !spec.mixers.is_empty() {
            let feed = match spec.single {
                true => "-: feed-forward only",
                false => "each with feed-forward",
            };
            let text = format!("{} (M: Mamba-2, *: attention, {feed})", spec.mixers);
            row("parts", text)?;
        }
        let wide = spec.shared_keys.and_then(|shared| shared.ffn);
        let wide = wide.map_or(String::new(), |ffn| format!(", {ffn} in the last layers"));
        row("width", format!("{width}, feed-forward {ffn}{wide}"))?;
        if spec.prediction > 0 {
            let text = format!("{} for multi-token prediction, unused", spec.prediction);
            row("more layers", text)?;
        }
        if let Some(experts) = spec.experts {
            let shared = match experts.shared {
                Some(shared) => format!(", and a shared one {} wide", shared.ffn),
                None => String::new(),
            };
            let text = format!("{} per layer, {} per token", experts.count, experts.used);
            let groups = match experts.groups {
                Some(groups) => format!(", from {} of {} groups", groups.used, groups.count),
                None => String::new(),
            };
            let leading = match experts.leading {
                None => String::new(),
                Some(LeadingSpec { blocks: 1, .. }) => "; none in the first layer".to_owned(),
                Some(LeadingSpec { blocks, .. }) => format!("; none in the first {blocks} layers"),
            };
            row("experts", text + &groups + &shared + &leading)?;
        }
        let text = format!("{heads} query, {kv_heads} key/value, {head_dim} wide");
        let local = spec.attention.window.and_then(|window| window.heads);
        let local = local.map_or(String::new(), |local| {
            let WindowHeads {
                kv_heads, head_dim, ..
            } = local;
            format!("; {kv_heads} key/value, {head_dim} wide in layers with a window")
        });
        row("heads", text + &local)?;
        if let Some(shared) = spec.shared_keys {
            let count = shared.blocks;
            let text = format!("the last {count} layers use keys and values of earlier ones");
            row("shared keys", text)?;
        }
        if let Some(per_layer) = spec.per_layer {
            let text = format!("{} values for each token and layer", per_layer.width);
            row("inputs", text)?;
        }
        if let Some(latent) = spec.attention.latent {
            let LatentSpec { queries, keys, .. } = latent;
            let queries = queries.map(|rank| format!("queries of rank {rank}, "));
            let cached = if latent.absorbed {
                ", cached as they are"
            } else {
                ""
            };
            let text = format!("keys and values of rank {keys}{cached}");
            row("latent", queries.unwrap_or_default() + &text)?;
        }
        row("vocabulary", format!("{} tokens", spec.vocab))?;
        row("context", format!("{} positions", spec.context))?;
        let turned = format!("{:?}, {} wide, base {}", rope.kind, rope.dims, rope.theta);
        let scaling = match rope.scaling {
            None => String::new(),
            Some(RopeScaling::Linear { factor }) => format!(", linear scaling by {factor}"),
            Some(RopeScaling::Yarn(YarnSpec {
                factor, original, ..
            })) => format!(", YaRN scaling by {factor} from {original} positions"),
            Some(RopeScaling::Factors) => ", with factors".to_owned(),
            Some(RopeScaling::Long { long, .. }) => {
                let which = if long { "long" } else { "short" };
                format!(", with {which} factors")
            }
        };
        let local = rope.local_theta;
        let local = local.map(|theta| format!("; base {theta} in layers with a window"));
        let skipped = rope.skip_every;
        let skipped = skipped.map(|every| format!("; none in {}", each(every)));
        let differences = [Some(scaling), local, skipped].into_iter().flatten();
        let differences: String = differences.collect();
        let rotation = match rope.skip_every {
            Some(1) => "none".to_owned(),
            _ => turned.to_lowercase() + &differences,
        };
        row("rope", rotation)?;
        if let Some(window) = spec.attention.window {
            let layers = match window.global_every {
                None => "in all layers".to_owned(),
                Some(every) => format!("except in {}", each(every)),
            };
            let text = format!("{} positions, {layers}", window.positions);
            row("window", text)?;
        }
        row("boundary", spec.boundary.to_string())?;
        let output = match (spec.encoder, spec.tied_embedding) {
            (Some(_), _) => format!("vectors of whole texts, {}", self.pooling),
            (None, true) => "the embedding".to_owned(),
            (None, false) => "a separate matrix".to_owned(),
        };
        row("output", output)?;
        self.container.types(f)?;
        let mut row = |name: &str, value: String| line(f, name, &value);
        let least = self.layer_bytes.iter().min().copied().unwrap_or_default();
        let most = self.layer_bytes.iter().max().copied().unwrap_or_default();
        let layer = match least == most {
            true => size(most),
            false => format!("{} to {}", size(least), size(most)),
        };
        row("per layer", format!("{layer} of weights"))?;
        let layers: u64 = self.layer_bytes.iter().sum();
        row("all layers", format!("{} of weights", size(layers)))?;
        let head = size(self.head_bytes);
        row("head", format!("{head} (embedding, last norm, output)"))?;
        let with_keys = self
            .kv_bytes_per_position
            .iter()
            .filter(|bytes| **bytes > 0);
        let least = with_keys.clone().min().copied().unwrap_or_default();
        let most = with_keys.max().copied().unwrap_or_default();
        let kv = match least == most {
            true => most.to_string(),
            false => format!("{least} to {most}"),
        };
        let position: u64 = self.kv_bytes_per_position.iter().sum();
        let sequence = size(position.saturating_mul(spec.context.into()));
        row(
            "kv cache",
            format!("{kv} bytes per position and layer, {sequence} for a full context"),
        )?;
        if self.state_bytes > 0 {
            let state = size(self.state_bytes);
            line(
                f,
                "states",
                &format!("{state} of recurrent layers, and checkpoints"),
            )?;
        }
        self.container.text(f)?;
        writeln!(f, "{:<14}{}", "weights", self.weights)?;
        match (&self.chat_refused, self.container.chat_template) {
            _ if spec.encoder.is_some() => line(f, "chat", "none: use `hearthnet embed`")?,
            (Some(why), _) => writeln!(f, "{:<14}not with this file: {}", "chat", sanitize(why))?,
            (None, false) => line(
                f,
                "chat",
                "only `chat --raw`: there is no default chat template",
            )?,
            (None, true) => {}
        }
        match &self.warning {
            Some(warning) => writeln!(f, "{:<14}{}", "warning", sanitize(warning)),
            None => Ok(()),
        }
    }
}

/// Ordinal phrase for "every n-th" layer.
fn each(every: u32) -> String {
    let ending = match (every % 10, every % 100) {
        (1, tens) if tens != 11 => "st",
        (2, tens) if tens != 12 => "nd",
        (3, tens) if tens != 13 => "rd",
        _ => "th",
    };
    match every {
        1 => "every layer".to_owned(),
        every => format!("every {every}{ending} layer"),
    }
}

/// Number of weights in the style of model names.
fn count(weights: u64) -> String {
    match weights {
        0..1_000_000 => weights.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} million", weights as f64 / 1e6),
        _ => format!("{:.2} billion", weights as f64 / 1e9),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_say_them() {
        let numbers = [48_882, 134_515_008, 3_212_749_888, 30_532_122_624].map(count);
        assert_eq!(
            numbers,
            ["48882", "134.5 million", "3.21 billion", "30.53 billion"]
        );
        let layers = [1, 2, 3, 4, 6, 11, 12, 13, 21].map(each);
        assert_eq!(
            layers
                .join(", ")
                .replace(" layer", "")
                .replace("every ", ""),
            "every, 2nd, 3rd, 4th, 6th, 11th, 12th, 13th, 21st"
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
