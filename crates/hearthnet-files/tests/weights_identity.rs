//! Weights identity: its inputs, and the proofs of a manifest.

#![allow(clippy::unwrap_used, clippy::panic)] // in helpers, where a failure fails the test

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use ciborium::Value;
use hearthnet_files::manifest::{
    FileState, MAX_MANIFEST_BYTES, ManifestError, VerifyError, file_state, record_path,
};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{BoundaryDtype, Gguf, Manifest, ModelFile, WeightsId};
use hearthnet_testkit::{TinyLlama, assert_matches};
use proptest::prelude::*;

type Map = Vec<(Value, Value)>;

fn with_heads(head_dim: u32) -> TinyLlama {
    TinyLlama {
        head_dim,
        ..TinyLlama::default()
    }
}

fn manifest(tiny: &TinyLlama) -> Manifest {
    Manifest::of(&tiny.file(), &mut |_, _| {})
}

/// Tiny model with the last bit of a tensor changed.
fn damaged(tiny: &TinyLlama, tensor: &str) -> ModelFile {
    let mut bytes = tiny.bytes();
    let info = Gguf::from_bytes(bytes.clone())
        .unwrap()
        .tensor(tensor)
        .unwrap()
        .clone();
    bytes[(info.offset + info.bytes - 1) as usize] ^= 1;
    ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

#[test]
fn the_real_model_has_the_identity_that_the_specification_quotes() {
    let model = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let manifest = Manifest::of(&model, &mut |_, _| {});
    assert_eq!(
        manifest.weights_id().to_string(),
        "69dca60472c0876c2929d31d3b416d13270fa4b946989994f33e2131966a2ab7"
    );
    let spec = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../specs/weights-identity.md"),
    );
    assert!(spec.unwrap().contains(&manifest.weights_id().to_string()));
    manifest
        .verify(&model, 10..20, false, &mut |_, _| {})
        .unwrap();
}

#[test]
fn the_encoding_is_deterministic_cbor() {
    /// Rewrites a value with only the rules of RFC 8949 section 4.2.1, written out by hand.
    fn encode(value: &Value, out: &mut Vec<u8>) {
        let head = |major: u8, n: u64, out: &mut Vec<u8>| match n {
            0..24 => out.push(major << 5 | n as u8),
            24..0x100 => out.extend([major << 5 | 24, n as u8]),
            0x100..0x1_0000 => {
                out.push(major << 5 | 25);
                out.extend((n as u16).to_be_bytes());
            }
            0x1_0000..0x1_0000_0000 => {
                out.push(major << 5 | 26);
                out.extend((n as u32).to_be_bytes());
            }
            _ => {
                out.push(major << 5 | 27);
                out.extend(n.to_be_bytes());
            }
        };
        match value {
            Value::Integer(n) => head(0, u64::try_from(*n).unwrap(), out),
            Value::Bytes(bytes) => {
                head(2, bytes.len() as u64, out);
                out.extend(bytes);
            }
            Value::Text(text) => {
                head(3, text.len() as u64, out);
                out.extend(text.as_bytes());
            }
            Value::Array(values) => {
                head(4, values.len() as u64, out);
                values.iter().for_each(|value| encode(value, out));
            }
            Value::Map(pairs) => {
                head(5, pairs.len() as u64, out);
                let mut pairs: Vec<[Vec<u8>; 2]> = pairs
                    .iter()
                    .map(|(key, value)| {
                        [key, value].map(|value| {
                            let mut bytes = Vec::new();
                            encode(value, &mut bytes);
                            bytes
                        })
                    })
                    .collect();
                pairs.sort();
                pairs.iter().flatten().for_each(|bytes| out.extend(bytes));
            }
            Value::Bool(b) => out.push(if *b { 0xf5 } else { 0xf4 }),
            Value::Float(x) if f64::from(half::f16::from_f64(*x)) == *x => {
                out.push(0xf9);
                out.extend(half::f16::from_f64(*x).to_bits().to_be_bytes());
            }
            Value::Float(x) if f64::from(*x as f32) == *x => {
                out.push(0xfa);
                out.extend((*x as f32).to_be_bytes());
            }
            Value::Float(x) => {
                out.push(0xfb);
                out.extend(x.to_be_bytes());
            }
            other => panic!("nothing else may occur: {other:?}"),
        }
    }
    let encoded = manifest(&TinyLlama::default()).encode();
    let value: Value = ciborium::from_reader(&encoded[..]).unwrap();
    let mut again = Vec::new();
    encode(&value, &mut again);
    assert_eq!(encoded, again);
}

