//! Import of Hugging Face directories against llama.cpp's converter.
//!
//! `data/hugging_face` has the tiny models of `data/families` as directories, and more for weight
//! types and tokenizers (see its README). The converter's results are stored as files or as SHA-256
//! of each tensor.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hearthnet_files::convert::convert;
use hearthnet_files::gguf::{TensorType, Value};
use hearthnet_files::hugging_face::{
    Directory, Files, ImportError, OpenFile, Tensors, import, place,
};
use hearthnet_files::{Gguf, Manifest, ModelFile, Pooling};
use hearthnet_testkit::{assert_matches, rows};
use serde_json::{Value as Json, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

static GO_ON: AtomicBool = AtomicBool::new(false);

const FAMILIES: &str = "bert deepseek2 deepseek3 gemma2 gemma3 gemma4 gemma4moe gemma4ple \
    gemmaembedding glm4 glm47flash glm4moe gptoss granite granitehybrid granitehybridmoe lfm2 \
    lfm2moe llama31 minicpm3 mistral mistral3 mistralyarn mixtral museglimmer nemotronh \
    nemotronhmoe nomicbert olmoe phi3 phi3long qwen2 qwen3 qwen35 qwen35moe qwen3moe qwen3next \
    qwen3yarn seedoss smollm3";

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/hugging_face")
        .join(name)
}

fn converted(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/families")
        .join(format!("{name}.gguf"))
}

pub(crate) fn write(directory: &Path, dtype: Option<TensorType>) -> Result<ModelFile, ImportError> {
    let made = tempfile::tempdir().unwrap();
    let target = made.path().join("model.gguf");
    Directory::open(directory)?.write(dtype, &target, &GO_ON, &mut |_, _| {})?;
    // The map outlives the name.
    Ok(ModelFile::open(&target).unwrap())
}

fn assert_same_tensors(a: &Gguf, b: &Gguf, what: &str) {
    let names = |gguf: &Gguf| {
        let mut names: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|t| (t.name.clone(), t.dims.clone(), t.dtype))
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(a), names(b), "{what}");
    for info in a.tensors() {
        let other = b.tensor(&info.name).unwrap();
        assert!(a.data(info) == b.data(other), "{what}: {}", info.name);
    }
}

/// Copy of a directory with its folders, for changes.
pub(crate) fn copy(name: &str) -> TempDir {
    fn into(from: &Path, to: &Path) {
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let target = to.join(path.file_name().unwrap());
            match path.is_dir() {
                true => {
                    fs::create_dir(&target).unwrap();
                    into(&path, &target);
                }
                false => drop(fs::copy(&path, &target).unwrap()),
            }
        }
    }
    let made = tempfile::tempdir().unwrap();
    into(&data(name), made.path());
    made
}

pub(crate) fn edit(directory: &Path, file: &str, change: impl FnOnce(&mut Json)) {
    let path = directory.join(file);
    let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn configured(name: &str, key: &str, value: Json) -> Result<ModelFile, ImportError> {
    let directory = copy(name);
    edit(directory.path(), "config.json", |config| {
        config[key] = value;
    });
    write(directory.path(), None)
}

/// A directory gives the same model as the stored one of that name.
pub(crate) fn assert_same_model(directory: &Path, name: &str) {
    let (ours, stored) = (
        write(directory, None).unwrap(),
        write(&data(name), None).unwrap(),
    );
    assert_same_tensors(ours.gguf(), stored.gguf(), name);
    assert_eq!(ours.spec(), stored.spec(), "{name}");
}

/// Name, type, shape and data of each tensor of a safetensors file.
type Parts = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

fn parts(path: &Path) -> Parts {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: BTreeMap<String, Json> = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let data = &bytes[8 + header..];
    let tensors = json.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let at = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
            let shape = serde_json::from_value(info["shape"].clone()).unwrap();
            let dtype = info["dtype"].as_str().unwrap().to_owned();
            (name, (dtype, shape, data[at(0)..at(1)].to_vec()))
        })
        .collect()
}

fn write_parts(path: &Path, parts: &Parts) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in parts {
        let start = data.len();
        data.extend(bytes);
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), info);
    }
    fs::write(path, safetensors(&Json::Object(header), &data)).unwrap();
}

/// Changes the tensors of a directory.
fn change_parts(directory: &Path, change: impl FnOnce(&mut Parts)) {
    let path = directory.join("model.safetensors");
    let mut all = parts(&path);
    change(&mut all);
    write_parts(&path, &all);
}

/// Error for a copy of a directory with changed tensors.
fn refused(name: &str, change: impl FnOnce(&mut Parts)) -> ImportError {
    let directory = copy(name);
    change_parts(directory.path(), change);
    write(directory.path(), None).unwrap_err()
}

