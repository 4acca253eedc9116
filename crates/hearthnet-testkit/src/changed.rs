//! Changed model files: with one defect, or with another vocabulary.

use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{Gguf, TensorInfo, TensorType, Value};
use hearthnet_files::quantize;

use crate::TinyLlama;

/// Copy of the file with other metadata: without the keys of `without`, and with the keys that
/// `add` sets. Tensors stay unchanged.
///
/// # Panics
/// If `file` is not a GGUF file, or `add` sets an existing key.
pub fn with_metadata(file: &[u8], without: &[&str], add: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let gguf = Gguf::from_bytes(file.to_vec()).expect("a GGUF file");
    let mut writer = metadata_of(&gguf, |key| !without.contains(&key));
    add(&mut writer);
    for info in gguf.tensors() {
        let added = writer.tensor(&info.name, &info.dims, info.dtype);
        added.expect("a tensor of the file");
    }
    written(writer, |index| gguf.data(&gguf.tensors()[index]))
}

/// Writer with some of the metadata of a file.
fn metadata_of(gguf: &Gguf, is_kept: impl Fn(&str) -> bool) -> Writer {
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().filter(|(key, _)| is_kept(key)) {
        writer.set(key, value).expect("a key of the file");
    }
    writer
}

/// Copy of the file with other tensors, and with the keys of `metadata`. `change` gets the values
/// of each tensor, and returns the type to store it in, and its bytes. It may change the dimensions.
///
/// # Panics
/// If a tensor cannot be decoded, or does not have the bytes of its type.
pub fn rewritten(
    gguf: &Gguf,
    metadata: &[(&str, Value<'_>)],
    mut change: impl FnMut(&mut TensorInfo, Vec<f32>) -> (TensorType, Vec<u8>),
) -> Vec<u8> {
    let is_kept = |key: &str| !metadata.iter().any(|(changed, _)| *changed == key);
    let mut writer = metadata_of(gguf, is_kept);
    for (key, value) in metadata {
        writer.set(key, *value).expect("a key of its own");
    }
    let mut contents = Vec::new();
    for info in gguf.tensors() {
        let mut values = Vec::new();
        quantize::decode(info.dtype, gguf.data(info), &mut values).expect("a known type");
        let mut info = info.clone();
        let (dtype, bytes) = change(&mut info, values);
        let added = writer.tensor(&info.name, &info.dims, dtype);
        added.expect("whole blocks");
        contents.push(bytes);
    }
    written(writer, |index| &contents[index])
}

/// Copy of a model file with the vocabulary, tokenizer and template of [`TinyLlama`], in place of
/// those of the file: rows of the matrices of the vocabulary are repeated, each time rotated, or cut
/// off. `context`: its context length.
///
/// # Panics
/// If a matrix of the vocabulary cannot be decoded or encoded.
pub fn with_tiny_vocabulary(gguf: &Gguf, context: u32) -> Vec<u8> {
    let tiny = TinyLlama::default();
    let tokens = Gguf::from_bytes(tiny.bytes()).expect("a GGUF file");
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        let is_text = key.starts_with("tokenizer.") || key.ends_with(".vocab_size");
        match key.ends_with(".context_length") {
            true => writer.set(key, Value::U32(context)).expect("a key"),
            false if is_text => {}
            false => writer.set(key, value).expect("a key of the file"),
        }
    }
    for (key, value) in tokens.metadata() {
        if key.starts_with("tokenizer.") {
            writer.set(key, value).expect("a key of the other file");
        }
    }
    let mut contents = Vec::new();
    for info in gguf.tensors() {
        let names = [
            "token_embd.weight",
            "per_layer_token_embd.weight",
            "output.weight",
        ];
        let data = gguf.data(info);
        let (dims, bytes) = match names.contains(&info.name.as_str()) {
            false => (info.dims.clone(), data.to_vec()),
            true => {
                let mut values = Vec::new();
                quantize::decode(info.dtype, data, &mut values).expect("a known type");
                let (width, rows) = (info.dims[0] as usize, info.dims[1] as usize);
                let rows = (0..tiny.vocab as usize).flat_map(|row| {
                    let mut values = values[row % rows * width..][..width].to_vec();
                    values.rotate_left(row / rows % width);
                    values
                });
                let rows: Vec<f32> = rows.collect();
                (
                    vec![width as u64, tiny.vocab.into()],
                    encoded(info.dtype, &rows).1,
                )
            }
        };
        let added = writer.tensor(&info.name, &dims, info.dtype);
        added.expect("whole blocks");
        contents.push(bytes);
    }
    written(writer, |index| &contents[index])
}

/// Values as [`rewritten`] takes them.
///
/// # Panics
/// If there is no encoder for the type, or the values do not fill whole blocks.
pub fn encoded(dtype: TensorType, values: &[f32]) -> (TensorType, Vec<u8>) {
    let mut bytes = Vec::new();
    quantize::encode(dtype, values, &mut bytes).expect("whole blocks");
    (dtype, bytes)
}

fn written<'a>(writer: Writer, content: impl Fn(usize) -> &'a [u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let written = writer.write(&mut out, |index, out| {
        out.write_all(content(index)).map_err(WriteError::Io)
    });
    written.expect("writing to memory");
    out
}

/// Copy of the file with a NaN in the named tensor; in a quantised tensor, its first scale.
///
/// # Panics
/// If `file` is not a GGUF file, or has no such tensor of type F32, F16, Q8_0, Q4_0 or Q4_1.
pub fn with_nan(file: &[u8], tensor: &str) -> Vec<u8> {
    let gguf = Gguf::from_bytes(file.to_vec()).expect("a GGUF file");
    let info = gguf.tensor(tensor).expect("a tensor");
    let nan: &[u8] = match info.dtype.name() {
        "F32" => &[0, 0, 0xc0, 0x7f],
        "F16" | "Q8_0" | "Q4_0" | "Q4_1" => &[0, 0x7e],
        other => panic!("no place for a NaN is known of {other}"),
    };
    let at = info.offset as usize;
    let mut bytes = file.to_vec();
    bytes[at..at + nan.len()].copy_from_slice(nan);
    bytes
}
