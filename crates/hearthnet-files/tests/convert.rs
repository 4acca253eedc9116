//! Conversion of models to other tensor types.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use hearthnet_files::convert::{ConvertError, convert};
use hearthnet_files::gguf::TensorType;
use hearthnet_files::{ModelFile, quantize};
use hearthnet_testkit::{NewFile, TinyLlama, assert_matches, with_nan};

static GO_ON: AtomicBool = AtomicBool::new(false);

fn to(source: &Path, dtype: TensorType, target: &Path) -> ModelFile {
    let model = ModelFile::open(source).unwrap();
    convert(&model, dtype, target, &GO_ON, &mut |_, _| {}).unwrap();
    ModelFile::open(target).unwrap()
}

fn values(model: &ModelFile, name: &str) -> Vec<f32> {
    let tensor = model.tensor(name).unwrap();
    let mut values = Vec::new();
    quantize::decode(tensor.dtype, tensor.bytes, &mut values).unwrap();
    values
}

#[test]
fn every_type_can_be_made_from_every_other() {
    let directory = tempfile::tempdir().unwrap();
    for from in TensorType::WRITABLE {
        let tiny = TinyLlama {
            width: 256,
            head_dim: 64,
            ffn: 256,
            weights: from.name(),
            embedding: "f32",
            tied: false,
            boundary: Some("bf16"),
            ..TinyLlama::default()
        };
        let source = tiny.write(directory.path());
        let before = ModelFile::open(&source).unwrap();
        for dtype in TensorType::WRITABLE {
            let target = directory.path().join(format!("{from}-{dtype}.gguf"));
            let after = to(&source, dtype, &target);
            assert_eq!(after.spec(), before.spec());
            for (old, new) in before.gguf().tensors().iter().zip(after.gguf().tensors()) {
                assert_eq!((&old.name, &old.dims), (&new.name, &new.dims));
                let expected = match old.name.as_str() {
                    _ if old.dims.len() == 1 => TensorType::F32,
                    "token_embd.weight" | "output.weight" => match dtype {
                        TensorType::F32 | TensorType::F16 => dtype,
                        _ => TensorType::Q8_0,
                    },
                    _ => dtype,
                };
                assert_eq!(new.dtype, expected, "{}", old.name);
                let mut stored = Vec::new();
                match old.dtype == new.dtype {
                    true => stored.extend(before.gguf().data(old)),
                    false => {
                        let values = values(&before, &old.name);
                        quantize::encode(new.dtype, &values, &mut stored).unwrap();
                    }
                }
                assert!(after.gguf().data(new) == stored, "{}", old.name);
            }
            let metadata = |model: &ModelFile| -> Vec<String> {
                let all = model.gguf().metadata();
                let kept = all.filter(|(key, _)| *key != "general.file_type");
                kept.map(|pair| format!("{pair:?}")).collect()
            };
            assert_eq!(metadata(&before), metadata(&after));
        }
    }
}

#[test]
fn rows_that_do_not_fill_blocks_of_256_get_blocks_of_32() {
    let directory = tempfile::tempdir().unwrap();
    let source = TinyLlama {
        ffn: 256,
        weights: "f32",
        ..TinyLlama::default()
    };
    let source = source.write(directory.path());
    for (dtype, instead) in [
        (TensorType::Q6_K, TensorType::Q8_0),
        (TensorType::Q4_K, TensorType::Q4_1),
    ] {
        let model = to(&source, dtype, &directory.path().join(dtype.name()));
        let found = |name| model.tensor(name).unwrap().dtype;
        assert_eq!(found("blk.1.ffn_up.weight"), instead, "rows of 64");
        assert_eq!(found("blk.1.ffn_down.weight"), dtype, "rows of 256");
    }
}

#[test]
fn floats_keep_the_values_of_a_quantised_model() {
    let directory = tempfile::tempdir().unwrap();
    let source = TinyLlama::default().write(directory.path());
    let before = ModelFile::open(&source).unwrap();
    let after = to(&source, TensorType::F32, &directory.path().join("f32.gguf"));
    let name = "blk.1.ffn_up.weight";
    assert_eq!(values(&before, name), values(&after, name));
}

#[test]
fn an_alignment_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let model = TinyLlama::default().file();
    let mut file = NewFile::of(model.gguf(), |_| true);
    file.writer.align(4096).unwrap();
    for info in model.gguf().tensors() {
        file.copy(model.gguf(), info);
    }
    let aligned = directory.path().join("aligned.gguf");
    fs::write(&aligned, file.bytes()).unwrap();
    let target = directory.path().join("q8_0.gguf");
    let after = to(&aligned, TensorType::Q8_0, &target);
    assert_eq!(after.gguf().alignment(), 4096);
    let mut tensors = after.gguf().tensors().iter();
    assert!(tensors.all(|info| info.offset.is_multiple_of(4096)));
}

