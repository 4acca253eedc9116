//! The GGUF reader on valid, damaged and hostile files.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

mod cases;

use std::fs;
use std::path::{Path, PathBuf};

use hearthnet_files::gguf::writer::{WriteError, Writer};
use hearthnet_files::gguf::{Gguf, GgufError, MetadataError, TensorType, Value};
use hearthnet_testkit::assert_matches;
use hearthnet_tokens::fuzzing;
use proptest::prelude::*;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gguf")
}

#[test]
fn every_damage_is_refused_with_the_name_of_its_field() {
    for case in cases::all() {
        match (Gguf::from_bytes(case.bytes), case.error) {
            (Ok(_), None) => {}
            (Err(error), Some(expected)) => {
                let text = error.to_string();
                assert!(text.starts_with(expected), "{}: {text:?}", case.name);
                assert!(!text.contains(char::is_control), "{}: {text:?}", case.name);
            }
            (result, _) => panic!("{}: {:?}", case.name, result.err()),
        }
    }
}

/// `HEARTHNET_WRITE_CORPUS=1` writes the cases after a change.
#[test]
fn the_fuzzer_begins_with_these_cases() {
    for case in cases::all() {
        let path = corpus().join(case.name);
        if std::env::var_os("HEARTHNET_WRITE_CORPUS").is_some() {
            fs::write(&path, &case.bytes).unwrap();
        }
        assert!(fs::read(&path).unwrap() == case.bytes, "{}", path.display());
    }
}

#[test]
fn files_are_opened_by_path_and_other_paths_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.gguf");
    assert_matches!(Gguf::open(&path), Err(GgufError::Io { .. }), "missing");
    assert_matches!(Gguf::open(directory.path()), Err(GgufError::Io { .. }));
    fs::write(&path, "").unwrap();
    assert_matches!(Gguf::open(&path), Err(GgufError::Magic { .. }), "empty");
    let bytes = cases::named("tensor-vector");
    fs::write(&path, &bytes).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.file_bytes(), bytes.len() as u64);
    assert_eq!(gguf.data(gguf.tensor("t").unwrap()), [1; 32]);
}

#[test]
fn values_keep_their_types_and_typed_access_checks_them() {
    let gguf = Gguf::from_bytes(cases::named("metadata-every-type")).unwrap();
    for (key, value) in [
        ("u8", Value::U8(1)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(0x201)),
        ("i16", Value::I16(-2)),
        ("u32", Value::U32(5)),
        ("i32", Value::I32(-1)),
        ("f32", Value::F32(1.5)),
        ("bool", Value::Bool(true)),
        ("string", Value::String("text")),
        ("u64", Value::U64(7)),
        ("i64", Value::I64(-1)),
    ] {
        assert_eq!(gguf.get(key), Some(value), "{key}");
    }
    let array = gguf.array("array").unwrap().unwrap();
    assert_eq!(array.strings().unwrap().collect::<Vec<_>>(), ["one", ""]);
    assert!(array.integers().is_none() && array.floats().is_none());
    assert_eq!(gguf.metadata().count(), 13);

    for key in ["u8", "u16", "u32", "u64"] {
        assert!(gguf.u32(key).unwrap().is_some(), "{key}");
    }
    for key in ["i8", "i16", "i32", "i64", "f32", "bool", "string", "array"] {
        assert_matches!(gguf.u32(key), Err(MetadataError::Mismatch { .. }), "{key}");
    }
    assert_eq!(gguf.f64("f32"), Ok(Some(1.5)));
    assert!(gguf.f64("f64").is_err(), "not a number");
    assert!(gguf.bool("u8").is_err() && gguf.str("bool").is_err() && gguf.array("string").is_err());
    assert_eq!(gguf.u32("missing"), Ok(None));
}

#[test]
fn a_tensor_of_another_file_has_no_data_here() {
    let big = Gguf::from_bytes(cases::named("tensors-two")).unwrap();
    let small = Gguf::from_bytes(cases::named("version-3-nothing")).unwrap();
    assert!(small.data(big.tensor("b").unwrap()).is_empty());
}

