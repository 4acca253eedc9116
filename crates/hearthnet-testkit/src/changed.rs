//! Model files with one defect.

use hearthnet_files::gguf::Gguf;
use hearthnet_files::gguf::writer::{WriteError, Writer};

/// Copy of the file with other metadata: without the keys of `without`, and with the keys that
/// `add` sets. Tensors stay unchanged.
///
/// # Panics
/// If `file` is not a GGUF file, or `add` sets an existing key.
pub fn with_metadata(file: &[u8], without: &[&str], add: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let gguf = Gguf::from_bytes(file.to_vec()).expect("a GGUF file");
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        if !without.contains(&key) {
            writer.set(key, value).expect("a key of the file");
        }
    }
    add(&mut writer);
    for info in gguf.tensors() {
        let added = writer.tensor(&info.name, &info.dims, info.dtype);
        added.expect("a tensor of the file");
    }
    let mut out = Vec::new();
    let written = writer.write(&mut out, |index, out| {
        let data = gguf.data(&gguf.tensors()[index]);
        out.write_all(data).map_err(WriteError::Io)
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