#[test]
fn a_manifest_survives_encoding() {
    for tied in [false, true] {
        let tiny = TinyLlama::default();
        let manifest = manifest(&TinyLlama { tied, ..tiny });
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
    }
}

#[test]
fn identity_depends_on_every_weight_and_hyperparameter_and_on_nothing_else() {
    let tiny = TinyLlama::default();
    let id = manifest(&tiny).weights_id();
    let different: [fn(&mut TinyLlama); 6] = [
        |tiny| tiny.seed = 2,
        |tiny| tiny.weights = "q4_0",
        |tiny| tiny.context = 255,
        |tiny| tiny.boundary = Some("f32"),
        |tiny| tiny.layers = 3,
        |tiny| tiny.tied = false,
    ];
    for change in different {
        let mut other = tiny.clone();
        change(&mut other);
        assert_ne!(manifest(&other).weights_id(), id, "{other:?}");
    }
    for tensor in [
        "token_embd.weight",
        "blk.1.ffn_down.weight",
        "blk.0.attn_norm.weight",
    ] {
        let other = Manifest::of(&damaged(&tiny, tensor), &mut |_, _| {});
        assert_ne!(other.weights_id(), id, "{tensor}");
    }
    // Naming the family's own boundary dtype changes the file but not the model.
    let boundary = Some("f16");
    assert_eq!(manifest(&TinyLlama { boundary, ..tiny }).weights_id(), id);
}

#[test]
fn a_range_is_proved_without_looking_at_the_rest() {
    let tiny = TinyLlama {
        layers: 4,
        ..TinyLlama::default()
    };
    let manifest = manifest(&tiny);
    let layer = damaged(&tiny, "blk.2.attn_k.weight");
    let verify = |layers, head| manifest.verify(&layer, layers, head, &mut |_, _| {});
    let error = VerifyError::Tensor("blk.2.attn_k.weight".to_owned());
    assert_eq!(verify(0..2, true), Ok(()));
    assert_eq!(verify(3..4, true), Ok(()));
    assert_eq!(verify(2..3, false), Err(error.clone()));
    assert_eq!(verify(0..4, true), Err(error));
    assert_eq!(verify(0..0, false), Ok(()));
    assert_eq!(
        verify(3..5, false),
        Err(VerifyError::Range {
            layers: 4,
            start: 3,
            end: 4
        })
    );

    let head = damaged(&tiny, "output_norm.weight");
    assert_eq!(manifest.verify(&head, 0..4, false, &mut |_, _| {}), Ok(()));
    assert!(manifest.verify(&head, 0..4, true, &mut |_, _| {}).is_err());

    let other = TinyLlama {
        context: 100,
        ..tiny
    };
    let other = other.file();
    assert_eq!(
        manifest.verify(&other, 0..1, false, &mut |_, _| {}),
        Err(VerifyError::Spec)
    );
}

#[test]
fn progress_reaches_the_total_exactly_once() {
    let model = TinyLlama::default().file();
    let bytes: u64 = model.gguf().tensors().iter().map(|info| info.bytes).sum();
    let mut seen = Vec::new();
    Manifest::of(&model, &mut |done, total| seen.push((done, total)));
    assert!(seen.is_sorted() && seen.iter().all(|(_, total)| *total == bytes));
    assert_eq!(seen.iter().filter(|(done, _)| *done == bytes).count(), 1);
}

/// Opens the file, and tells whether its manifest had to be computed.
fn hashed(path: &Path) -> (WeightsId, bool) {
    let mut hashed = false;
    let manifest = ModelFile::open(path)
        .unwrap()
        .manifest(&mut |_, _| hashed = true);
    (manifest.weights_id(), hashed)
}

#[test]
fn a_manifest_is_kept_beside_the_model_and_not_replaced_by_that_of_another_file() {
    let directory = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    let path = tiny.write(directory.path());
    let id = manifest(&tiny).weights_id();
    assert_eq!(hashed(&path), (id, true));
    assert_eq!(hashed(&path), (id, false));

    // Same size, later time.
    let other = TinyLlama { seed: 9, ..tiny };
    fs::write(&path, other.bytes()).unwrap();
    set_modified(&path, SystemTime::now() + Duration::from_secs(5));
    let id = manifest(&other).weights_id();
    assert_eq!(hashed(&path), (id, true));
    // The other model was not accepted, so it is not recorded.
    assert_eq!(hashed(&path), (id, true));
    let open = ModelFile::open(&path).unwrap();
    let refused = open.check(None, &mut |_, _| {}).unwrap_err();
    assert!(!refused.pinned, "{refused}");
    open.accept(&mut |_, _| {});
    assert_eq!(hashed(&path), (id, false));
    let names = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(names, 2, "the model and its manifest, nothing half-written");
}

