//! Models in several files.

use std::fs;
use std::path::{Path, PathBuf};

use hearthnet_files::gguf::{Gguf, TensorInfo, Value};

use crate::NewFile;

/// The file as `count` files, as `llama-gguf-split` writes them: the metadata in the first, and as
/// many tensors in each as possible.
///
/// # Panics
/// If `file` is not a GGUF file.
pub fn split(file: &[u8], count: u16) -> Vec<Vec<u8>> {
    let gguf = Gguf::from_bytes(file.to_vec()).expect("a GGUF file");
    let tensors = gguf.tensors();
    let per_file = tensors.len().div_ceil(usize::from(count));
    let one = |number: u16| {
        let mut file = NewFile::of(&gguf, |_| number == 0);
        let total = i32::try_from(tensors.len()).expect("few tensors");
        for (key, value) in [
            ("split.no", Value::U16(number)),
            ("split.count", Value::U16(count)),
            ("split.tensors.count", Value::I32(total)),
        ] {
            file.writer.set(key, value).expect("a key of its own");
        }
        let own = tensors.chunks(per_file).nth(number.into());
        let own: &[TensorInfo] = own.unwrap_or_default();
        for info in own {
            file.copy(&gguf, info);
        }
        file.bytes()
    };
    (0..count).map(one).collect()
}

/// Writes the files of a split model; returns the path of the first.
///
/// # Panics
/// If one cannot be written.
pub fn write_split(folder: &Path, files: &[Vec<u8>]) -> PathBuf {
    let path = |number| folder.join(format!("split-{number:05}-of-{:05}.gguf", files.len()));
    for (number, file) in (1..).zip(files) {
        fs::write(path(number), file).expect("a writable folder");
    }
    path(1)
}
