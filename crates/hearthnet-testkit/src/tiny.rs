//! Small synthetic models: complete GGUF files with seeded random weights.

use std::path::{Path, PathBuf};

use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::{Gguf, ModelFile, quantize};

use crate::SplitMix64;

/// Description of a synthetic model of the Llama family, or of Qwen3.5's.
///
/// ```
/// # use hearthnet_testkit::TinyLlama;
/// let bytes = TinyLlama { layers: 3, weights: "q8_0", ..TinyLlama::default() }.bytes();
/// let gguf = hearthnet_files::Gguf::from_bytes(bytes).unwrap();
/// assert_eq!(hearthnet_files::ModelFile::from_gguf(gguf).unwrap().spec().layers, 3);
/// ```
#[derive(Clone, Debug)]
pub struct TinyLlama {
    pub layers: u32,
    /// Width of the residual stream; a multiple of 32 for block types.
    pub width: u32,
    pub heads: u32,
    /// Must divide `heads`.
    pub kv_heads: u32,
    /// `heads * head_dim` need not equal `width`, but must be a multiple of 32 for block types.
    pub head_dim: u32,
    /// Width of the feed-forward layer; a multiple of 32 for block types.
    pub ffn: u32,
    /// At least [`TinyLlama::LEAST_VOCAB`].
    pub vocab: u32,
    pub context: u32,
    /// Type of the matrices of the blocks, one of [`TensorType::WRITABLE`]. For `q6_k` and `q4_k`,
    /// the multiples of 32 become multiples of 256.
    pub weights: &'static str,
    /// Type of the embedding and of the output matrix.
    pub embedding: &'static str,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Boundary dtype to write into the file, if not the family's.
    pub boundary: Option<&'static str>,
    /// Token whose row leaves the range of fp16 in the first block. Its embedding is as large as
    /// fp16 allows, and the blocks add `LOUD` times as much as usual. The embedding must be `f32`.
    pub loud: Option<u32>,
    /// Every other block, from the first on, has a gated delta rule (family `qwen35`), with as many
    /// key heads as `kv_heads` and as many value heads as `heads`.
    pub recurrent: bool,
    pub seed: u64,
}

impl Default for TinyLlama {
    /// Two blocks of width 64 with 4 query and 2 KV heads, Q4_1 with a Q8_0 embedding, tied.
    fn default() -> Self {
        Self {
            layers: 2,
            width: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 96,
            vocab: 320,
            context: 256,
            weights: "q4_1",
            embedding: "q8_0",
            tied: true,
            boundary: None,
            loud: None,
            recurrent: false,
            seed: 1,
        }
    }
}

/// Gain of the blocks of a model with a [loud](TinyLlama::loud) token. The added value must exceed
/// half the fp16 spacing at its largest value, 16, while rows of other tokens stay far below that
/// value.
const LOUD: f32 = 100.0;
/// Largest value of fp16.
const LARGEST: f32 = 65_504.0;

/// Positions of the convolution of a recurrent model.
const CONVOLUTION: u32 = 4;

/// Tokens after the 256 bytes: two merges, which shorten `hello`, and three control tokens.
const EXTRA: [(&str, i32); 5] = [
    ("he", 1),
    ("ll", 1),
    ("<|endoftext|>", 3),
    ("<|im_start|>", 3),
    ("<|im_end|>", 3),
];
const MERGES: [&str; 2] = ["h e", "l l"];

