//! Models with the shapes of published ones and random weights. Memory and time are those of the
//! real models; the output is noise.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{Gguf, TensorType, Value};
use hearthnet_files::quantize;

use crate::SplitMix64;
use crate::tiny::normal;
use crate::vocabularies::find_vocabularies;

/// Shape of a published model. Weights are stored as in Q4_K_M files: Q4_K, with Q6_K where
/// llama.cpp spends more bits.
#[derive(Clone, Debug)]
pub struct Shape {
    pub name: &'static str,
    /// Family, as in `general.architecture`.
    pub architecture: &'static str,
    layers: u32,
    width: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Width per expert in a mixture of experts.
    ffn: u32,
    /// Experts per layer, and experts used per token.
    pub experts: Option<(u32, u32)>,
    /// Three of four layers have a gated delta rule, and all of them an expert for all tokens.
    delta: Option<Delta>,
    vocab: u32,
    context: u32,
    rope_base: f32,
    epsilon: f32,
    tied: bool,
    /// llama.cpp vocabulary file that supplies the tokens.
    vocabulary: &'static str,
    template: &'static str,
    /// End-of-turn token.
    end: &'static str,
}

/// Recurrence of Qwen3.5 and Qwen3.6.
#[derive(Clone, Copy, Debug)]
struct Delta {
    key_heads: u32,
    value_heads: u32,
    /// Width of each of these heads.
    head_dim: u32,
    /// Positions of the convolution.
    convolution: u32,
    /// Values per head of attention that are rotated.
    rotated: u32,
}

impl Delta {
    /// Every so many layers have attention.
    const ATTENTION_EVERY: u32 = 4;

    fn values(&self) -> u32 {
        self.value_heads * self.head_dim
    }

    fn channels(&self) -> u32 {
        2 * self.key_heads * self.head_dim + self.values()
    }
}

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const LLAMA_3: &str = "{{ bos_token }}{% for message in messages %}\
    {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}\
    {% endfor %}{% if add_generation_prompt %}\
    {{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