fn safetensors(header: &Json, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// Splits the weights in two, with an index.
fn split(directory: &Path) {
    let single = directory.join("model.safetensors");
    let mut shards = [Parts::new(), Parts::new()];
    let mut map = BTreeMap::new();
    for (index, (name, part)) in parts(&single).into_iter().enumerate() {
        map.insert(name.clone(), shard(index % 2));
        shards[index % 2].insert(name, part);
    }
    for (index, parts) in shards.iter().enumerate() {
        write_parts(&directory.join(shard(index)), parts);
    }
    fs::remove_file(single).unwrap();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(
        directory.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
}

fn shard(index: usize) -> String {
    format!("model-{:05}-of-00002.safetensors", index + 1)
}

#[test]
fn every_family_converts_as_by_llama_cpp() {
    for name in FAMILIES.split(' ') {
        let ours = write(&data(name), None).unwrap();
        let theirs = ModelFile::open(&converted(name)).unwrap();
        assert_same_tensors(ours.gguf(), theirs.gguf(), name);
        assert_eq!(ours.spec(), theirs.spec(), "{name}");
        let keys = |model: &ModelFile| -> BTreeMap<String, String> {
            let all = model.gguf().metadata();
            let told = all.filter(|(key, _)| *key != "general.size_label");
            told.map(|(key, value)| (key.to_owned(), value.to_string()))
                .collect()
        };
        assert_eq!(keys(&ours), keys(&theirs), "{name}");
    }
}

#[test]
fn every_type_converts_as_by_llama_cpp() {
    let text = fs::read_to_string(data("types.json")).unwrap();
    let known: BTreeMap<String, BTreeMap<String, (String, String)>> =
        serde_json::from_str(&text).unwrap();
    assert_eq!(known.len(), 8);
    for (case, tensors) in known {
        let (from, to) = case.split_once(" as ").unwrap();
        let to = (from != to).then(|| to.parse().unwrap());
        let model = write(&data(&format!("types-{from}")), to).unwrap();
        assert_eq!(model.gguf().tensors().len(), tensors.len());
        for info in model.gguf().tensors() {
            let digest = Sha256::digest(model.gguf().data(info));
            let hex: String = hex::encode(digest);
            let found = (info.dtype.to_string(), hex);
            assert_eq!(found, tensors[&info.name], "{case}: {}", info.name);
        }
    }
}

#[test]
fn matrices_of_two_types_become_f32_which_holds_both() {
    let directory = copy("types-bf16");
    let exact = parts(&data("types-f32").join("model.safetensors"));
    let name = "model.layers.0.mlp.up_proj.weight";
    change_parts(directory.path(), |mixed| {
        mixed.insert(name.to_owned(), exact[name].clone());
    });
    let model = write(directory.path(), None).unwrap();
    let up = model.tensor("blk.0.ffn_up.weight").unwrap();
    assert_eq!((up.dtype, up.bytes), (TensorType::F32, &exact[name].2[..]));
    let down = model.tensor("blk.0.ffn_down.weight").unwrap();
    assert_eq!(down.dtype, TensorType::F32);
}

#[test]
fn tokenizers_convert_as_by_llama_cpp() {
    let text = fs::read_to_string(data("text.json")).unwrap();
    let known: BTreeMap<String, BTreeMap<String, Json>> = serde_json::from_str(&text).unwrap();
    assert_eq!(known.len(), 5);
    for (name, expected) in known {
        let model = write(&data(&name), None).unwrap();
        let told = model.gguf().metadata().filter(|(key, _)| {
            key.starts_with("tokenizer.") || key.starts_with("general.sampling.")
        });
        let found: BTreeMap<String, Json> = told
            .map(|(key, value)| (key.to_owned(), as_json(value)))
            .collect();
        for (key, value) in &expected {
            assert_eq!(found.get(key), Some(value), "{name}: {key}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
    }
}

fn as_json(value: Value<'_>) -> Json {
    match value {
        Value::Array(list) => list.iter().map(as_json).collect(),
        Value::String(text) => json!(text),
        Value::Bool(value) => json!(value),
        other => match (other.as_integer(), other.as_float()) {
            (Some(n), _) => json!(i64::try_from(n).unwrap()),
            (_, number) => json!(number.unwrap()),
        },
    }
}

#[test]
fn shards_are_one_model() {
    for name in ["llama31", "mixtral", "types-mxfp4"] {
        let directory = copy(name);
        split(directory.path());
        assert_same_model(directory.path(), name);
    }
}

#[test]
fn quantising_during_and_after_the_import_is_the_same() {
    let made = tempfile::tempdir().unwrap();
    for name in [
        "llama31",
        "mixtral",
        "gemma2",
        "gptoss",
        "minicpm3",
        "deepseek3",
        "types-bf16",
        "types-mxfp4",
    ] {
        let exact = write(&data(name), None).unwrap();
        for dtype in TensorType::WRITABLE {
            let target = made.path().join(format!("{name}-{dtype}.gguf"));
            convert(&exact, dtype, &target, &GO_ON, &mut |_, _| {}).unwrap();
            let afterwards = ModelFile::open(&target).unwrap();
            let on_the_way = write(&data(name), Some(dtype)).unwrap();
            let what = format!("{name} {dtype}");
            assert_same_tensors(on_the_way.gguf(), afterwards.gguf(), &what);
            assert_eq!(on_the_way.spec(), afterwards.spec(), "{what}");
            let kind = |model: &ModelFile| model.gguf().u32("general.file_type").unwrap();
            assert_eq!(kind(&on_the_way), kind(&afterwards), "{what}");
        }
    }
    let refused = write(&data("llama31"), Some(TensorType::Q5_K));
    assert!(matches!(refused, Err(ImportError::Target(_))));
}

fn manifest(model: &ModelFile) -> Manifest {
    Manifest::of(model, &mut |_, _| {})
}

#[test]
fn any_range_of_a_tensor_is_that_of_the_whole_conversion() {
    use TensorType::{F16, Q4_1, Q4_K, Q8_0};
    // SplitMix64.
    let mut state = 7u64;
    let mut below = move |most: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % (most as u64 + 1)) as usize
    };
    let types = ["types-f32", "types-f16", "types-bf16", "types-mxfp4"];
    for name in FAMILIES.split(' ').chain(types) {
        for dtype in [None, Some(F16), Some(Q8_0), Some(Q4_1), Some(Q4_K)] {
            let model = write(&data(name), dtype).unwrap();
            let tensors = Tensors::open(&data(name), &manifest(&model)).unwrap();
            for info in model.gguf().tensors() {
                let whole = model.gguf().data(info);
                for _ in 0..12 {
                    let from = below(whole.len() - 1);
                    let end = from + below(whole.len() - from);
                    let found = tensors.read_range(&info.name, from as u64..end as u64);
                    let what = format!("{name} {dtype:?}: {} {from}..{end}", info.name);
                    assert!(found.unwrap() == whole[from..end], "{what}");
                }
                let all = tensors.read_range(&info.name, 0..whole.len() as u64);
                assert!(all.unwrap() == whole, "{name} {dtype:?}: {}", info.name);
                let beyond = tensors.read_range(&info.name, 0..whole.len() as u64 + 1);
                assert!(matches!(beyond, Err(ImportError::Other(_))), "{name}");
            }
        }
    }
}

/// Directory that counts the bytes that are read from it.
struct Counted(PathBuf, Arc<AtomicU64>);

#[derive(Debug)]
struct CountedFile(Box<dyn OpenFile>, Arc<AtomicU64>);

impl Files for Counted {
    fn path(&self) -> &Path {
        &self.0
    }

    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
        let counted = |file| -> Box<dyn OpenFile> { Box::new(CountedFile(file, self.1.clone())) };
        Ok(Files::open(&self.0, name)?.map(counted))
    }
}

impl OpenFile for CountedFile {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read_at(&self, out: &mut [u8], from: u64) -> io::Result<()> {
        self.1.fetch_add(out.len() as u64, Ordering::Relaxed);
        self.0.read_at(out, from)
    }
}

#[test]
fn of_a_range_only_its_blocks_and_pairs_of_rows_are_read() {
    const ROW: u64 = 64;
    let model = write(&data("llama31"), Some(TensorType::Q8_0)).unwrap();
    let read = Arc::new(AtomicU64::new(0));
    let counted = Counted(data("llama31"), Arc::clone(&read));
    let tensors = Tensors::open(&counted, &manifest(&model)).unwrap();
    let taken = |name: &str, range: std::ops::Range<u64>| {
        read.store(0, Ordering::Relaxed);
        tensors.read_range(name, range).unwrap();
        read.load(Ordering::Relaxed)
    };
    // A row is 32 values in BF16, and 34 bytes in Q8_0.
    assert_eq!(taken("blk.0.ffn_up.weight", 34..35), ROW);
    assert_eq!(taken("blk.1.ffn_up.weight", 33..69), 3 * ROW);
    // Heads of 16 rows, whose rows are read in pairs.
    assert_eq!(taken("blk.0.attn_q.weight", 0..34), 2 * ROW);
    assert_eq!(taken("blk.0.attn_q.weight", 15 * 34..17 * 34), 4 * ROW);
    assert_eq!(taken("blk.0.attn_q.weight", 0..32 * 34), 32 * ROW);
    assert_eq!(taken("blk.0.attn_k.weight", 14 * 34..32 * 34), 18 * ROW);
}

#[test]
fn a_directory_of_another_model_is_no_source_of_tensors() {
    let model = write(&data("llama31"), None).unwrap();
    let refused = |name: &str, model: &ModelFile| {
        let opened = Tensors::open(&data(name), &manifest(model));
        opened.unwrap_err().to_string()
    };
    let error = refused("qwen2", &model);
    assert!(error.contains("it is not the adopted model"), "{error}");
    // A type that an import of the directory never writes.
    let f16 = write(&data("types-f16"), None).unwrap();
    assert!(Tensors::open(&data("types-bf16"), &manifest(&f16)).is_ok());
    let bf16 = write(&data("types-bf16"), None).unwrap();
    let error = refused("types-f16", &bf16);
    assert!(
        error.contains("instead of") || error.contains("would be"),
        "{error}"
    );
}

#[test]
fn a_directory_is_read_once_until_it_changes() {
    let (cache, directory) = (tempfile::tempdir().unwrap(), copy("llama31"));
    let go = |dtype| {
        let mut told = 0;
        let made = import(
            directory.path(),
            dtype,
            cache.path(),
            &GO_ON,
            &mut |done, _| {
                told = done;
            },
        );
        (made.unwrap(), told)
    };
    let (first, told) = go(None);
    assert!(first.is_file() && told > 50_000, "{told}");
    assert_eq!(go(None), (first.clone(), 0));
    let (quantised, told) = go(Some(TensorType::Q8_0));
    assert!(quantised != first && told > 0);
    assert!(quantised.to_string_lossy().ends_with("-Q8_0.gguf"));
    // A truncated result is made again.
    fs::write(&first, "GGUF").unwrap();
    assert!(go(None).1 > 0);
    edit(directory.path(), "config.json", |config| {
        config["initializer_range"] = json!(0.5);
    });
    let (second, told) = go(None);
    assert!(second != first && told > 0);
    // Only whole files are left, even after a process was killed.
    let folder = second.parent().unwrap();
    fs::remove_file(&second).unwrap();
    fs::write(folder.join(".old.gguf.1-0.part"), "GGUF").unwrap();
    assert_eq!(go(None).0, second);
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, [".lock".as_ref(), second.file_name().unwrap()]);
}

