//! Latent attention in both forms: absorbed, as converters store it now, and expanded, as they
//! stored it before, with the up-projections to keys and values of all heads in one matrix.

use hearthnet_engine::kernels::Isa;
use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{BoundaryDtype, Gguf, ModelFile, quantize};
use hearthnet_testkit::family;

use super::{check_paths, largest_difference, references, reshape};
use crate::engine_common::{all_logits, options, whole};

/// Values of a head: part of the keys without RoPE, low-rank row, values.
const NOPE: usize = 32;
const RANK: usize = 64;
const VALUES: usize = 32;

/// The model as older converters store it.
fn expanded(name: &str) -> ModelFile {
    let file = family(name);
    let gguf = file.gguf();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        let value = match key.strip_prefix("deepseek2.attention.") {
            Some("key_length_mla" | "value_length_mla") => continue,
            Some("head_count_kv") => Value::U32(4),
            Some("key_length") => Value::U32(40),
            Some("value_length") => Value::U32(32),
            _ => value,
        };
        writer.set(key, value).unwrap();
    }
    let values = |name: &str| {
        let info = gguf.tensor(name).unwrap();
        let mut values = Vec::new();
        quantize::decode(info.dtype, gguf.data(info), &mut values).unwrap();
        values
    };
    let mut data = Vec::new();
    for info in gguf.tensors() {
        let Some(block) = info.name.strip_suffix(".attn_k_b.weight") else {
            if !info.name.ends_with(".attn_v_b.weight") {
                writer.tensor(&info.name, &info.dims, info.dtype).unwrap();
                data.push(gguf.data(info).to_vec());
            }
            continue;
        };
        let keys = values(&info.name);
        let of_values = values(&format!("{block}.attn_v_b.weight"));
        let heads = keys
            .chunks_exact(NOPE * RANK)
            .zip(of_values.chunks_exact(VALUES * RANK));
        let mut both = Vec::new();
        for (keys, values) in heads {
            // The matrices of keys are transposed.
            both.extend((0..NOPE).flat_map(|i| (0..RANK).map(move |c| keys[c * NOPE + i])));
            both.extend(values);
        }
        let name = format!("{block}.attn_kv_b.weight");
        let dims = [RANK as u64, (both.len() / RANK) as u64];
        writer.tensor(&name, &dims, TensorType::F32).unwrap();
        data.push(both.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    let mut bytes = Vec::new();
    let written = writer.write(&mut bytes, |nth, out| {
        out.write_all(&data[nth]).map_err(WriteError::Io)
    });
    written.unwrap();
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

/// The model with a low-rank row of 56 values instead of 64: with the rotary part, the cache has whole
/// blocks of 32.
fn narrowed(name: &str) -> ModelFile {
    const NARROW: usize = 56;
    let metadata = [
        ("deepseek2.attention.kv_lora_rank", NARROW),
        ("deepseek2.attention.value_length", NARROW),
        ("deepseek2.attention.key_length", NARROW + 8),
    ];
    let metadata = metadata.map(|(key, value)| (key, Value::U32(value as u32)));
    let file = reshape(name, &metadata, |info, values| {
        // The first values of each run of this length are those of the low-rank row.
        let (run, place) = match info.name.split_once(".attn_").map(|(_, name)| name) {
            Some("kv_a_mqa.weight") => (RANK * info.dims[0] as usize, 1),
            Some("kv_a_norm.weight") | Some("v_b.weight") => (RANK, 0),
            Some("k_b.weight") => (RANK * NOPE, 1),
            _ => return TensorType::F32,
        };
        info.dims[place] -= (RANK - NARROW) as u64;
        // Behind the only run of `kv_a_mqa` are the rows of the rotary part.
        let runs = values.chunks(run).map(|values| match values.len() == run {
            true => &values[..run / RANK * NARROW],
            false => values,
        });
        *values = runs.flatten().copied().collect();
        TensorType::F32
    });
    file.unwrap()
}

#[test]
fn absorbed_latent_attention_with_a_cache_of_8_bits_is_exact_on_every_path() {
    for name in ["deepseek2", "deepseek3"] {
        let file = narrowed(name);
        assert_eq!(file.spec().block(0).key_width(), 64);
        check_paths(name, &file);
        check_paths(name, &file.with_cache(CacheDtype::Q8_0).unwrap());
    }
}

#[test]
fn both_forms_of_latent_attention_compute_the_same_but_for_rounding() {
    let references = references();
    for name in ["deepseek2", "deepseek3", "glm47flash"] {
        let reference = &references[name];
        let old = expanded(name);
        assert!(!old.spec().attention.latent.unwrap().absorbed);
        let [absorbed, expanded] = [family(name), old].map(|file| {
            let file = file.with_boundary(BoundaryDtype::F32);
            let mut whole = whole(&file, &options(2, Isa::detect()));
            all_logits(&mut whole, &reference.prompt)
        });
        // Each rounds other values to half precision in the cache.
        let apart = largest_difference(&absorbed, &expanded);
        let bound = 3.0 * reference.cache_rounding;
        assert!(apart > 0.0 && apart < bound, "{name}: {apart}, {bound}");
    }
}