fn set_modified(path: &Path, time: SystemTime) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(time).unwrap();
}

/// Changes one byte and restores the modification time.
fn change(path: &Path, at: usize) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
    set_modified(path, modified);
}

#[test]
fn a_byte_that_changed_under_the_same_time_is_seen_wherever_it_lies() {
    let directory = tempfile::tempdir().unwrap();
    let path = TinyLlama::default().write(directory.path());
    let check = || ModelFile::open(&path).unwrap().check(None, &mut |_, _| {});
    let good = check().unwrap();
    assert_eq!(file_state(&path), FileState::Verified(good.weights_id()));

    let weights = fs::metadata(&path).unwrap().len() as usize - 64;
    let name = b"general.name";
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(name.len()).position(|window| window == name);
    // The text behind the key, its type and its length: no number depends on it.
    let text = at.unwrap() + name.len() + 4 + 8;
    for (at, what) in [(weights, "1 of "), (text, "description")] {
        change(&path, at);
        assert_eq!(file_state(&path), FileState::Changed);
        let error = check().unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        // The file is refused until the byte is restored.
        assert!(check().is_err());
        change(&path, at);
        assert_eq!(check().unwrap(), good);
        assert_eq!(file_state(&path), FileState::Verified(good.weights_id()));
    }
}

#[test]
fn another_boundary_is_another_model_of_the_same_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = TinyLlama::default().write(directory.path());
    let open = || ModelFile::open(&path).unwrap();
    let own = open().check(None, &mut |_, _| {}).unwrap();
    let mut hashed = false;
    let wide = open()
        .with_boundary(BoundaryDtype::F32)
        .check(None, &mut |_, _| hashed = true)
        .unwrap();
    assert!(!hashed, "the record of the file serves both");
    assert_eq!(wide.spec().boundary, BoundaryDtype::F32);
    assert_eq!(wide.tensors(), own.tensors());
    assert_ne!(wide.weights_id(), own.weights_id());
    let sound = wide.verify(&open(), 0..2, true, &mut |_, _| {});
    assert_eq!(sound, Err(VerifyError::Spec));
    let sound = wide.verify(
        &open().with_boundary(BoundaryDtype::F32),
        0..2,
        true,
        &mut |_, _| {},
    );
    assert_eq!(sound, Ok(()));
}

#[test]
fn another_cache_is_another_model_of_the_same_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = with_heads(32).write(directory.path());
    let open = || ModelFile::open(&path).unwrap();
    let small = || open().with_cache(CacheDtype::Q8_0).unwrap();
    let own = open().check(None, &mut |_, _| {}).unwrap();
    let mut hashed = false;
    let other = small().check(None, &mut |_, _| hashed = true).unwrap();
    assert!(!hashed, "the record of the file serves both");
    assert_eq!(other.tensors(), own.tensors());
    assert_ne!(other.weights_id(), own.weights_id());
    assert_eq!(small().stored_weights(&other), own.weights_id());
    assert_eq!(Manifest::decode(&other.encode()), Ok(other.clone()));
    let sound = other.verify(&open(), 0..2, true, &mut |_, _| {});
    assert_eq!(sound, Err(VerifyError::Spec));
    let formats = other.spec().formats();
    let sound = other.verify(&open().with_formats(formats), 0..2, true, &mut |_, _| {});
    assert_eq!(sound, Ok(()));
    // Without a choice, the manifest does not mention the cache.
    let same = open().with_cache(CacheDtype::F16).unwrap();
    let same = same.check(None, &mut |_, _| {}).unwrap();
    assert_eq!(same.weights_id(), own.weights_id());
}

#[test]
fn a_record_of_another_model_or_a_damaged_record_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    let path = tiny.write(directory.path());
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let (id, _) = hashed(&path);
    let name = path.file_name().unwrap().display();
    let kept = path.with_file_name(format!("{name}.hearthnet"));
    let good = fs::read(&kept).unwrap();

    for damage in [vec![], vec![0xff; 100], good[..good.len() - 1].to_vec()] {
        fs::write(&kept, damage).unwrap();
        assert_eq!(hashed(&path), (id, true));
    }
    // A model of the same size and time with other tensors.
    let other = TinyLlama {
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        ..tiny.clone()
    };
    assert_eq!(other.bytes().len(), tiny.bytes().len());
    fs::write(&path, other.bytes()).unwrap();
    set_modified(&path, modified);
    assert_eq!(hashed(&path), (manifest(&other).weights_id(), true));
}