#[test]
fn a_directory_restored_with_its_old_times_is_read_again() {
    let (cache, directory) = (tempfile::tempdir().unwrap(), copy("llama31"));
    let go = || {
        let path = directory.path();
        import(path, None, cache.path(), &GO_ON, &mut |_, _| {}).unwrap()
    };
    let first = go();
    let path = directory.path().join("model.safetensors");
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(modified).unwrap();
    assert_ne!(go(), first);
}

#[cfg(unix)]
#[test]
fn parallel_imports_of_a_directory_give_the_same_file() {
    let (cache, directory) = (tempfile::tempdir().unwrap(), copy("mixtral"));
    let go = || {
        let mut told = 0;
        let mut progress = |done, _| told = done;
        let path = directory.path();
        let made = import(path, None, cache.path(), &GO_ON, &mut progress).unwrap();
        (made, told > 0)
    };
    let made: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(go)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(made.iter().all(|(path, _)| *path == made[0].0));
    assert_eq!(made.iter().filter(|(_, wrote)| *wrote).count(), 1);
}

#[test]
fn waiting_for_another_import_can_be_cancelled() {
    let (cache, directory) = (tempfile::tempdir().unwrap(), copy("llama31"));
    let target = place(directory.path(), None, cache.path()).unwrap();
    let folder = target.parent().unwrap();
    fs::create_dir_all(folder).unwrap();
    let lock = fs::File::create(folder.join(".lock")).unwrap();
    lock.lock().unwrap();
    let stop = AtomicBool::new(true);
    let path = directory.path();
    let stopped = import(path, None, cache.path(), &stop, &mut |_, _| {});
    assert!(matches!(stopped, Err(ImportError::Cancelled)));
}

