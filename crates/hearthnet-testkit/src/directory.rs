//! Synthetic Hugging Face directories.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

/// Directory of a random Llama in BF16 with a tokenizer. Its tensors have several pieces, and a file
/// for each block.
#[derive(Clone, Copy, Debug)]
pub struct TinyDirectory {
    pub layers: u32,
    pub seed: u32,
}

const WIDTH: u64 = 512;
const FFN: u64 = 1024;
/// Values of all keys of a position.
const KEYS: u64 = 128;
const VOCAB: u64 = 320;

/// Names and shapes of a block's tensors.
const BLOCK: [(&str, &[u64]); 9] = [
    ("input_layernorm", &[WIDTH]),
    ("post_attention_layernorm", &[WIDTH]),
    ("self_attn.q_proj", &[WIDTH, WIDTH]),
    ("self_attn.k_proj", &[KEYS, WIDTH]),
    ("self_attn.v_proj", &[KEYS, WIDTH]),
    ("self_attn.o_proj", &[WIDTH, WIDTH]),
    ("mlp.gate_proj", &[FFN, WIDTH]),
    ("mlp.up_proj", &[FFN, WIDTH]),
    ("mlp.down_proj", &[WIDTH, FFN]),
];

const REST: [(&str, &[u64]); 2] = [
    ("model.embed_tokens.weight", &[VOCAB, WIDTH]),
    ("model.norm.weight", &[WIDTH]),
];

/// Name and shape.
type Tensor = (String, &'static [u64]);

impl TinyDirectory {
    /// File with the embedding and the last norm.
    pub const REST: &str = "m-rest.safetensors";

    /// File of a block.
    pub fn file_of(layer: u32) -> String {
        format!("m-{layer}.safetensors")
    }

    /// Bytes of a block's tensors.
    pub fn block_bytes() -> u64 {
        let values = BLOCK.iter().map(|(_, shape)| shape.iter().product::<u64>());
        2 * values.sum::<u64>()
    }

    /// Writes all files into a folder, which is made.
    pub fn write(&self, folder: &Path) {
        fs::create_dir_all(folder).expect("a folder");
        let stored = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../hearthnet-files/tests/data/hugging_face/text-llama3");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(stored.join(file), folder.join(file)).expect("a file");
        }
        let config = fs::read(stored.join("config.json")).expect("a file");
        let mut config: Map<String, Value> = serde_json::from_slice(&config).expect("an object");
        for (key, value) in [
            ("hidden_size", json!(WIDTH)),
            ("intermediate_size", json!(FFN)),
            ("head_dim", json!(64)),
            ("num_attention_heads", json!(WIDTH / 64)),
            ("num_key_value_heads", json!(KEYS / 64)),
            ("num_hidden_layers", json!(self.layers)),
            ("max_position_embeddings", json!(256)),
            (
                "rope_parameters",
                json!({
                    "factor": 8.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 500000.0,
                    "rope_type": "llama3",
                }),
            ),
        ] {
            config.insert(key.to_owned(), value);
        }
        let config = Value::Object(config).to_string();
        fs::write(folder.join("config.json"), config).expect("a file");

        let mut map = Map::new();
        let mut list = |file: &str, tensors: &[Tensor]| {
            map.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(file))));
        };
        for layer in 0..self.layers {
            list(&Self::file_of(layer), &block(layer));
            self.write_block(folder, layer);
        }
        let rest = REST.map(|(name, shape)| (name.to_owned(), shape));
        list(Self::REST, &rest);
        write(&folder.join(Self::REST), &rest, self.seed);
        let index = json!({ "weight_map": map }).to_string();
        fs::write(folder.join("model.safetensors.index.json"), index).expect("a file");
    }

    /// Writes the file of a block.
    pub fn write_block(&self, folder: &Path, layer: u32) {
        let path = folder.join(Self::file_of(layer));
        write(&path, &block(layer), self.seed.wrapping_add(layer + 1));
    }
}

fn block(layer: u32) -> Vec<Tensor> {
    let name = |stem: &str| format!("model.layers.{layer}.{stem}.weight");
    BLOCK
        .iter()
        .map(|(stem, shape)| (name(stem), *shape))
        .collect()
}

/// Writes a file of BF16 tensors.
fn write(path: &Path, tensors: &[Tensor], seed: u32) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut state = seed;
    for (name, shape) in tensors {
        let start = data.len();
        for _ in 0..shape.iter().product::<u64>() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let high = (state >> 24) as u16;
            let value = match shape.len() {
                // Weights of norms, from 1 to 1.5.
                1 => 0x3f80 + (high & 0x3f),
                // From 2^-9 to 2^-5, of both signs.
                _ => 0x3b00 + 2 * high + ((state >> 8) as u16 & 0x8001),
            };
            data.extend(value.to_le_bytes());
        }
        let offsets = [start, data.len()];
        let info = json!({ "dtype": "BF16", "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(path, bytes).expect("a file");
}