impl Shape {
    /// Shapes of the scale tests.
    pub const ALL: [Self; 4] = [
        Self {
            name: "llama-3.2-3b",
            architecture: "llama",
            layers: 28,
            width: 3072,
            heads: 24,
            kv_heads: 8,
            head_dim: 128,
            ffn: 8192,
            experts: None,
            delta: None,
            vocab: 128_256,
            context: 131_072,
            rope_base: 500_000.0,
            epsilon: 1e-5,
            tied: true,
            vocabulary: "llama-bpe",
            template: LLAMA_3,
            end: "<|eot_id|>",
        },
        Self {
            name: "qwen2.5-7b",
            architecture: "qwen2",
            layers: 28,
            width: 3584,
            heads: 28,
            kv_heads: 4,
            head_dim: 128,
            ffn: 18_944,
            experts: None,
            delta: None,
            vocab: 152_064,
            context: 32_768,
            rope_base: 1e6,
            epsilon: 1e-6,
            tied: false,
            vocabulary: "qwen2",
            template: CHATML,
            end: "<|im_end|>",
        },
        Self {
            name: "qwen3-30b-a3b",
            architecture: "qwen3moe",
            layers: 48,
            width: 2048,
            heads: 32,
            kv_heads: 4,
            head_dim: 128,
            ffn: 768,
            experts: Some((128, 8)),
            delta: None,
            vocab: 151_936,
            context: 40_960,
            rope_base: 1e6,
            epsilon: 1e-6,
            tied: false,
            vocabulary: "qwen2",
            template: CHATML,
            end: "<|im_end|>",
        },
        Self {
            name: "qwen3.6-35b-a3b",
            architecture: "qwen35moe",
            layers: 40,
            width: 2048,
            heads: 16,
            kv_heads: 2,
            head_dim: 256,
            ffn: 512,
            experts: Some((256, 8)),
            delta: Some(Delta {
                key_heads: 16,
                value_heads: 32,
                head_dim: 128,
                convolution: 4,
                rotated: 64,
            }),
            vocab: 248_320,
            context: 262_144,
            rope_base: 1e7,
            epsilon: 1e-6,
            tied: false,
            vocabulary: "qwen35",
            template: CHATML,
            end: "<|im_end|>",
        },
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.name == name)
    }

    /// Writes the model, and returns the bytes of its tensors.
    ///
    /// # Errors
    /// The file cannot be written, or llama.cpp's vocabularies are missing.
    pub fn write(&self, path: &Path, seed: u64) -> Result<u64, WriteError> {
        let vocabularies = find_vocabularies()?;
        let mut writer = self.metadata(&vocabularies);
        let tensors = self.tensors();
        for (name, dims, dtype) in &tensors {
            writer.tensor(name, dims, *dtype)?;
        }
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let mut random = SplitMix64(seed);
        let mut pools = BTreeMap::new();
        writer.write(&mut out, |index, out| {
            let (_, dims, dtype) = &tensors[index];
            if let [count] = dims[..] {
                // Norms scatter around 1, decays around -1, biases around 0; frequencies are divided
                // by 1.
                let (mean, scale) = match &tensors[index].0 {
                    name if name.ends_with(".bias") => (0.0, 0.1),
                    name if name.ends_with(".ssm_a") => (-1.0, 0.1),
                    name if name.starts_with("rope") => (1.0, 0.0),
                    _ => (1.0, 0.1),
                };
                for _ in 0..count {
                    let value: f32 = mean + scale * normal(&mut random);
                    out.write_all(&value.to_le_bytes())?;
                }
                return Ok::<(), WriteError>(());
            }
            let key = (dtype.ggml(), dims[0]);
            let pool = pools
                .entry(key)
                .or_insert_with(|| pool(*dtype, dims[0], &mut random));
            let row = pool.len() / POOL_ROWS;
            let rows: u64 = dims[1..].iter().product();
            for _ in 0..rows {
                let at = random.next() as usize % POOL_ROWS;
                out.write_all(&pool[at * row..][..row])?;
            }
            Ok(())
        })?;
        let bytes = self.tensors().into_iter().map(|(_, dims, dtype)| {
            let row = dtype.row_bytes(dims[0]).expect("whole blocks");
            row * dims[1..].iter().product::<u64>()
        });
        Ok(bytes.sum())
    }

    /// Names, shapes (row length first) and types, in file order.
    fn tensors(&self) -> Vec<(String, Vec<u64>, TensorType)> {
        use TensorType::{F32, Q4_K, Q6_K};
        let [width, vocab] = [self.width, self.vocab].map(u64::from);
        let ffn = u64::from(self.ffn);
        let queries = u64::from(self.heads * self.head_dim);
        let keys = u64::from(self.kv_heads * self.head_dim);
        let mut all = Vec::new();
        let mut add = |name: String, dims: &[u64], dtype| all.push((name, dims.to_vec(), dtype));
        let embedding = if self.tied { Q6_K } else { Q4_K };
        add("token_embd.weight".into(), &[width, vocab], embedding);
        if self.architecture == "llama" {
            let half = u64::from(self.head_dim / 2);
            add("rope_freqs.weight".into(), &[half], F32);
        }
        for layer in 0..self.layers {
            // llama.cpp's rule for more bits: the first and the last eighth, and every third layer
            // between.
            let eighth = self.layers / 8;
            let more = layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2;
            let more = if more { Q6_K } else { Q4_K };
            let mut add =
                |name: &str, dims: &[u64], dtype| add(format!("blk.{layer}.{name}"), dims, dtype);
            add("attn_norm.weight", &[width], F32);
            let recurrent = !(layer + 1).is_multiple_of(Delta::ATTENTION_EVERY);
            if let Some(delta) = self.delta.filter(|_| recurrent) {
                let [channels, values] = [delta.channels(), delta.values()].map(u64::from);
                let heads = u64::from(delta.value_heads);
                add("attn_qkv.weight", &[width, channels], Q4_K);
                add("attn_gate.weight", &[width, values], Q4_K);
                let positions = u64::from(delta.convolution);
                add("ssm_conv1d.weight", &[positions, channels], F32);
                add("ssm_dt.bias", &[heads], F32);
                add("ssm_a", &[heads], F32);
                add("ssm_beta.weight", &[width, heads], Q4_K);
                add("ssm_alpha.weight", &[width, heads], Q4_K);
                add("ssm_norm.weight", &[u64::from(delta.head_dim)], F32);
                add("ssm_out.weight", &[values, width], Q4_K);
            } else {
                // Gates of the output stand beside the queries.
                let gated = if self.delta.is_some() { 2 } else { 1 };
                add("attn_q.weight", &[width, gated * queries], Q4_K);
                add("attn_k.weight", &[width, keys], Q4_K);
                add("attn_v.weight", &[width, keys], more);
                if self.architecture == "qwen2" {
                    add("attn_q.bias", &[queries], F32);
                    add("attn_k.bias", &[keys], F32);
                    add("attn_v.bias", &[keys], F32);
                }
                if self.experts.is_some() {
                    add("attn_q_norm.weight", &[u64::from(self.head_dim)], F32);
                    add("attn_k_norm.weight", &[u64::from(self.head_dim)], F32);
                }
                add("attn_output.weight", &[queries, width], Q4_K);
            }
            match self.delta {
                None => add("ffn_norm.weight", &[width], F32),
                Some(_) => {
                    add("post_attention_norm.weight", &[width], F32);
                    add("ffn_gate_inp_shexp.weight", &[width, 1], F32);
                    add("ffn_gate_shexp.weight", &[width, ffn], Q4_K);
                    add("ffn_up_shexp.weight", &[width, ffn], Q4_K);
                    add("ffn_down_shexp.weight", &[ffn, width], more);
                }
            }
            match self.experts.map(|(count, _)| u64::from(count)) {
                None => {
                    add("ffn_gate.weight", &[width, ffn], Q4_K);
                    add("ffn_up.weight", &[width, ffn], Q4_K);
                    add("ffn_down.weight", &[ffn, width], more);
                }
                Some(count) => {
                    add("ffn_gate_inp.weight", &[width, count], F32);
                    add("ffn_gate_exps.weight", &[width, ffn, count], Q4_K);
                    add("ffn_up_exps.weight", &[width, ffn, count], Q4_K);
                    add("ffn_down_exps.weight", &[ffn, width, count], more);
                }
            }
        }
        add("output_norm.weight".into(), &[width], F32);
        if !self.tied {
            add("output.weight".into(), &[width, vocab], Q6_K);
        }
        all
    }

    fn metadata(&self, vocabularies: &Path) -> Writer {
        let mut writer = Writer::new();
        let mut set = |key: &str, value: Value<'_>| writer.set(key, value).expect("a new key");
        let architecture = self.architecture;
        let title = format!("{} (random weights)", self.name);
        set("general.architecture", Value::String(architecture));
        set("general.name", Value::String(&title));
        // llama.cpp's number for Q4_K_M.
        set("general.file_type", Value::U32(15));
        let mut own = |key: &str, value: Value<'_>| set(&format!("{architecture}.{key}"), value);
        own("block_count", Value::U32(self.layers));
        own("context_length", Value::U32(self.context));
        own("embedding_length", Value::U32(self.width));
        own("feed_forward_length", Value::U32(self.ffn));
        own("attention.head_count", Value::U32(self.heads));
        own("attention.head_count_kv", Value::U32(self.kv_heads));
        own("attention.layer_norm_rms_epsilon", Value::F32(self.epsilon));
        own("attention.key_length", Value::U32(self.head_dim));
        own("attention.value_length", Value::U32(self.head_dim));
        own("rope.freq_base", Value::F32(self.rope_base));
        let rotated = self.delta.map_or(self.head_dim, |delta| delta.rotated);
        own("rope.dimension_count", Value::U32(rotated));
        own("vocab_size", Value::U32(self.vocab));
        if let Some((count, used)) = self.experts {
            own("expert_count", Value::U32(count));
            own("expert_used_count", Value::U32(used));
            own("expert_feed_forward_length", Value::U32(self.ffn));
        }
        if let Some(delta) = self.delta {
            own("expert_shared_feed_forward_length", Value::U32(self.ffn));
            own(
                "full_attention_interval",
                Value::U32(Delta::ATTENTION_EVERY),
            );
            own("ssm.conv_kernel", Value::U32(delta.convolution));
            own("ssm.state_size", Value::U32(delta.head_dim));
            own("ssm.group_count", Value::U32(delta.key_heads));
            own("ssm.time_step_rank", Value::U32(delta.value_heads));
            own("ssm.inner_size", Value::U32(delta.values()));
        }
        let path = vocabularies.join(format!("ggml-vocab-{}.gguf", self.vocabulary));
        let vocabulary = Gguf::open(&path).expect("a vocabulary");
        let strings = |key| {
            let array = vocabulary.array(key).ok().flatten().expect("an array");
            array
                .iter()
                .filter_map(|value| match value {
                    Value::String(text) => Some(text.to_owned()),
                    _ => None,
                })
                .collect::<Vec<_>>()
        };
        let mut tokens = strings("tokenizer.ggml.tokens");
        for index in tokens.len()..self.vocab as usize {
            tokens.push(format!("[PAD{index}]"));
        }
        let end = tokens
            .iter()
            .position(|token| token == self.end)
            .expect("a token that ends");
        for (key, value) in vocabulary.metadata() {
            let own = ["tokens", "token_type", "eos_token_id"]
                .map(|name| format!("tokenizer.ggml.{name}"));
            if key.starts_with("tokenizer.ggml.") && !own.iter().any(|own| own == key) {
                writer.set(key, value).expect("a new key");
            }
        }
        let types = vocabulary.array("tokenizer.ggml.token_type").ok().flatten();
        let mut types: Vec<i32> = types
            .expect("an array")
            .iter()
            .filter_map(|value| match value {
                Value::I32(kind) => Some(kind),
                _ => None,
            })
            .collect();
        // Padding tokens with llama.cpp's type for unused tokens (5).
        types.resize(tokens.len(), 5);
        writer
            .set("tokenizer.ggml.eos_token_id", Value::U32(end as u32))
            .expect("a new key");
        writer
            .set("tokenizer.chat_template", Value::String(self.template))
            .expect("a new key");
        let tokens = tokens.iter().map(String::as_str);
        writer
            .set_strings("tokenizer.ggml.tokens", tokens)
            .expect("a new key");
        writer
            .set_i32s("tokenizer.ggml.token_type", &types)
            .expect("a new key");
        if self.delta.is_some() {
            // Axes of positions in images, which llama.cpp requires.
            let key = format!("{architecture}.rope.dimension_sections");
            writer.set_i32s(&key, &[11, 11, 10, 0]).expect("a new key");
        }
        writer
    }
}