#[cfg(unix)]
#[test]
fn the_hubs_own_cache_is_read_and_links_to_anywhere_else_are_not() {
    use std::os::unix::fs::symlink;
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--somebody--Small-1B");
    let (snapshot, blobs) = (model.join("snapshots/0123abcd"), model.join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(&blobs).unwrap();
    for (blob, file) in ["config.json", "model.safetensors"].iter().enumerate() {
        fs::copy(data("llama31").join(file), blobs.join(blob.to_string())).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(file)).unwrap();
    }
    let read = write(&snapshot, None).unwrap();
    let name = read.gguf().str("general.name").unwrap();
    assert_eq!(name, Some("Small-1B"));
    let here = place(&snapshot, None, cache.path()).unwrap();
    assert!(here.ends_with("Small-1B.gguf"), "{}", here.display());

    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "README.md",
    ] {
        let directory = copy("text-qwen2");
        let path = directory.path().join(file);
        let _ = fs::remove_file(&path);
        symlink(data("README.md"), &path).unwrap();
        let refused = write(directory.path(), None);
        assert!(
            matches!(&refused, Err(ImportError::Outside(named)) if named == file),
            "{file}: {refused:?}"
        );
    }
    // A pipe without a writer does not block.
    let directory = copy("llama31");
    let path = directory.path().join("model.safetensors");
    fs::remove_file(&path).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.unwrap().success());
    let refused = write(directory.path(), None);
    assert!(matches!(refused, Err(ImportError::NoFile { .. })));
}

#[test]
fn a_cancelled_import_leaves_no_files() {
    let made = tempfile::tempdir().unwrap();
    let target = made.path().join("model.gguf");
    let directory = Directory::open(&data("llama31")).unwrap();
    let stop = AtomicBool::new(true);
    let stopped = directory.write(None, &target, &stop, &mut |_, _| {});
    assert!(matches!(stopped, Err(ImportError::Cancelled)));
    assert_eq!(fs::read_dir(made.path()).unwrap().count(), 0);
}

#[test]
fn older_configurations_give_the_same_model() {
    // As written by transformers 4: RoPE's base is outside the scaling.
    let directory = copy("llama31");
    edit(directory.path(), "config.json", |config| {
        let mut rope = config["rope_parameters"].take();
        config["rope_theta"] = rope["rope_theta"].take();
        rope.as_object_mut().unwrap().remove("rope_theta");
        config["rope_scaling"] = rope;
        config.as_object_mut().unwrap().remove("rope_parameters");
        config["torch_dtype"] = json!("bfloat16");
    });
    assert_same_model(directory.path(), "llama31");

    // As written by programs of NVIDIA, and with names of blocks as by newer `transformers`.
    let directory = copy("nemotronh");
    edit(directory.path(), "config.json", |config| {
        let config = config.as_object_mut().unwrap();
        config.remove("hybrid_override_pattern");
        let kinds = "mamba mlp attention mlp linear_attention mamba";
        let kinds: Vec<&str> = kinds.split(' ').collect();
        config.insert("layers_block_type".to_owned(), json!(kinds));
        let width = config.remove("head_dim").unwrap();
        config.insert("attention_head_dim".to_owned(), width);
    });
    let path = directory.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace(r#"{"__float__":"Infinity"}"#, "Infinity");
    assert!(text.contains(",Infinity]"), "{text}");
    fs::write(&path, text).unwrap();
    assert_same_model(directory.path(), "nemotronh");

    let directory = copy("phi3long");
    edit(directory.path(), "config.json", |config| {
        let rope = config["rope_parameters"].take();
        config["rope_theta"] = rope["rope_theta"].clone();
        config["rope_scaling"] = json!({
            "type": "su", "long_factor": rope["long_factor"], "short_factor": rope["short_factor"],
        });
    });
    let old = write(directory.path(), None).unwrap();
    assert_eq!(old.spec(), write(&data("phi3long"), None).unwrap().spec());

    // As LFM2 was published first.
    let directory = copy("lfm2");
    edit(directory.path(), "config.json", |config| {
        let rope = config["rope_parameters"].take();
        let map = config.as_object_mut().unwrap();
        for key in ["rope_parameters", "layer_types", "intermediate_size"] {
            map.remove(key);
        }
        map.remove("tie_word_embeddings");
        config["block_ff_dim"] = json!(90);
        config["full_attn_idxs"] = json!([1, 4]);
        config["rope_theta"] = rope["rope_theta"].clone();
        config["tie_embedding"] = json!(true);
        config["use_pos_enc"] = json!(true);
    });
    assert_same_model(directory.path(), "lfm2");
}

#[test]
fn a_text_beside_a_vision_tower_is_the_same_model() {
    // With default sizes.
    assert_tower_is_left_out("gemma3", "vision_tower.x.weight", |mut text| {
        let rope = text["rope_parameters"].take();
        text["rope_theta"] = rope["full_attention"]["rope_theta"].clone();
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"].clone();
        text["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
        text.as_object_mut().unwrap().remove("rms_norm_eps");
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text, "vision_config": {"hidden_size": 1}, "mm_tokens_per_image": 256,
        })
    });
    // As Mistral Small 3.1 and Ministral 3 are published.
    assert_tower_is_left_out("mistral3", "multi_modal_projector.x.weight", |text| {
        json!({
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "image_token_index": 10, "spatial_merge_size": 2, "projector_hidden_act": "gelu",
            "text_config": text, "vision_config": {"hidden_size": 1}, "vision_feature_layer": -1,
        })
    });
}

