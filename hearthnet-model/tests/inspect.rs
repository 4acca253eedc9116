//! What `model inspect` says.

use hearthnet_model::gguf::writer::{WriteError, Writer};
use hearthnet_model::gguf::{Gguf, Value};
use hearthnet_model::inspect::inspect;
use hearthnet_model::{Manifest, ModelFile};
use hearthnet_testkit::TinyLlama;

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
        ("tensors", "Q4_1   210 x, 63.3 MiB"),
        ("", "Q8_0     1 x, 28.7 MiB"),
        ("", "F32     61 x, 137.2 KiB"),
        ("per layer", "2.1 MiB of weights"),
        ("all layers", "63.4 MiB of weights"),
        ("head", "28.7 MiB (embedding, last norm, output)"),
        (
            "kv cache",
            "768 bytes per position and layer, 180.0 MiB for a full context",
        ),
        ("tokenizer", "gpt2, smollm pre-tokenizer, 49152 tokens"),
        ("chat template", "yes"),
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

#[test]
fn a_hostile_name_cannot_write_on_the_terminal() {
    let tiny = Gguf::from_bytes(TinyLlama::default().bytes()).unwrap();
    let mut writer = Writer::new();
    for (key, value) in tiny.metadata() {
        let value = if key == "general.name" {
            Value::String("\x1b]0;owned\x07\n")
        } else {
            value
        };
        writer.set(key, value).unwrap();
    }
    for info in tiny.tensors() {
        writer.tensor(&info.name, &info.dims, info.dtype).unwrap();
    }
    let mut bytes = Vec::new();
    let data = |index: usize| tiny.data(&tiny.tensors()[index]);
    writer
        .write(&mut bytes, |index, out| {
            out.write_all(data(index)).map_err(WriteError::Io)
        })
        .unwrap();
    let model = ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap();
    let id = Manifest::of(&model, &mut |_, _| {}).weights_id();
    let text = inspect(&model, id).to_string();
    assert!(text.contains(r"\u{1b}]0;owned\u{7}\n"), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
}
