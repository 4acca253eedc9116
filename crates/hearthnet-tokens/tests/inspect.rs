//! Output of `model inspect`.
#![allow(clippy::unwrap_used)]

use hearthnet_files::gguf::{Gguf, Value};
use hearthnet_files::{Manifest, ModelFile, TensorType};
use hearthnet_testkit::{NewFile, TinyLlama, family, rows, with_metadata};
use hearthnet_tokens::inspect::{container, inspect};
use hearthnet_tokens::template::{ChatTemplate, TemplateError};

#[test]
fn the_real_model_is_described_completely() {
    let model = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let id = model.manifest(&mut |_, _| {}).weights_id();
    let inspection = inspect(&model, id);
    let text = inspection.to_string();
    let rows: Vec<(&str, &str)> = text
        .lines()
        .map(|line| (line[..14].trim_end(), &line[14..]))
        .collect();
    let full = "180.0 MiB for a full context";
    for expected in [
        ("size", "93.8 MiB (98362432 bytes)"),
        ("name", "Smollm2 135M 8k Lc100K Mix1 Ep2"),
        ("license", "apache-2.0"),
        ("format", "GGUF 3"),
        ("architecture", "llama"),
        ("parameters", "134.5 million"),
        ("layers", "30"),
        ("width", "576, feed-forward 1536"),
        ("heads", "9 query, 3 key/value, 64 wide"),
        ("vocabulary", "49152 tokens"),
        ("context", "8192 positions"),
        ("rope", "interleaved, 64 wide, base 100000"),
        ("boundary", "f16"),
        ("output", "the embedding"),
        ("stored as", "Q4_1, 5.74 bits per weight"),
        ("tensors", "Q4_1   210 x, 63.3 MiB"),
        ("", "Q8_0     1 x, 28.7 MiB"),
        ("", "F32     61 x, 137.2 KiB"),
        ("per layer", "2.1 MiB of weights"),
        ("all layers", "63.4 MiB of weights"),
        ("head", "28.7 MiB (embedding, last norm, output)"),
        (
            "kv cache",
            &format!("768 bytes per position and layer, {full}"),
        ),
        ("tokenizer", "gpt2, smollm pre-tokenizer, 49152 tokens"),
        ("chat template", "yes"),
        ("text", &model.gguf().text_id().unwrap().to_string()),
        ("weights", &id.to_string()),
    ] {
        assert!(rows.contains(&expected), "{expected:?} in\n{text}");
    }
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!(json["weights"], id.to_string());
    assert_eq!(json["spec"]["rope"]["theta"], 100_000.0);
    assert_eq!(json["layer_bytes"].as_array().unwrap().len(), 30);
    assert_eq!(json["tensor_types"][0]["dtype"], "Q4_1");
}

fn described(name: &str) -> (String, serde_json::Value) {
    let model = family(name);
    let inspection = inspect(&model, Manifest::of(&model, &mut |_, _| {}).weights_id());
    let json = serde_json::to_value(&inspection).unwrap();
    (inspection.to_string(), json)
}