/// Puts a model beside a vision tower with the tensor `tower`; `whole` makes the configuration from
/// that of the text.
fn assert_tower_is_left_out(name: &str, tower: &str, whole: impl FnOnce(Json) -> Json) {
    let directory = copy(name);
    edit(directory.path(), "config.json", |config| {
        let mut text = config.take();
        text.as_object_mut().unwrap().remove("architectures");
        *config = whole(text);
    });
    change_parts(directory.path(), |parts| {
        let renamed = std::mem::take(parts).into_iter();
        let renamed = renamed.map(|(name, part)| (format!("language_model.{name}"), part));
        parts.extend(renamed);
        parts.insert(tower.to_owned(), ("F16".to_owned(), vec![1], vec![0, 0]));
    });
    assert_same_model(directory.path(), name);
}

#[test]
fn blocks_for_multi_token_prediction_are_left_out() {
    let directory = copy("glm4moe");
    // As GLM-4.5 is published: a block more than the model has layers.
    change_parts(directory.path(), |parts| {
        let last = parts.iter().filter(|(name, _)| name.contains(".layers.2."));
        let mut more: Parts = last
            .map(|(name, part)| (name.replace(".layers.2.", ".layers.3."), part.clone()))
            .collect();
        let half = ("F16".to_owned(), vec![1], vec![0, 0]);
        more.insert("model.layers.3.eh_proj.weight".to_owned(), half);
        parts.extend(more);
    });
    assert_same_model(directory.path(), "glm4moe");
    edit(directory.path(), "config.json", |config| {
        config["num_nextn_predict_layers"] = json!(0);
    });
    let foreign = write(directory.path(), None).unwrap_err();
    assert_matches!(foreign, ImportError::ForeignTensor { .. });
}

#[test]
fn experts_whose_codes_and_scales_do_not_fit_are_refused() {
    let changed = |change: &dyn Fn(&mut Parts)| refused("types-mxfp4", change);
    let name = |end: &str| format!("model.layers.0.mlp.experts.down_proj_{end}");
    let missing = changed(&|parts| drop(parts.remove(&name("scales"))));
    let expected = format!("tensor {:?} is missing", name("scales"));
    assert!(missing.to_string().starts_with(&expected), "{missing}");
    let left = changed(&|parts| drop(parts.remove(&name("blocks"))));
    assert!(matches!(left, ImportError::MissingTensor { .. }), "{left}");
    let shape = changed(&|parts| parts.get_mut(&name("scales")).unwrap().1.swap(0, 1));
    assert!(matches!(shape, ImportError::Shape { .. }), "{shape}");
    let dtype = changed(&|parts| parts.get_mut(&name("blocks")).unwrap().0 = "I8".to_owned());
    assert!(matches!(dtype, ImportError::Dtype { .. }), "{dtype}");
}