#[test]
fn a_record_without_this_users_seal_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    let path = tiny.write(directory.path());
    let (genuine, _) = hashed(&path);
    let kept = record_path(&path);
    let record = fs::read(&kept).unwrap();

    // A record without a seal, and one with a wrong seal.
    fs::write(&kept, &record[32..]).unwrap();
    assert_eq!(file_state(&path), FileState::Unverified);
    let mut other = record.clone();
    other[0] ^= 1;
    fs::write(&kept, &other).unwrap();
    assert_eq!(file_state(&path), FileState::Unverified);
    assert_eq!(hashed(&path), (genuine, true));
    assert_eq!(file_state(&path), FileState::Verified(genuine));
}

#[test]
fn tokenizer_and_template_have_an_identity_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = TinyLlama::default().write(directory.path());
    let ids = || {
        let model = ModelFile::open(&path).unwrap();
        let weights = model.manifest(&mut |_, _| {}).weights_id();
        (weights, model.gguf().text_id().unwrap())
    };
    let (weights, text) = ids();
    assert_eq!(ids(), (weights, text));
    let place = |key: &str| {
        let bytes = fs::read(&path).unwrap();
        let found = bytes.windows(key.len()).position(|w| w == key.as_bytes());
        found.unwrap() + key.len()
    };
    // Its type and length follow the key.
    for (at, same) in [
        (place("tokenizer.chat_template") + 12, false),
        (place("tokenizer.ggml.bos_token_id") + 4, false),
        (place("general.name") + 12, true),
    ] {
        change(&path, at);
        let (weights_now, text_now) = ids();
        assert_eq!(weights_now, weights);
        assert_eq!(text_now == text, same);
        change(&path, at);
    }
    assert_eq!(ids(), (weights, text));
}

#[cfg(unix)]
#[test]
fn a_place_that_cannot_be_written_is_no_error() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    let path = tiny.write(directory.path());
    // A directory of the same name stops even root.
    let kept = record_path(&path);
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("occupied"), "").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o555)).unwrap();
    assert_eq!(hashed(&path), (manifest(&tiny).weights_id(), true));
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_manifest_with_another_meaning_or_encoding_is_refused() {
    let good = manifest(&TinyLlama::default()).encode();
    let with = |change: &dyn Fn(&mut Map)| {
        let mut value: Value = ciborium::from_reader(&good[..]).unwrap();
        change(value.as_map_mut().unwrap());
        let mut bytes = Vec::new();
        ciborium::into_writer(&value, &mut bytes).unwrap();
        Manifest::decode(&bytes)
    };
    fn field<'a>(map: &'a mut Map, name: &str) -> &'a mut Value {
        let mut pairs = map.iter_mut();
        let found = pairs.find(|(key, _)| key.as_text() == Some(name));
        &mut found.unwrap().1
    }
    assert!(with(&|_| ()).is_ok(), "the change is what matters");

    let order = with(&|map| map.reverse());
    assert_eq!(order, Err(ManifestError::NotCanonical));
    let format = with(&|map| *field(map, "format") = Value::Text("hearthnet-weights-2".into()));
    assert_matches!(format, Err(ManifestError::Structure(_)));
    let extra = with(&|map| map.push((Value::Text("more".to_owned()), Value::Null)));
    assert_matches!(extra, Err(ManifestError::Structure(_)));
    let fewer = with(&|map| drop(field(map, "tensors").as_array_mut().unwrap().pop()));
    assert!(matches!(fewer, Err(ManifestError::Model(_))), "{fewer:?}");
    let twice = with(&|map| {
        let tensors = field(map, "tensors").as_array_mut().unwrap();
        let last = tensors.last().unwrap().clone();
        tensors.push(last);
    });
    assert!(matches!(twice, Err(ManifestError::Model(_))), "{twice:?}");
    for (name, value) in [
        ("layers", Value::from(u32::MAX)),
        ("layers", Value::from(0)),
        ("heads", Value::from(u32::MAX)),
        ("kv_heads", Value::from(3)),
        ("head_dim", Value::from(15)),
        ("norm_eps", Value::from(f64::NAN)),
        ("norm_eps", Value::from(-1.0)),
        ("architecture", Value::Text("gpt2".to_owned())),
        ("width", Value::from(128)),
    ] {
        let wrong = with(&|map| {
            *field(field(map, "spec").as_map_mut().unwrap(), name) = value.clone();
        });
        assert_matches!(wrong, Err(ManifestError::Model(_)), "{name} = {value:?}");
    }

    // Heads of 16 values do not fit a cache of 8 bits; other formats do not exist; f16 is not written.
    let cached = |name: &str| {
        with(&|map| {
            let cache = (Value::from("cache"), Value::from(name));
            let attention = (Value::from("attention"), Value::Map(vec![cache]));
            field(map, "spec").as_map_mut().unwrap().push(attention);
        })
    };
    let narrow = cached("q8_0").unwrap_err();
    assert_matches!(&narrow, ManifestError::Model(_));
    let said = narrow.to_string();
    assert!(
        said.contains("head_dim") && said.contains("attention.cache"),
        "{said}"
    );
    let unknown = cached("q4_0").unwrap_err();
    assert_matches!(&unknown, ManifestError::Structure(what) if what.contains("q4_0"));
    assert_eq!(cached("f16"), Err(ManifestError::NotCanonical));

    let mut trailing = good.clone();
    trailing.push(0);
    assert_eq!(
        Manifest::decode(&trailing),
        Err(ManifestError::NotCanonical)
    );
    let long = vec![0; MAX_MANIFEST_BYTES + 1];
    assert_eq!(
        Manifest::decode(&long),
        Err(ManifestError::TooLong(long.len()))
    );
    // Nested and endless structures end quickly.
    for hostile in [
        vec![0x9f; 100_000],
        vec![0xbf; 100_000],
        vec![0x9b, 255, 255, 255, 255, 255, 255, 255, 255],
    ] {
        assert!(Manifest::decode(&hostile).is_err());
    }
}

