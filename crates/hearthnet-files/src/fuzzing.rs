//! Bodies of the fuzz targets, so that tests can replay the fuzzer's findings. Not a public API.

use crate::gguf::{Gguf, Value};
use crate::hugging_face;
use crate::manifest::Manifest;
use crate::model_file::ModelFile;

/// Reads bytes as a GGUF file and walks all contents that the reader promises to have checked; for
/// a model, also its manifest. Returns both for the target in `hearthnet-tokens`, which describes
/// the model.
///
/// # Panics
/// If a promise is broken.
pub fn gguf(bytes: &[u8]) -> Option<(ModelFile, Manifest)> {
    checked(Gguf::from_bytes(bytes.to_vec()).ok()?)
}

/// Reads bytes as the files of a split model, each after its length (u32, little-endian), and checks
/// the joined file as [`gguf`] does.
///
/// # Panics
/// If a promise is broken, or the joined file is not read as the same when it is written.
pub fn split(bytes: &[u8]) -> Option<(ModelFile, Manifest)> {
    let (mut rest, mut files) = (bytes, Vec::new());
    while let Some((len, after)) = rest.split_first_chunk() {
        let len = u32::from_le_bytes(*len) as usize;
        let (file, after) = after.split_at(len.min(after.len()));
        files.push(file.to_vec());
        rest = after;
    }
    let joined = match Gguf::from_files(files) {
        Ok(joined) => joined,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control));
            return None;
        }
    };
    let mut written = Vec::new();
    assert!(joined.write_joined(&mut written).is_ok());
    assert_eq!(written.len() as u64, joined.file_bytes());
    let again = Gguf::from_bytes(written);
    assert!(again.is_ok_and(|again| {
        let tensors = again.tensors().iter().zip(joined.tensors());
        again.head() == joined.head()
            && again.tensors().len() == joined.tensors().len()
            && tensors
                .into_iter()
                .all(|(a, b)| a == b && again.data(a) == joined.data(b))
    }));
    checked(joined)
}

fn checked(gguf: Gguf) -> Option<(ModelFile, Manifest)> {
    for (key, value) in gguf.metadata() {
        assert!(!key.is_empty());
        assert_eq!(
            gguf.get(key).map(|value| value.value_type()),
            Some(value.value_type())
        );
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
            assert!(
                array
                    .iter()
                    .all(|value| value.value_type() == array.element_type())
            );
        }
        assert!(!value.to_string().contains(char::is_control));
    }
    let mut tensors: Vec<_> = gguf.tensors().iter().collect();
    tensors.sort_by_key(|info| info.offset);
    assert!(tensors.is_sorted_by(|a, b| a.offset + a.bytes <= b.offset));
    for info in tensors {
        assert_eq!(gguf.tensor(&info.name), Some(info));
        assert_eq!(gguf.data(info).len() as u64, info.bytes);
        assert!(info.offset.is_multiple_of(gguf.alignment()));
        let rows: u64 = info.dims.iter().skip(1).product();
        let columns = info.dims.first().copied().unwrap_or_default();
        assert_eq!(
            info.dtype.row_bytes(columns).map(|row| row * rows),
            Some(info.bytes)
        );
    }
    let model = match ModelFile::from_gguf(gguf) {
        Ok(model) => model,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control));
            return None;
        }
    };
    let manifest = Manifest::of(&model, &mut |_, _| {});
    assert_eq!(Manifest::decode(&manifest.encode()).as_ref(), Ok(&manifest));
    let layers = 0..model.spec().layers;
    assert_eq!(
        manifest.verify(&model, layers, true, &mut |_, _| {}),
        Ok(())
    );
    Some((model, manifest))
}

/// Reads bytes as a manifest.
///
/// # Panics
/// If an accepted manifest is not in the canonical encoding.
pub fn manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        assert_eq!(manifest.encode(), bytes);
    }
}

/// Reads bytes as a safetensors file.
///
/// # Panics
/// If an accepted tensor does not lie in the file.
pub fn safetensors(bytes: &[u8]) {
    assert!(hugging_face::check_weights(bytes));
}

/// Reads bytes as each file of a Hugging Face directory that has its own format: `config.json`, the
/// weights, the tokenizer, the pieces of the vocabulary.
///
/// # Panics
/// If a promise is broken.
pub fn hugging_face(bytes: &[u8]) {
    for read in [hugging_face::check_config, hugging_face::check_tokenizer] {
        if let Err(error) = read(bytes) {
            assert!(!error.to_string().contains(char::is_control));
        }
    }
    assert!(hugging_face::check_pieces(bytes));
    safetensors(bytes);
}
