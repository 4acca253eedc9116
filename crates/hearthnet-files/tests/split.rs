//! Models in several files: one model wherever a file is one.
#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use hearthnet_files::convert::convert;
use hearthnet_files::gguf::writer::Writer;
use hearthnet_files::gguf::{Gguf, GgufError, TensorType, Value};
use hearthnet_files::joined::open_joined_at;
use hearthnet_files::manifest::{Expected, FileState, Manifest, file_state};
use hearthnet_files::part::{Part, PartError, objects_of};
use hearthnet_files::{Digest, ModelError, ModelFile, fuzzing};
use hearthnet_testkit::{Adopted, TinyLlama, rows, split, with_metadata, write_split};

fn tiny() -> TinyLlama {
    TinyLlama::default()
}

fn written(files: &[Vec<u8>]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = write_split(folder.path(), files);
    (folder, path)
}

fn second(path: &Path) -> PathBuf {
    path.with_file_name("split-00002-of-00003.gguf")
}

#[test]
fn a_split_model_is_the_model_of_the_joined_file() {
    let whole = tiny().file();
    let manifest = Manifest::of(&whole, &mut |_, _| {});
    for count in [2, 3, 7] {
        let files = split(&tiny().bytes(), count);
        let (_folder, path) = written(&files);
        let model = ModelFile::open(&path).unwrap();
        assert!(model.gguf().is_split());
        assert_eq!(Manifest::of(&model, &mut |_, _| {}), manifest, "{count}");
        assert_eq!(
            model.gguf().text_id().unwrap(),
            whole.gguf().text_id().unwrap()
        );
        let keys = |model: &ModelFile| -> Vec<String> {
            model
                .gguf()
                .metadata()
                .map(|pair| format!("{pair:?}"))
                .collect()
        };
        assert_eq!(keys(&model), keys(&whole));
        for info in whole.gguf().tensors() {
            let here = model.gguf().tensor(&info.name).unwrap();
            assert!(
                model.gguf().data(here) == whole.gguf().data(info),
                "{}",
                info.name
            );
        }
        let stored: usize = files.iter().map(Vec::len).sum();
        assert_eq!(model.gguf().stored_bytes(), stored as u64);
        // Mapped or read, it is the same file.
        let mut joined = Vec::new();
        model.gguf().write_joined(&mut joined).unwrap();
        let read = open_joined_at(&path, 0).unwrap();
        assert_eq!(read.bytes(), joined.len() as u64);
        for (from, len) in [(0, joined.len()), (5, 1000), (joined.len() - 40, 40)] {
            let mut bytes = vec![0; len];
            read.read_at(&mut bytes, from as u64).unwrap();
            assert!(bytes == joined[from..from + len], "{from}");
        }
        read.read_at(&mut [0; 2], joined.len() as u64 - 1)
            .unwrap_err();
        let again = ModelFile::from_gguf(Gguf::from_bytes(joined).unwrap()).unwrap();
        assert_eq!(again.gguf().head(), model.gguf().head());
    }
}

#[test]
fn a_change_of_any_file_is_noticed() {
    let files = split(&tiny().bytes(), 3);
    let (_folder, path) = written(&files);
    let model = ModelFile::open(&path).unwrap();
    let weights = model.manifest(&mut |_, _| {}).weights_id();
    assert_eq!(file_state(&path), FileState::Verified(weights));
    let mut hashed = false;
    ModelFile::open(&path)
        .unwrap()
        .manifest(&mut |_, _| hashed = true);
    assert!(!hashed, "the record is beside the first file");
    assert!(!model.is_replaced());
    let all: Vec<&[u8]> = files.iter().map(Vec::as_slice).collect();
    let expected = Expected {
        sha256: Some(Digest::of_all(&all)),
        ..Expected::default()
    };
    model.check(Some(expected), &mut |_, _| {}).unwrap();

    let mut changed = files[1].clone();
    let (place, new) = (second(&path), path.with_file_name("new"));
    // The last tensor may end in padding.
    let end = Gguf::from_bytes(files[1].clone()).unwrap();
    let last = end.tensors().last().unwrap();
    changed[(last.offset + last.bytes) as usize - 1] ^= 1;
    fs::write(&new, changed).unwrap();
    fs::rename(new, &place).unwrap();
    assert!(model.is_replaced());
    assert_eq!(file_state(&path), FileState::Changed);
    let other = ModelFile::open(&path).unwrap();
    let error = other.check(None, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("1 of"), "{error}");
    other.check(Some(expected), &mut |_, _| {}).unwrap_err();
    fs::remove_file(place).unwrap();
    assert_eq!(file_state(&path), FileState::Changed);
}