/// Rows in a pool. Files draw their rows from it at random: encoding every row would take hours.
const POOL_ROWS: usize = 512;

/// Rows of random weights that map unit inputs to outputs of about unit size.
fn pool(dtype: TensorType, columns: u64, random: &mut SplitMix64) -> Vec<u8> {
    let scale = 1.0 / (columns as f32).sqrt();
    let count = POOL_ROWS * columns as usize;
    let values: Vec<f32> = (0..count).map(|_| scale * normal(random)).collect();
    let mut bytes = Vec::new();
    quantize::encode(dtype, &values, &mut bytes).expect("a type that can be written");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_as_many_parameters_as_the_published_models() {
        let parameters = |name| {
            let tensors = Shape::named(name).expect("a shape").tensors();
            let each = tensors
                .iter()
                .filter(|(name, ..)| !name.starts_with("rope"));
            each.map(|(_, dims, _)| dims.iter().product::<u64>())
                .sum::<u64>()
        };
        assert_eq!(parameters("llama-3.2-3b"), 3_212_749_824);
        assert_eq!(parameters("qwen2.5-7b"), 7_615_616_512);
        assert_eq!(parameters("qwen3-30b-a3b"), 30_532_122_624);
        assert_eq!(parameters("qwen3.6-35b-a3b"), 34_660_610_688);
    }
}