#[test]
fn keys_that_could_change_the_arithmetic_are_refused_by_name() {
    let rope = |kind: &str| json!({"rope_type": kind, "rope_theta": 1e4, "factor": 2.0});
    let yarn = |truncate: Json| {
        json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
            "original_max_position_embeddings": 64, "truncate": truncate})
    };
    let grown = |key: &str, value: Json| {
        let mut rope = yarn(Json::Null);
        for (key, value) in [
            ("mscale", json!(1.0)),
            ("mscale_all_dim", json!(1.0)),
            ("llama_4_scaling_beta", json!(0.1)),
        ] {
            rope[key] = value;
        }
        rope[key] = value;
        rope
    };
    let mut rows: Vec<(&str, &str, Json, &str)> = vec![
        ("qwen2", "rope_parameters", rope("dynamic"), "dynamic"),
        ("qwen2", "rope_parameters", rope("llama3"), "llama3"),
        ("mistral3", "rope_parameters", rope("default"), "YaRN"),
        (
            "mistral3",
            "rope_parameters",
            grown("mscale", json!(0.7)),
            "mscale = 0.7",
        ),
        (
            "mistral3",
            "rope_parameters",
            grown("llama_4_scaling_beta", Json::Null),
            "llama_4_scaling_beta",
        ),
        (
            "mistralyarn",
            "rope_parameters",
            grown("llama_4_scaling_beta", json!(0.1)),
            "this key is unknown for RoPE of the kind \"yarn\"",
        ),
        (
            "qwen3yarn",
            "rope_parameters",
            yarn(json!(false)),
            "truncate",
        ),
        ("gptoss", "rope_parameters", yarn(Json::Null), "truncate"),
    ];
    // Model, key, value, and a part of the error. (MXFP4 would have another meaning in models other
    // than gpt-oss.)
    let table = r#"
        qwen2 | architectures | ["Qwen9ForCausalLM"] | Qwen9ForCausalLM
        qwen2 | architectures | null | of no architecture
        qwen2 | model_type | "llama" | model_type
        qwen2 | hidden_act | "relu" | hidden_act
        qwen2 | use_sliding_window | true | use_sliding_window
        qwen2 | new_idea | 3 | new_idea
        qwen2 | rope_parameters | {"rope_type": "default", "factor": 2.0} | factor
        qwen2 | rope_parameters | {"rope_theta": "x"} | must be a number
        qwen2 | rope_parameters | 3 | must be an object
        qwen2 | partial_rotary_factor | 0.5 | partial_rotary_factor
        qwen2 | quantization_config | {"quant_method": "gptq"} | gptq
        mistral3 | quantization_config | {"quant_method": "fp8", "weight_block_size": [128, 128]} | fp8
        mistral3 | text_config | {"quantization_config": {"quant_method": "awq"}} | awq
        mixtral | quantization_config | {"quant_method": "mxfp4"} | mxfp4
        mistral3 | sliding_window | 64 | sliding_window
        gptoss | swiglu_limit | 9.0 | swiglu_limit
        gptoss | swiglu_alpha | 1.0 | swiglu_alpha
        gptoss | layer_types | ["full_attention", "sliding_attention"] | layer_types
        minicpm3 | scale_emb | 1 | scale_emb
        minicpm3 | scale_depth | null | scale_depth
        minicpm3 | dim_model_base | 512 | dim_model_base
        minicpm3 | v_head_dim | 16 | v_head_dim
        minicpm3 | max_position_embeddings | 512 | original_max
        minicpm3 | rope_parameters | {"rope_theta": 5e5} | rope_theta
        qwen2 | layer_types | ["full_attention", "sliding_attention"] | layer_types
        qwen3 | attention_bias | true | attention_bias
        qwen3moe | norm_topk_prob | false | norm_topk_prob
        qwen3moe | mlp_only_layers | [0] | mlp_only_layers
        qwen3moe | decoder_sparse_step | 2 | decoder_sparse_step
        olmoe | norm_topk_prob | true | norm_topk_prob
        olmoe | clip_qkv | 8.0 | clip_qkv
        smollm3 | no_rope_layers | [1, 1, 0, 1] | no_rope_layers
        smollm3 | no_rope_layer_interval | 3 | no_rope_layer_interval
        gemma2 | query_pre_attn_scalar | 32 | query_pre_attn_scalar
        gemma3 | _sliding_window_pattern | 4 | _sliding_window_pattern
        gemma4 | attention_k_eq_v | false | attention_k_eq_v
        lfm2 | conv_bias | true | conv_bias
        lfm2 | layer_types | ["conv", "sliding_attention", "conv", "conv", "conv"] | layer_types
        lfm2 | layer_types | ["conv", "full_attention"] | for each layer
        lfm2 | layer_types | null | layer_types
        lfm2 | num_key_value_heads | 0 | head_count_kv
        lfm2 | conv_L_cache | 1 | between 2 and 64
        lfm2 | block_multiple_of | 0 | feed_forward_length
        lfm2moe | use_expert_bias | false | use_expert_bias
        lfm2moe | norm_topk_prob | false | norm_topk_prob
        lfm2moe | routed_scaling_factor | 2.5 | routed_scaling_factor
        gemma4 | use_bidirectional_attention | "all" | use_bidirectional_attention
        gemma4 | per_layer_config | {"1": {"sliding_window": 3}} | sliding_window
        gemma4ple | vocab_size_per_layer_input | 63 | vocab_size_per_layer_input
        gemma4ple | num_kv_shared_layers | 6 | shared_kv_layers
        gemma3 | attn_logit_softcapping | 30.0 | attn_logit_softcapping
        granitehybrid | position_embedding_type | "rope" | position_embedding_type
        granitehybrid | layer_types | ["mamba", "mamba", "attention"] | layer_types
        granitehybrid | layer_types | ["mamba", "mamba", "attention", "mlp"] | layer_types
        granitehybrid | mamba_d_head | 8 | mamba_d_head
        granitehybrid | mamba_conv_bias | false | mamba_conv_bias
        granitehybrid | time_step_limit | [0.001, 1.0] | time_step_limit
        nemotronh | hybrid_override_pattern | "M-*-ME" | hybrid_override_pattern
        nemotronh | mlp_hidden_act | "silu" | mlp_hidden_act
        nemotronh | use_bias | true | use_bias
        nemotronhmoe | moe_latent_size | 16 | moe_latent_size
        nemotronhmoe | hybrid_override_pattern | "MEM*-" | hybrid_override_pattern
        phi3 | tie_word_embeddings | "yes" | tie_word_embeddings
        phi3long | rope_parameters | {"type": "longrope", "long_factor": [1.0]} | short_factor
    "#;
    rows.extend(table.trim().lines().map(|row| {
        let cells: Vec<&str> = row.trim().split(" | ").collect();
        let [name, key, value, said] = cells[..] else {
            panic!("{row}");
        };
        (name, key, serde_json::from_str(value).unwrap(), said)
    }));
    for (name, key, value, said) in rows {
        let error = configured(name, key, value).unwrap_err().to_string();
        assert!(error.contains(said), "{name} {key}: {error}");
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}