#[test]
fn it_is_converted_into_one_file() {
    let (folder, path) = written(&split(&tiny().bytes(), 3));
    let target = folder.path().join("converted.gguf");
    let model = ModelFile::open(&path).unwrap();
    let go_on = AtomicBool::new(false);
    convert(&model, TensorType::F32, &target, &go_on, &mut |_, _| {}).unwrap();
    let converted = ModelFile::open(&target).unwrap();
    assert!(!converted.gguf().is_split());
    assert!(
        converted
            .gguf()
            .metadata()
            .all(|(key, _)| !key.starts_with("split."))
    );
}

#[test]
fn neighbours_get_pieces_of_the_joined_file() {
    let (_folder, path) = written(&split(&tiny().bytes(), 3));
    let adopted = Adopted::of(ModelFile::open(&path).unwrap());
    let (model, identity, list) = (&adopted.model, &adopted.identity, &adopted.pieces);
    assert_eq!(identity.file_bytes, model.gguf().file_bytes());
    let file = open_joined_at(&path, identity.head_bytes).unwrap();
    let (encoded, pieces) = objects_of(&*file, model.gguf().head().to_vec()).unwrap();
    assert!(encoded == adopted.manifest.encode() && pieces == *list);

    let parts = adopted.parts.path();
    let linked = Part::of_linked_file(parts, identity, model, &encoded, list).unwrap_err();
    assert!(matches!(linked, PartError::Split(_)), "{linked}");
    let part = Part::of_file(parts, identity, model, &encoded, list).unwrap();
    assert!(part.missing(&[part.table().all()]).is_empty());
    for index in part.table().all() {
        let piece = part.table().piece(index).unwrap();
        let mut bytes = vec![0; piece.len as usize];
        file.read_at(&mut bytes, piece.offset).unwrap();
        assert!(part.read(index).unwrap() == Some(bytes), "{index}");
    }
}

fn refusal(path: &Path) -> String {
    let error = ModelFile::open(path).unwrap_err();
    assert!(
        matches!(
            error,
            ModelError::Gguf(GgufError::Split(_)) | ModelError::Split(_)
        ),
        "{error:?}"
    );
    error.to_string()
}

/// The files of the tiny model in three, with one of them replaced.
fn with(number: usize, file: Vec<u8>) -> String {
    let mut files = split(&tiny().bytes(), 3);
    files[number] = file;
    let (_folder, path) = written(&files);
    let read = open_joined_at(&path, 0).err();
    let text = refusal(&path);
    assert!(read.is_some(), "{text}");
    text
}

fn changed(number: usize, key: &str, value: Value<'_>) -> String {
    let files = split(&tiny().bytes(), 3);
    let set = |writer: &mut Writer| writer.set(key, value).unwrap();
    with(number, with_metadata(&files[number], &[key], set))
}