#[test]
fn an_unfinished_conversion_leaves_no_files() {
    let directory = tempfile::tempdir().unwrap();
    let model = ModelFile::open(&TinyLlama::default().write(directory.path())).unwrap();
    let target = directory.path().join("new.gguf");
    let count = || fs::read_dir(directory.path()).unwrap().count();

    let stop = AtomicBool::new(true);
    let cancelled = convert(&model, TensorType::F16, &target, &stop, &mut |_, _| {});
    assert_matches!(cancelled, Err(ConvertError::Cancelled));
    assert_eq!(count(), 1);

    let other = convert(&model, TensorType::Q5_K, &target, &GO_ON, &mut |_, _| {});
    assert_matches!(other, Err(ConvertError::Target(TensorType::Q5_K)));
    assert_eq!(count(), 1);

    fs::write(&target, "precious").unwrap();
    let exists = convert(&model, TensorType::F16, &target, &GO_ON, &mut |_, _| {});
    assert!(matches!(exists, Err(ConvertError::Exists(_))), "{exists:?}");
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    assert_eq!(count(), 2);

    let nowhere = directory.path().join("missing/new.gguf");
    let nowhere = convert(&model, TensorType::F16, &nowhere, &GO_ON, &mut |_, _| {});
    assert!(matches!(nowhere, Err(ConvertError::File(_))), "{nowhere:?}");
}

#[test]
fn a_full_disk_is_reported() {
    // Every write to this device fails with "no space left".
    let full = Path::new("/dev/full");
    if !full.exists() {
        return;
    }
    let source = std::io::Write::write(&mut fs::File::create(full).unwrap(), b"x").unwrap_err();
    let error = hearthnet_files::FileError {
        action: "write",
        path: full.to_owned(),
        source,
    };
    assert!(error.to_string().contains("free some space"), "{error}");
}

#[test]
fn progress_ends_at_the_size_of_the_source() {
    let directory = tempfile::tempdir().unwrap();
    let model = ModelFile::open(&TinyLlama::default().write(directory.path())).unwrap();
    let bytes: u64 = model.gguf().tensors().iter().map(|info| info.bytes).sum();
    let mut seen = Vec::new();
    let mut progress = |done, total| seen.push((done, total));
    let target = directory.path().join("new.gguf");
    convert(&model, TensorType::Q4_0, &target, &GO_ON, &mut progress).unwrap();
    assert!(seen.is_sorted());
    assert_eq!(seen.last(), Some(&(bytes, bytes)));
}

#[test]
fn a_nan_is_refused_in_copied_and_in_converted_tensors() {
    let directory = tempfile::tempdir().unwrap();
    let whole = TinyLlama::default().bytes();
    for tensor in [
        "token_embd.weight",     // Q8_0, copied
        "blk.1.attn_k.weight",   // Q4_1, converted to Q8_0
        "blk.0.ffn_norm.weight", // F32, copied
    ] {
        let source = directory.path().join("source.gguf");
        fs::write(&source, with_nan(&whole, tensor)).unwrap();
        let model = ModelFile::open(&source).unwrap();
        assert_eq!(model.not_finite(&mut |_, _| {}), Some(tensor));
        let target = directory.path().join("target.gguf");
        let error = convert(&model, TensorType::Q8_0, &target, &GO_ON, &mut |_, _| {});
        let error = error.unwrap_err();
        assert_matches!(&error, ConvertError::Tensor { name, .. } if name == tensor);
        assert!(error.to_string().contains("NaN"), "{error}");
        assert!(!target.exists());
    }
    let whole = ModelFile::from_gguf(hearthnet_files::Gguf::from_bytes(whole).unwrap()).unwrap();
    assert_eq!(whole.not_finite(&mut |_, _| {}), None);
}

#[test]
fn values_that_a_type_cannot_hold_are_refused_and_nothing_is_stored() {
    use quantize::QuantizeError;
    let mut stored = vec![7];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![0.5; 256];
        values[200] = value;
        for dtype in TensorType::WRITABLE {
            let refused = quantize::encode(dtype, &values, &mut stored);
            assert_eq!(refused, Err(QuantizeError::NotFinite), "{value} as {dtype}");
        }
    }
    // Beyond binary16, which is also the format of scales.
    let huge = vec![3e38; 256];
    for dtype in TensorType::WRITABLE {
        let expected = match dtype {
            TensorType::F32 => Ok(()),
            other => Err(QuantizeError::Range(other)),
        };
        let mut stored = Vec::new();
        assert_eq!(quantize::encode(dtype, &huge, &mut stored), expected);
        assert_eq!(stored.is_empty(), expected.is_err());
    }
    assert_eq!(stored, [7]);
}