/// ChatML, as SmolLM2's own template writes it.
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl TinyLlama {
    /// 256 bytes, and the tokens that the tokenizer metadata needs.
    pub const LEAST_VOCAB: u32 = 256 + EXTRA.len() as u32;

    /// Bytes of the file.
    ///
    /// # Panics
    /// If the description is no valid model: unknown types, or rows that do not fill blocks.
    pub fn bytes(&self) -> Vec<u8> {
        let weights: TensorType = self.weights.parse().expect("a tensor type");
        let embedding: TensorType = self.embedding.parse().expect("a tensor type");
        let [width, ffn, vocab] = [self.width, self.ffn, self.vocab].map(u64::from);
        let queries = u64::from(self.heads * self.head_dim);
        let keys = u64::from(self.kv_heads * self.head_dim);

        let mut writer = self.metadata();
        let mut shapes = Vec::new();
        let mut add = |name: &str, dims: &[u64], dtype| {
            writer.tensor(name, dims, dtype).expect("a sound shape");
            shapes.push((name.to_owned(), dims.to_vec(), dtype));
        };
        add("token_embd.weight", &[width, vocab], embedding);
        let (heads, head_dim) = (u64::from(self.heads), u64::from(self.head_dim));
        let channels = 2 * keys + queries;
        // The order decides which random values a tensor has.
        let llama: &[(&str, &[u64])] = &[
            ("attn_norm.weight", &[width]),
            ("attn_q.weight", &[width, queries]),
            ("attn_k.weight", &[width, keys]),
            ("attn_v.weight", &[width, keys]),
            ("attn_output.weight", &[queries, width]),
            ("ffn_norm.weight", &[width]),
        ];
        let gated: &[(&str, &[u64])] = &[
            ("attn_norm.weight", &[width]),
            ("attn_q.weight", &[width, 2 * queries]),
            ("attn_k.weight", &[width, keys]),
            ("attn_v.weight", &[width, keys]),
            ("attn_q_norm.weight", &[head_dim]),
            ("attn_k_norm.weight", &[head_dim]),
            ("attn_output.weight", &[queries, width]),
            ("post_attention_norm.weight", &[width]),
        ];
        let delta: &[(&str, &[u64])] = &[
            ("attn_norm.weight", &[width]),
            ("attn_qkv.weight", &[width, channels]),
            ("attn_gate.weight", &[width, queries]),
            ("ssm_conv1d.weight", &[CONVOLUTION.into(), channels]),
            ("ssm_dt.bias", &[heads]),
            ("ssm_a", &[heads]),
            ("ssm_beta.weight", &[width, heads]),
            ("ssm_alpha.weight", &[width, heads]),
            ("ssm_norm.weight", &[head_dim]),
            ("ssm_out.weight", &[queries, width]),
            ("post_attention_norm.weight", &[width]),
        ];
        let feed: &[(&str, &[u64])] = &[
            ("ffn_gate.weight", &[width, ffn]),
            ("ffn_up.weight", &[width, ffn]),
            ("ffn_down.weight", &[ffn, width]),
        ];
        for layer in 0..self.layers {
            let mixer = match (self.recurrent, layer % 2) {
                (false, _) => llama,
                (true, 0) => delta,
                (true, _) => gated,
            };
            for (name, dims) in mixer.iter().chain(feed) {
                let dtype = match dims.len() {
                    2 if !name.starts_with("ssm_conv1d") => weights,
                    _ => TensorType::F32,
                };
                add(&format!("blk.{layer}.{name}"), dims, dtype);
            }
        }
        add("output_norm.weight", &[width], TensorType::F32);
        if !self.tied {
            add("output.weight", &[width, vocab], embedding);
        }

        let mut random = SplitMix64(self.seed);
        let mut file = Vec::new();
        writer
            .write(&mut file, |index, out| {
                let (name, dims, dtype) = &shapes[index];
                let count: u64 = dims.iter().product();
                // Norms scatter around 1; matrices map unit inputs to outputs of about unit size.
                let (mean, scale) = match dims[..] {
                    [_] => (1.0, 0.1),
                    _ => (0.0, 1.0 / (dims[0] as f32).sqrt()),
                };
                let gain = match self.loud {
                    Some(_) if name.ends_with("ffn_down.weight") => LOUD,
                    _ => 1.0,
                };
                // A state decays.
                let sign = if name.ends_with("ssm_a") { -1.0 } else { 1.0 };
                let value = |_| sign * (mean + gain * scale * normal(&mut random));
                let mut values: Vec<f32> = (0..count).map(value).collect();
                if let Some(token) = self.loud.filter(|_| name == "token_embd.weight") {
                    let row = token as usize * self.width as usize;
                    for value in &mut values[row..][..self.width as usize] {
                        *value = LARGEST.copysign(*value);
                    }
                }
                let mut bytes = Vec::new();
                quantize::encode(*dtype, &values, &mut bytes).expect("a supported type");
                out.write_all(&bytes).map_err(WriteError::Io)
            })
            .expect("writing to memory");
        file
    }

    /// The file, opened.
    ///
    /// # Panics
    /// As [`Self::bytes`].
    pub fn file(&self) -> ModelFile {
        let gguf = Gguf::from_bytes(self.bytes()).expect("a GGUF file");
        ModelFile::from_gguf(gguf).expect("a model")
    }

    /// Writes the file into a directory, and returns its path.
    ///
    /// # Panics
    /// As [`Self::bytes`], and if the directory is not writable.
    pub fn write(&self, directory: &Path) -> PathBuf {
        let path = directory.join(format!("tiny-{}-{}.gguf", self.weights, self.seed));
        std::fs::write(&path, self.bytes()).expect("a writable directory");
        path
    }

    fn metadata(&self) -> Writer {
        assert!(
            self.vocab >= Self::LEAST_VOCAB,
            "at least {} tokens",
            Self::LEAST_VOCAB
        );
        let mut writer = Writer::new();
        let mut set = |key: &str, value: Value<'_>| writer.set(key, value).expect("a new key");
        let architecture = if self.recurrent { "qwen35" } else { "llama" };
        set("general.architecture", Value::String(architecture));
        set("general.name", Value::String("Tiny"));
        let mut own = |key: &str, value| set(&format!("{architecture}.{key}"), value);
        own("block_count", Value::U32(self.layers));
        own("context_length", Value::U32(self.context));
        own("embedding_length", Value::U32(self.width));
        own("feed_forward_length", Value::U32(self.ffn));
        own("vocab_size", Value::U32(self.vocab));
        own("attention.head_count", Value::U32(self.heads));
        own("attention.head_count_kv", Value::U32(self.kv_heads));
        own("attention.key_length", Value::U32(self.head_dim));
        own("attention.value_length", Value::U32(self.head_dim));
        own("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        own("rope.dimension_count", Value::U32(self.head_dim));
        own("rope.freq_base", Value::F32(10_000.0));
        if self.recurrent {
            own("full_attention_interval", Value::U32(2));
            own("ssm.conv_kernel", Value::U32(CONVOLUTION));
            own("ssm.state_size", Value::U32(self.head_dim));
            own("ssm.group_count", Value::U32(self.kv_heads));
            own("ssm.time_step_rank", Value::U32(self.heads));
            own("ssm.inner_size", Value::U32(self.heads * self.head_dim));
        }
        if let Some(boundary) = self.boundary {
            set("hearthnet.boundary_dtype", Value::String(boundary));
        }
        set("tokenizer.ggml.model", Value::String("gpt2"));
        set("tokenizer.ggml.pre", Value::String("smollm"));
        set("tokenizer.ggml.add_bos_token", Value::Bool(false));
        set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
        set("tokenizer.ggml.bos_token_id", Value::U32(259));
        set("tokenizer.ggml.eos_token_id", Value::U32(260));
        set("tokenizer.ggml.unknown_token_id", Value::U32(258));
        set("tokenizer.chat_template", Value::String(TEMPLATE));

        let mut tokens: Vec<String> = byte_alphabet().map(String::from).to_vec();
        let mut types = vec![1; 256];
        for (token, kind) in EXTRA {
            tokens.push(token.to_owned());
            types.push(kind);
        }
        for index in tokens.len()..self.vocab as usize {
            tokens.push(format!("<unused{index}>"));
            types.push(5);
        }
        let tokens = tokens.iter().map(String::as_str);
        let arrays = writer
            .set_strings("tokenizer.ggml.tokens", tokens)
            .and_then(|()| writer.set_i32s("tokenizer.ggml.token_type", &types))
            .and_then(|()| writer.set_strings("tokenizer.ggml.merges", MERGES));
        arrays.expect("new keys");
        writer
    }
}

/// Characters of the 256 bytes in byte-level BPE (GPT-2's `bytes_to_unicode`): printable bytes
/// stand for themselves, the rest are moved up from U+0100.
fn byte_alphabet() -> [char; 256] {
    let mut moved = 0x100;
    std::array::from_fn(|byte| match byte as u32 {
        printable @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => {
            char::from_u32(printable).expect("Latin-1")
        }
        _ => {
            moved += 1;
            char::from_u32(moved - 1).expect("Latin Extended-A")
        }
    })
}

/// Nearly normal, mean 0, variance 1: the sum of twelve uniform numbers, minus six.
pub(crate) fn normal(random: &mut SplitMix64) -> f32 {
    let sum: f32 = (0..12)
        .map(|_| (random.next() >> 40) as f32 / (1u64 << 24) as f32)
        .sum();
    sum - 6.0
}