#[test]
fn hyperparameters_and_tensors_at_odds_are_refused() {
    let shape = |key, value| configured("llama31", key, value).unwrap_err();
    for (key, value) in [
        ("vocab_size", json!(65)),
        ("hidden_size", json!(64)),
        ("intermediate_size", json!(32)),
        ("head_dim", json!(8)),
    ] {
        let error = shape(key, value);
        assert!(matches!(error, ImportError::Shape { .. }), "{key}: {error}");
    }
    assert_matches!(
        shape("num_hidden_layers", json!(3)),
        ImportError::MissingTensor { .. }
    );
    assert_matches!(
        shape("num_hidden_layers", json!(1)),
        ImportError::ForeignTensor { .. }
    );
    // Such numbers reserve no memory.
    for (key, value) in [
        ("num_hidden_layers", json!(1 << 24)),
        ("vocab_size", json!(u32::MAX)),
        ("num_attention_heads", json!(0)),
        ("hidden_size", json!(u64::MAX)),
        ("rms_norm_eps", json!(2.0)),
    ] {
        assert!(configured("llama31", key, value).is_err(), "{key}");
    }
    let experts = configured("mixtral", "num_local_experts", json!(1u64 << 31));
    assert!(experts.unwrap_err().to_string().contains("expert"));
    let missing = configured("llama31", "hidden_size", Json::Null).unwrap_err();
    assert!(matches!(missing, ImportError::MissingKey(key) if key == "hidden_size"));
    // With and without a separate output matrix.
    let none = configured("llama31", "tie_word_embeddings", json!(false)).unwrap_err();
    assert!(matches!(none, ImportError::MissingTensor(tensor) if tensor == "lm_head.weight"));
    let own = configured("qwen2", "tie_word_embeddings", json!(true)).unwrap_err();
    assert!(matches!(own, ImportError::NotTied { .. }));
}

#[test]
fn tensors_with_wrong_shapes_or_types_are_refused() {
    let changed = |change: &dyn Fn(&mut Parts)| refused("llama31", change);
    let norm = "model.norm.weight";
    let dtype = changed(&|parts| parts.get_mut(norm).unwrap().0 = "I16".to_owned());
    assert!(matches!(dtype, ImportError::Dtype { .. }), "{dtype}");
    let missing = changed(&|parts| drop(parts.remove(norm)));
    assert!(matches!(missing, ImportError::MissingTensor { .. }));
    let foreign = changed(&|parts| {
        let bias = "model.layers.1.self_attn.q_proj.bias".to_owned();
        parts.insert(bias, ("F16".to_owned(), vec![64], vec![0; 128]));
    });
    assert_matches!(foreign, ImportError::ForeignTensor { .. });
}

#[test]
fn damaged_weights_are_refused_with_specific_messages() {
    let directory = copy("llama31");
    let path = directory.path().join("model.safetensors");
    let good = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        write(directory.path(), None).unwrap_err()
    };
    let lying = |length: u64| [&length.to_le_bytes()[..], &good[8..]].concat();
    for (bytes, says) in [
        (good[..good.len() / 2].to_vec(), "is cut off: it should"),
        (good[..5].to_vec(), "is cut off: it should"),
        (
            [&good[..], b"x"].concat(),
            "there are unexpected bytes after its tensors",
        ),
        (lying(good.len() as u64), "says that its header has"),
        (lying(u64::MAX), "says that its header has"),
        (lying(1 << 60), "says that its header has"),
        (lying(1 << 30), "says that its header has"),
    ] {
        let error = refused(&bytes).to_string();
        assert!(error.contains(says), "{error}");
    }
    let two = |a: [u64; 2], b: [u64; 2], shape: Json| {
        let header = json!({
            "a": {"dtype": "F16", "shape": shape, "data_offsets": a},
            "b": {"dtype": "F16", "shape": [2], "data_offsets": b},
        });
        refused(&safetensors(&header, &[0; 16]))
    };
    for error in [
        refused(&safetensors(&json!([1]), &[])),
        refused(&[&3u64.to_le_bytes()[..], b"\xff{}"].concat()),
        // Overlapping, with a gap, backwards, of another size, overflowing.
        two([0, 4], [2, 6], json!([2])),
        two([0, 4], [6, 10], json!([2])),
        two([4, 0], [4, 8], json!([2])),
        two([0, 4], [4, 8], json!([3])),
        two([0, 4], [4, 8], json!([1u64 << 40, 1u64 << 40])),
    ] {
        let says = "is not a valid safetensors file";
        assert!(error.to_string().contains(says), "{error}");
    }
    fs::remove_file(&path).unwrap();
    let none = write(directory.path(), None).unwrap_err();
    assert!(matches!(none, ImportError::NoWeights(_)));
}

#[test]
fn a_git_lfs_pointer_is_recognised() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let directory = copy("text-qwen2");
        fs::write(directory.path().join(name), pointer).unwrap();
        let error = write(directory.path(), None).unwrap_err();
        assert_matches!(&error, ImportError::Pointer(file) if file == name);
    }
}

#[test]
fn duplicate_rope_settings_must_agree() {
    let rope = &configured("llama31", "x", Json::Null).unwrap();
    let rope = rope.spec().rope;
    let config = fs::read(data("llama31").join("config.json")).unwrap();
    let config: Json = serde_json::from_slice(&config).unwrap();
    let mut old = config["rope_parameters"].clone();
    let same = configured("llama31", "rope_scaling", old.clone()).unwrap();
    assert_eq!(same.spec().rope, rope);
    // As in older files.
    let map = old.as_object_mut().unwrap();
    map.remove("rope_theta");
    let kind = map.remove("rope_type").unwrap();
    map.insert("type".to_owned(), kind);
    let same = configured("llama31", "rope_scaling", old.clone()).unwrap();
    assert_eq!(same.spec().rope, rope);
    old["factor"] = json!(3.0);
    for other in [
        old,
        json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        json!({"rope_type": "default"}),
    ] {
        let error = configured("llama31", "rope_scaling", other).unwrap_err();
        assert!(
            error.to_string().contains("differs from rope_parameters"),
            "{error}"
        );
    }
}