#[test]
fn special_features_of_families_are_shown() {
    for (name, line) in rows! {
        "gemma2" => "window        7 positions, except in every 2nd layer";
        "gemma3" => "window        7 positions, except in every 6th layer";
        "gemma3" => "rope          neox, 16 wide, base 1000000, linear scaling by 8; base 10000 \
            in layers with a window";
        "mistral" => "window        7 positions, in all layers";
        "smollm3" => "rope          interleaved, 8 wide, base 5000000; none in every 4th layer";
        "phi3long" => "rope          neox, 8 wide, base 10000, with long factors";
        "mistralyarn" => "rope          interleaved, 16 wide, base 10000, YaRN scaling by 4 from 64 \
            positions";
        "qwen3moe" => "experts       5 per layer, 3 per token";
        "qwen3moe" => "parameters    47648, 35360 per token";
        "minicpm3" => "latent        queries of rank 32, keys and values of rank 32";
        "deepseek3" => "latent        queries of rank 32, keys and values of rank 64, cached as \
            they are";
        "deepseek2" => "latent        keys and values of rank 64, cached as they are";
        "deepseek2" => "kv cache      288 bytes per position and layer, 216.0 KiB for a full context";
        "llama31" => "parameters    26792";
        "gemma4" => "heads         4 query, 1 key/value, 32 wide; 2 key/value, 16 wide in layers with \
            a window";
        "gemma4ple" => "width         32, feed-forward 64, 128 in the last layers";
        "gemma4ple" => "shared keys   the last 2 layers use keys and values of earlier ones";
        "gemma4ple" => "inputs        32 values for each token and layer";
        "qwen35" => "layers        5, 4 of them recurrent";
        "qwen35" => "states        22.0 KiB of recurrent layers, and checkpoints";
        "granitehybrid" => "parts         MM*M (M: Mamba-2, *: attention, each with feed-forward)";
        "granitehybrid" => "states        15.4 KiB of recurrent layers, and checkpoints";
        "granitehybrid" => "rope          none";
        "nemotronh" => "layers        6, 3 of them recurrent";
        "nemotronh" => "parts         M-*-MM (M: Mamba-2, *: attention, -: feed-forward only)";
        "nemotronhmoe" => "experts       5 per layer, 3 per token, and a shared one 64 wide";
        "qwen35moe" => "experts       5 per layer, 3 per token, and a shared one 64 wide";
        "lfm2" => "layers        5, 3 of them recurrent";
        "lfm2" => "states        768 bytes of recurrent layers, and checkpoints";
        "lfm2moe" => "experts       5 per layer, 3 per token; none in the first layer";
        "glm4moe" => "experts       8 per layer, 3 per token, from 2 of 4 groups, and a shared one \
            32 wide; none in the first layer";
    } {
        let (text, _) = described(name);
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
    let (_, json) = described("qwen3moe");
    assert_eq!(json["file_type"], "F16");
    assert_eq!(json["spec"]["experts"]["used"], 3);
    let (all, token) = (&json["parameters"], &json["parameters_per_token"]);
    // Two of five experts, of three matrices each, are unused per token in two layers.
    let rest = 2 * 2 * 3 * 32 * 32;
    assert_eq!(all.as_u64().unwrap() - token.as_u64().unwrap(), rest);
    let (_, json) = described("llama31");
    assert_eq!(json["parameters"], json["parameters_per_token"]);
}

#[test]
fn a_block_for_multi_token_prediction_is_reported_as_unused() {
    let model = family("qwen35");
    let from = model.gguf();
    let (count, recurrent) = ("qwen35.block_count", "qwen35.attention.recurrent_layers");
    let mut file = NewFile::of(from, |key| key != count && key != recurrent);
    for (key, value) in [(count, 6), ("qwen35.nextn_predict_layers", 1)] {
        file.writer.set(key, Value::U32(value)).unwrap();
    }
    let kinds = [true, true, true, false, true, false];
    file.writer.set_bools(recurrent, kinds).unwrap();
    for info in from.tensors() {
        // The block has the tensors of block 3, and its own.
        let own = info.name.strip_prefix("blk.3.");
        let own = own.map(|rest| format!("blk.5.{rest}"));
        for name in [Some(info.name.clone()), own].into_iter().flatten() {
            let data = from.data(info).to_vec();
            file.tensor(&name, &info.dims, info.dtype, data);
        }
    }
    for (name, dims) in [
        ("eh_proj", &[64, 32][..]),
        ("enorm", &[32]),
        ("hnorm", &[32]),
        ("shared_head_norm", &[32]),
    ] {
        let name = format!("blk.5.nextn.{name}.weight");
        file.zeros(&name, dims, TensorType::F32);
    }
    let model = ModelFile::from_gguf(file.gguf()).unwrap();
    let id = Manifest::of(&model, &mut |_, _| {}).weights_id();
    let text = inspect(&model, id).to_string();
    let line = "more layers   1 for multi-token prediction, unused";
    assert!(text.lines().any(|l| l == line), "{text}");
    assert!(
        text.contains("layers        5, 4 of them recurrent"),
        "{text}"
    );
}

#[test]
fn a_hostile_name_cannot_write_on_the_terminal() {
    let name = format!("\x1b]0;owned\x07\n{}", "n".repeat(100_000));
    let bytes = with_metadata(&TinyLlama::default().bytes(), &["general.name"], |writer| {
        writer.set("general.name", Value::String(&name)).unwrap();
    });
    let model = ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap();
    let id = Manifest::of(&model, &mut |_, _| {}).weights_id();
    let text = inspect(&model, id).to_string();
    assert!(text.contains(r"\u{1b}]0;owned\u{7}\n"), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
    assert!(text.len() < 3000, "{}", text.len());
}

#[test]
fn a_file_that_cannot_be_run_is_still_described() {
    let mut file = NewFile::default();
    for (key, value) in [
        ("general.architecture", Value::String("of tomorrow")),
        ("general.file_type", Value::U32(19)),
        ("tokenizer.chat_template", Value::String(" \n")),
    ] {
        file.writer.set(key, value).unwrap();
    }
    file.zeros("x", &[256, 3], TensorType::IQ2_XXS);
    let gguf = file.gguf();
    let text = container(&gguf, None).to_string();
    for line in [
        "architecture  of tomorrow",
        "parameters    768",
        "stored as     IQ2_XXS, 2.06 bits per weight",
        "tensors       IQ2_XXS    1 x, 198 bytes",
        "tokenizer     none",
        // A template of white space counts as none.
        "chat template no",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
    let template = ChatTemplate::from_gguf(&gguf);
    assert!(matches!(template, Err(TemplateError::Missing)));
}