#[test]
fn a_file_that_is_missing_repeated_or_of_another_model_is_named() {
    let files = split(&tiny().bytes(), 3);
    let (_folder, path) = written(&files);
    let text = refusal(&second(&path));
    assert!(
        text.contains("name the first one, split-00001-of-00003.gguf"),
        "{text}"
    );
    fs::remove_file(second(&path)).unwrap();
    let text = refusal(&path);
    assert!(
        text.contains("split-00002-of-00003.gguf is missing"),
        "{text}"
    );
    let text = open_joined_at(&path, 0).unwrap_err().to_string();
    assert!(
        text.contains("split-00002-of-00003.gguf is missing"),
        "{text}"
    );
    let alone = path.with_file_name("alone.gguf");
    fs::rename(&path, &alone).unwrap();
    assert!(refusal(&alone).contains("give all of them their names back"));

    // Twice, or in another order.
    for other in [0, 2] {
        let text = with(1, files[other].clone());
        assert!(
            text.contains("split-00002-of-00003.gguf") && text.contains("split.no is"),
            "{text}"
        );
    }
    // Its number was changed, too.
    let copy = with_metadata(&files[2], &["split.no"], |writer| {
        writer.set("split.no", Value::U16(1)).unwrap();
    });
    let text = with(1, copy);
    assert!(text.contains("a file before it holds as well"), "{text}");

    let text = changed(1, "split.count", Value::U16(4));
    assert!(text.contains("split.count is 4"), "{text}");
    let text = changed(0, "split.count", Value::U16(2));
    assert!(text.contains("2 files"), "{text}");
    let text = changed(1, "split.tensors.count", Value::I32(5));
    assert!(text.contains("of another model"), "{text}");
    let text = changed(1, "general.architecture", Value::String("qwen2"));
    assert!(
        text.contains("of another model") && text.contains("qwen2"),
        "{text}"
    );
    let larger = TinyLlama {
        layers: 4,
        ..tiny()
    };
    let text = with(1, split(&larger.bytes(), 3)[1].clone());
    assert!(text.contains("of another model"), "{text}");
    let whole = tiny().bytes();
    let text = with(1, whole);
    assert!(text.contains("split.count is missing"), "{text}");
}

/// Files as the fuzz target takes them.
fn seed(files: &[Vec<u8>]) -> Vec<u8> {
    let each = files.iter().map(|file| {
        let len = u32::try_from(file.len()).unwrap();
        [&len.to_le_bytes()[..], file].concat()
    });
    each.collect::<Vec<_>>().concat()
}

/// `HEARTHNET_WRITE_CORPUS=1` writes the seeds after a change.
#[test]
fn the_fuzzer_begins_with_split_models() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/split");
    let small = TinyLlama {
        layers: 1,
        ..tiny()
    };
    let files = split(&small.bytes(), 2);
    let [first, second] = &files[..] else {
        panic!("two files")
    };
    let changed = |key: &str, value: Value<'_>| {
        with_metadata(second, &[key], |writer| writer.set(key, value).unwrap())
    };
    let of_another = changed("general.architecture", Value::String("qwen2"));
    let seeds = rows! {
        "model" => seed(&files);
        "three" => seed(&split(&small.bytes(), 3));
        "whole" => seed(&[small.bytes()]);
        "repeated" => seed(&[first.clone(), first.clone()]);
        "swapped" => seed(&[second.clone(), first.clone()]);
        "first-alone" => seed(std::slice::from_ref(first));
        "count" => seed(&[first.clone(), changed("split.count", Value::U16(3))]);
        "number" => seed(&[first.clone(), changed("split.no", Value::U16(0))]);
        "tensors" => seed(&[first.clone(), changed("split.tensors.count", Value::I32(1))]);
        "of-another" => seed(&[first.clone(), of_another]);
        "cut" => seed(&files)[..first.len() + 100].to_vec();
    };
    for (name, bytes) in &seeds {
        if std::env::var_os("HEARTHNET_WRITE_CORPUS").is_some() {
            fs::create_dir_all(&corpus).unwrap();
            fs::write(corpus.join(name), bytes).unwrap();
        }
        assert_eq!(fs::read(corpus.join(name)).unwrap(), *bytes, "{name}");
        let is_model = ["model", "three"].contains(name);
        assert_eq!(fuzzing::split(bytes).is_some(), is_model, "{name}");
    }
}