#[test]
fn an_index_at_odds_with_its_shards_is_refused() {
    let with = |change: &dyn Fn(&Path)| {
        let directory = copy("llama31");
        split(directory.path());
        change(directory.path());
        write(directory.path(), None).unwrap_err()
    };
    let index = "model.safetensors.index.json";
    let missing = with(&|d| fs::remove_file(d.join(shard(1))).unwrap());
    assert!(matches!(missing, ImportError::MissingShard(file) if file == shard(1)));
    let cut = with(&|d| {
        let bytes = fs::read(d.join(shard(0))).unwrap();
        fs::write(d.join(shard(0)), &bytes[..bytes.len() - 1]).unwrap();
    });
    let nowhere = with(&|d| edit(d, index, |json| json["weight_map"]["x"] = json!(shard(0))));
    let unnamed = with(&|d| {
        edit(d, index, |json| {
            let map = json["weight_map"].as_object_mut().unwrap();
            map.remove("model.norm.weight");
        });
    });
    let names = "which model.safetensors.index.json does not assign to it";
    let says = format!("holds tensor \"model.norm.weight\", {names}");
    assert!(unnamed.to_string().contains(&says), "{unnamed}");
    for (error, says) in [
        (cut, format!("{:?} is cut off", shard(0))),
        (nowhere, format!("tensor \"x\" is not in {:?}", shard(0))),
    ] {
        assert!(error.to_string().starts_with(&says), "{error}");
    }
    let file = json!("../x.safetensors");
    let outside = with(&|d| edit(d, index, |json| json["weight_map"]["x"] = file.clone()));
    assert!(matches!(outside, ImportError::Index(_)));
    // Every file of the index would be opened.
    let many = with(&|d| {
        let map: BTreeMap<String, String> = (0..5000)
            .map(|i| (format!("x{i}"), format!("{i}.safetensors")))
            .collect();
        fs::write(d.join(index), json!({"weight_map": map}).to_string()).unwrap();
    });
    assert!(many.to_string().contains("names 5000 files"), "{many}");
    let none = with(&|d| fs::write(d.join(index), "{}").unwrap());
    assert!(matches!(none, ImportError::Index(_)));
}

#[test]
fn tokenizers_that_are_not_known_are_refused() {
    // Where in the file, the new value, and a part of the error.
    for (place, value, said) in rows! {
        "/model/type", json!("Unigram") => "byte pair encoding";
        "/model/byte_fallback", json!(true) => "tokenizer.model";
        "/normalizer", json!({"type": "Lowercase"}) => "normalizer";
        "/pre_tokenizer", json!({"type": "Whitespace"}) => "pre_tokenizer";
        "/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("(a*)*b") => "pre_tokenizer";
        "/model/vocab/zz", json!(5000) => "beyond the vocabulary";
        "/model/merges", json!([["a"]]) => "merges";
    } {
        let directory = copy("text-qwen2");
        edit(directory.path(), "tokenizer.json", |tokenizer| {
            let (parent, key) = place.rsplit_once('/').unwrap();
            tokenizer.pointer_mut(parent).unwrap()[key] = value;
        });
        let error = write(directory.path(), None).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    let directory = copy("text-llama");
    fs::write(directory.path().join("tokenizer.model"), "?").unwrap();
    let error = write(directory.path(), None).unwrap_err();
    assert!(matches!(error, ImportError::Tokenizer { .. }), "{error}");
}

#[test]
fn the_pooling_of_a_sentence_transformer_is_kept_and_other_steps_are_refused() {
    let read = |modules: &str, pooling: &str| {
        let folder = copy("qwen3");
        fs::write(folder.path().join("modules.json"), modules).unwrap();
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        fs::write(folder.path().join("1_Pooling/config.json"), pooling).unwrap();
        let written = write(folder.path(), None);
        written.map(|file| file.pooling())
    };
    let step = |class: &str, path: &str| {
        format!(
            r#"{{"idx": 0, "name": "0", "path": "{path}", "type": "sentence_transformers.models.{class}"}}"#
        )
    };
    let modules = |more: &str| {
        format!(
            "[{},{}{more}]",
            step("Transformer", ""),
            step("Pooling", "1_Pooling")
        )
    };
    let normalised = modules(&format!(",{}", step("Normalize", "2_Normalize")));
    for (config, expected) in [
        (
            r#"{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#,
            Pooling::Last,
        ),
        (r#"{"pooling_mode_cls_token": true}"#, Pooling::First),
        (r#"{"pooling_mode": "mean"}"#, Pooling::Mean),
    ] {
        assert_eq!(read(&normalised, config).unwrap(), expected, "{config}");
    }
    let last = r#"{"pooling_mode_lasttoken": true}"#;
    let dense = modules(&format!(",{}", step("Dense", "2_Dense")));
    for (modules, config, why) in rows! {
        &*dense, last => "models.Dense";
        &normalised, r#"{"pooling_mode_max_tokens": true}"# => "not supported";
        &normalised, r#"{"pooling_mode": "mean", "pooling_mode_cls_token": true}"#
            => "not supported";
        &format!("[{}]", step("Pooling", "../1_Pooling")), last => "not a folder";
        &format!("[{}]", step("Pooling", "3_Pooling")), last => "missing";
        "{}", last => "cannot be read";
    } {
        let text = read(modules, config).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    }
}