#[test]
fn a_writer_refuses_what_a_reader_would() {
    let mut writer = Writer::new();
    writer.set("key", Value::U8(1)).unwrap();
    assert_matches!(
        writer.set("key", Value::U8(1)),
        Err(WriteError::Name { .. })
    );
    assert_matches!(writer.set("", Value::U8(1)), Err(WriteError::Name { .. }));
    let long = "k".repeat(1 << 16);
    assert_matches!(writer.set_i32s(&long, &[1]), Err(WriteError::Name { .. }));
    writer.tensor("t", &[32], TensorType::Q8_0).unwrap();
    assert_matches!(
        writer.tensor("t", &[32], TensorType::Q8_0),
        Err(WriteError::Name { .. })
    );
    for dims in [&[][..], &[0], &[33], &[32; 5], &[1 << 40, 1 << 40]] {
        let error = writer.tensor("u", dims, TensorType::Q8_0);
        assert!(matches!(error, Err(WriteError::Shape { .. })), "{dims:?}");
    }
    assert!(writer.align(24).is_err() && writer.align(4).is_err());
    writer.align(64).unwrap();
    assert!(writer.align(64).is_err(), "twice");
    let short = writer.write(&mut Vec::new(), |_, out| {
        out.write_all(&[0; 33]).map_err(WriteError::Io)
    });
    let short = short.unwrap_err().to_string();
    assert_eq!(short, "tensor \"t\" takes 34 bytes, 33 were given");
}

type Metadata = (u64, f32, String, Vec<i32>);
type Tensor = (Vec<u64>, usize);

/// Metadata and tensors of any kind.
fn contents() -> impl Strategy<Value = (Vec<Metadata>, Vec<Tensor>)> {
    let values = (
        any::<u64>(),
        any::<f32>(),
        ".{0,12}",
        prop::collection::vec(any::<i32>(), 0..5),
    );
    let tensors = (
        prop::collection::vec(1u64..4, 1..=4),
        0..TensorType::WRITABLE.len(),
    );
    (
        prop::collection::vec(values, 0..6),
        prop::collection::vec(tensors, 0..6),
    )
}

proptest! {
    #[test]
    fn written_files_are_read_back(
        (values, tensors) in contents(),
        alignment in prop::sample::select(vec![0u32, 8, 32, 4096]),
    ) {
        let mut writer = Writer::new();
        if alignment != 0 {
            writer.align(alignment).unwrap();
        }
        for (index, (integer, float, text, array)) in values.iter().enumerate() {
            writer.set(&format!("{index}.integer"), Value::U64(*integer)).unwrap();
            writer.set(&format!("{index}.float"), Value::F32(*float)).unwrap();
            writer.set(&format!("{index}.text"), Value::String(text)).unwrap();
            writer.set_i32s(&format!("{index}.i32s"), array).unwrap();
            writer.set_strings(&format!("{index}.texts"), [text.as_str(), ""]).unwrap();
            writer.set_f32s(&format!("{index}.f32s"), &[*float]).unwrap();
        }
        let mut written = Vec::new();
        for (index, (dims, dtype)) in tensors.iter().enumerate() {
            let dtype = TensorType::WRITABLE[*dtype];
            let mut dims = dims.clone();
            dims[0] *= u64::from(dtype.block_values());
            writer.tensor(&format!("t{index}"), &dims, dtype).unwrap();
            let rows: u64 = dims[1..].iter().product();
            written.push(vec![index as u8 + 1; (dtype.row_bytes(dims[0]).unwrap() * rows) as usize]);
        }
        let mut file = Vec::new();
        writer.write(&mut file, |index, out| out.write_all(&written[index]).map_err(WriteError::Io)).unwrap();

        fuzzing::gguf(&file);
        let gguf = Gguf::from_bytes(file).unwrap();
        for (index, (integer, float, text, array)) in values.iter().enumerate() {
            let get = |kind: &str| gguf.get(&format!("{index}.{kind}")).unwrap();
            prop_assert_eq!(get("integer").as_integer(), Some(i128::from(*integer)));
            prop_assert_eq!(get("float").as_float().map(f64::to_bits), Some(f64::from(*float).to_bits()));
            prop_assert_eq!(get("text").as_str(), Some(text.as_str()));
            let i32s: Vec<i128> = get("i32s").as_array().unwrap().integers().unwrap().collect();
            prop_assert_eq!(i32s, array.iter().map(|&v| i128::from(v)).collect::<Vec<_>>());
            let texts: Vec<&str> = get("texts").as_array().unwrap().strings().unwrap().collect();
            prop_assert_eq!(texts, [text.as_str(), ""]);
            prop_assert_eq!(get("f32s").as_array().unwrap().floats().unwrap().count(), 1);
        }
        for (index, data) in written.iter().enumerate() {
            let info = gguf.tensor(&format!("t{index}")).unwrap();
            prop_assert_eq!(gguf.data(info), &data[..]);
            prop_assert!(info.offset.is_multiple_of(gguf.alignment()));
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        fuzzing::gguf(&bytes);
        fuzzing::gguf(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
    }

    #[test]
    fn several_damages_at_once_are_survived(
        case in any::<prop::sample::Index>(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut cases = cases::all();
        let mut bytes = cases.swap_remove(case.index(cases.len())).bytes;
        for (at, value) in damages {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
        }
        fuzzing::gguf(&bytes);
    }
}