#[test]
fn a_truncated_manifest_is_refused_at_every_length() {
    let good = manifest(&TinyLlama::default()).encode();
    for len in 0..good.len() {
        assert!(Manifest::decode(&good[..len]).is_err(), "{len}");
    }
}

/// `HEARTHNET_WRITE_CORPUS=1` writes the seeds after a change of the format: a manifest of each model
/// family, which have all keys of a specification, and refused ones.
#[test]
fn the_fuzzer_begins_with_a_manifest_of_every_family() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = root.join("../../fuzz/corpus/manifest");
    let good = manifest(&TinyLlama {
        layers: 1,
        ..TinyLlama::default()
    })
    .encode();
    let text = b"hearthnet-weights-1";
    let format = good.windows(text.len()).position(|at| at == text).unwrap();
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let mut seeds = vec![
        ("sound".to_owned(), good.clone(), true),
        ("cut".into(), good[..good.len() / 2].to_vec(), false),
        (
            "format".into(),
            changed(format + text.len() - 1, b'2'),
            false,
        ),
        // Two keys of three.
        ("keys".into(), changed(0, 0xa2), false),
        ("behind".into(), [&good[..], &[0]].concat(), false),
    ];
    let cached = with_heads(32).file().with_cache(CacheDtype::Q8_0).unwrap();
    seeds.push((
        "cache".into(),
        Manifest::of(&cached, &mut |_, _| {}).encode(),
        true,
    ));
    for entry in fs::read_dir(root.join("tests/data/families")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "gguf")
            && let Ok(model) = ModelFile::open(&path)
        {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            seeds.push((name, Manifest::of(&model, &mut |_, _| {}).encode(), true));
        }
    }
    assert!(seeds.len() > 30, "{}", seeds.len());
    for (name, bytes, is_sound) in seeds {
        assert_eq!(Manifest::decode(&bytes).is_ok(), is_sound, "{name}");
        if std::env::var_os("HEARTHNET_WRITE_CORPUS").is_some() {
            fs::write(corpus.join(&name), &bytes).unwrap();
        }
        assert_eq!(fs::read(corpus.join(&name)).unwrap(), bytes, "{name}");
    }
}

proptest! {
    #[test]
    fn a_changed_manifest_is_refused_or_is_another(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let good = manifest(&TinyLlama { layers: 1, ..TinyLlama::default() }).encode();
        let mut bytes = good.clone();
        bytes[at.index(good.len())] ^= flip;
        if let Ok(manifest) = Manifest::decode(&bytes) {
            prop_assert_eq!(manifest.encode(), bytes.clone());
            prop_assert_ne!(manifest.weights_id(), WeightsId::of(&good));
        }
    }
}
