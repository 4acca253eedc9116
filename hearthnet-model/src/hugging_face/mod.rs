//! Hugging Face model directories: `config.json`, safetensors and a tokenizer, as a model file.
//!
//! A directory becomes a GGUF file with the tensors, names, types and metadata that llama.cpp's
//! own converter gives for it, as it is or with its weights quantised on the way; from there on it
//! is a model file like any other, and its identity is that of the file. So everything that knows
//! model files knows directories, and nothing is computed in two ways.
//!
//! What is known of a class of models is data (`classes`). What is not known (a class, a key of
//! `config.json`, a kind of RoPE, a tensor, a pre-tokeniser) is a clear error and never a guess.
//!
//! The files are hostile: lengths, shapes and places are checked before they are used, and
//! weights are read and written a megabyte at a time, so a directory of any size takes little
//! memory.

mod classes;
mod config;
mod error;
mod rope;
mod sentencepiece;
mod shards;
mod tensors;
mod vocabulary;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value as Json};
use sha2::{Digest as _, Sha256};

pub use error::ImportError;

use crate::atomic_file::{self, lock};
use crate::convert::file_type;
use crate::error::FileError;
use crate::families::{Family, OUTPUT};
use crate::gguf::writer::{WriteError, Writer};
use crate::gguf::{Gguf, TensorType, Value};
use crate::manifest::stamp;
use crate::model_file::ModelFile;
use crate::regular_file;
use config::Config;
use shards::Shards;
use tensors::{Finder, Planned};

/// How a file begins that Git has left for Git LFS to fetch. (As the length of a safetensors
/// header its first eight bytes are beyond any file.)
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
const CONFIG: &str = "config.json";
const MAX_CONFIG_BYTES: u64 = 1 << 20;
const MAX_CARD_BYTES: u64 = 4 << 20;
/// Part of the name of what is kept: another number where the same directory gives another file.
const FORMAT: &str = "hearthnet-import-1";

/// A directory whose hyperparameters and tensors have been checked, down to the last shape.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    config: Config,
    shards: Shards,
    tensors: Vec<Planned>,
}

impl Directory {
    /// Reads `config.json` and the headers of the weights.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let none = || format!("{} is no model: it has no config.json", path.display());
        let config = read(path, CONFIG, MAX_CONFIG_BYTES)?;
        let config = Config::parse(&config.ok_or_else(|| ImportError::Unsound(none()))?)?;
        let shards = Shards::open(path)?;
        let finder = Finder::new(&shards, config.class)?;
        let computed = &config.rope.tensors;
        let names = computed.iter().map(|(name, _)| *name);
        let (family, spec) = {
            let gguf = probe(&config, &finder, names)?;
            let family = Family::of(&gguf)?;
            (family, family.spec(&gguf)?)
        };
        config.check_layers(&spec)?;
        finder.check_output(&config)?;
        let tensors = finder.plan(family, &spec, computed)?;
        Ok(Self {
            path: path.to_owned(),
            config,
            shards,
            tensors,
        })
    }

    /// Writes the model file, with the weights as they are, or as [`crate::convert::convert`]
    /// would store them as `dtype`. It appears under its name when it is complete and on disk.
    ///
    /// `progress` gets the source bytes done and in all, every few milliseconds; setting `cancel`
    /// ends the work soon after.
    ///
    /// # Errors
    /// See [`ImportError`]. Nothing is left behind.
    pub fn write(
        mut self,
        dtype: Option<TensorType>,
        target: &Path,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), ImportError> {
        if let Some(dtype) = dtype {
            if !TensorType::WRITABLE.contains(&dtype) {
                return Err(ImportError::Target(dtype));
            }
            self.tensors
                .iter_mut()
                .for_each(|tensor| tensor.quantize(dtype));
        }
        let writer = self.header(dtype)?;
        let failed = |source| FileError::new("write", target, source);
        let mut file = atomic_file::create(target).map_err(failed)?;
        let total = self.tensors.iter().map(Planned::source_bytes).sum();
        let mut done = 0;
        let written: Result<(), ImportError> = writer.write(&mut file, |index, out| {
            let Some(tensor) = self.tensors.get(index) else {
                return Ok(());
            };
            tensor.write(&self.shards, out, cancel, &mut |bytes| {
                done += bytes;
                progress(done, total);
            })
        });
        let finished = written.and_then(|()| {
            atomic_file::finish(file, target).map_err(|error| WriteError::Io(error).into())
        });
        finished.map_err(|error| match error {
            ImportError::Write(WriteError::Io(source)) => failed(source).into(),
            other => other,
        })
    }

    /// Everything before the tensors' data.
    fn header(&self, dtype: Option<TensorType>) -> Result<Writer, ImportError> {
        let mut writer = Writer::new();
        self.config.write(&mut writer)?;
        writer.set("general.type", Value::String("model"))?;
        writer.set(
            "general.name",
            Value::String(&name_of(&self.path.canonicalize().unwrap_or_default())),
        )?;
        if let Some(license) = self.license()? {
            writer.set("general.license", Value::String(&license))?;
        }
        let matrices = self.tensors.iter().filter(|tensor| tensor.dims.len() > 1);
        let most = matrices
            .map(|tensor| tensor.base)
            .min_by_key(|base| *base == TensorType::F32);
        let most = dtype.or(most).unwrap_or(TensorType::F32);
        writer.set("general.file_type", Value::U32(file_type(most)))?;
        writer.set("general.quantization_version", Value::U32(2))?;
        vocabulary::write_recommended(&self.path, &mut writer)?;
        vocabulary::write(&self.path, &self.config, &mut writer)?;
        for tensor in &self.tensors {
            tensor.add_to(&mut writer)?;
        }
        Ok(writer)
    }

    /// The licence that the model card names.
    fn license(&self) -> Result<Option<String>, ImportError> {
        let Some(bytes) = read(&self.path, "README.md", MAX_CARD_BYTES)? else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines();
        if lines.next() != Some("---") {
            return Ok(None);
        }
        let front = lines.take_while(|line| *line != "---");
        let named = front
            .filter_map(|line| line.strip_prefix("license:"))
            .next();
        let named = named.map(|name| name.trim().trim_matches(['"', '\'']).to_owned());
        Ok(named.filter(|name| !name.is_empty()))
    }
}

/// A file of the same metadata, and with the names that decide of what kind the model is, so that
/// the family reads its hyperparameters as it does from a model file.
fn probe<'a>(
    config: &Config,
    finder: &Finder<'_>,
    computed: impl Iterator<Item = &'a str>,
) -> Result<Gguf, ImportError> {
    let mut writer = Writer::new();
    config.write(&mut writer)?;
    if !config.class.vocab_size {
        let key = format!("{}.vocab_size", config.class.architecture);
        writer.set(&key, Value::U32(config.vocab()?))?;
    }
    let bias = "blk.0.attn_q.bias";
    let names = computed
        .chain(Some(OUTPUT).filter(|_| finder.has_output()))
        .chain(Some(bias).filter(|_| finder.has(bias)));
    let mut count = 0;
    for name in names {
        writer.tensor(name, &[1], TensorType::I8)?;
        count += 1;
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes, |_, out| {
        out.write_all(&[0]).map_err(WriteError::Io)
    })?;
    debug_assert!(count <= 4);
    Gguf::from_bytes(bytes).map_err(|error| ImportError::Model(error.into()))
}

/// The model file of a directory below `cache`, written now if it is not there: named by what lies
/// in the directory, so that a directory that has changed is another file. It tells `progress` as
/// [`Directory::write`] does.
///
/// # Errors
/// See [`ImportError`].
pub fn import(
    path: &Path,
    dtype: Option<TensorType>,
    cache: &Path,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, ImportError> {
    let target = place(path, dtype, cache)?;
    // A file of this name was complete when it got it; one that is broken by now is made again.
    if ModelFile::open(&target).is_ok() {
        return Ok(target);
    }
    let directory = Directory::open(path)?;
    let parent = target.parent().unwrap_or(cache);
    fs::create_dir_all(parent).map_err(|e| FileError::new("create", parent, e))?;
    let lock = lock(parent, || !cancel.load(Ordering::Relaxed))?;
    let _lock = lock.ok_or(ImportError::Cancelled)?;
    // Who had the lock before may have made it.
    if ModelFile::open(&target).is_err() {
        clean(parent);
        directory.write(dtype, &target, cancel, progress)?;
    }
    Ok(target)
}

/// Removes what was left by a process that was killed while it wrote.
fn clean(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|e| e == "part") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The name of a model whose directory has this canonical path: that of the repository in the
/// cache of the hub's own programs (`models--OWNER--NAME/snapshots/REVISION`), else its last part.
fn name_of(path: &Path) -> String {
    let last = |path: &Path| Some(path.file_name()?.to_string_lossy().into_owned());
    let of_hub = path
        .parent()
        .filter(|snapshots| snapshots.ends_with("snapshots"))
        .and_then(|snapshots| last(snapshots.parent()?))
        .and_then(|model| {
            Some(
                model
                    .strip_prefix("models--")?
                    .rsplit_once("--")?
                    .1
                    .to_owned(),
            )
        });
    of_hub.or_else(|| last(path)).unwrap_or_default()
}

/// Where the model file of a directory lies below `cache`.
///
/// # Errors
/// When the directory cannot be read.
pub fn place(path: &Path, dtype: Option<TensorType>, cache: &Path) -> Result<PathBuf, ImportError> {
    let failed = |source| FileError::new("read", path, source);
    let path = path.canonicalize().map_err(failed)?;
    let mut hash = Sha256::new();
    hash.update(FORMAT);
    for name in files(&path)? {
        let stamp = stamp(&path.join(&name));
        hash.update(format!("\n{name:?} {stamp:?}").as_bytes());
    }
    let mut short = hex::encode(hash.finalize());
    short.truncate(16);
    let name = name_of(&path);
    let plain = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "._-".contains(c) => c,
        _ => '_',
    };
    let name: String = name.chars().map(plain).take(80).collect();
    // Neither hidden nor an option of a command.
    let name = match name.trim_start_matches(['.', '-']) {
        "" => "model",
        name => name,
    };
    let name = match dtype {
        Some(dtype) => format!("{name}-{dtype}.gguf"),
        None => format!("{name}.gguf"),
    };
    Ok(cache.join("dir").join(short).join(name))
}

/// Names of the files that a model is made of, of which some may not be there.
fn files(path: &Path) -> Result<Vec<String>, ImportError> {
    let mut names = Shards::names(path)?;
    names.extend(
        [
            CONFIG,
            "generation_config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
            "README.md",
        ]
        .map(str::to_owned),
    );
    Ok(names)
}

/// A file of the directory, if it is there.
///
/// It may be a link, but only to a file in the directory or, where that lies in the cache of the
/// hub's own programs, which consists of links, to one of that cache.
fn open(directory: &Path, name: &str) -> Result<Option<(PathBuf, File)>, ImportError> {
    let path = directory.join(name);
    let failed = |source| FileError::new("read", &path, source);
    let (directory, place) = match (directory.canonicalize(), path.canonicalize()) {
        (Ok(directory), Ok(place)) => (directory, place),
        (Err(e), _) | (_, Err(e)) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        (Err(e), _) | (_, Err(e)) => return Err(failed(e).into()),
    };
    let snapshots = directory.ancestors().find(|a| a.ends_with("snapshots"));
    let blobs = snapshots.map(|snapshots| snapshots.with_file_name("blobs"));
    if !place.starts_with(&directory) && !blobs.is_some_and(|blobs| place.starts_with(blobs)) {
        return Err(ImportError::Outside(name.to_owned()));
    }
    if !place.is_file() {
        return Err(ImportError::NoFile(name.to_owned()));
    }
    let file = regular_file::open(&place).map_err(failed)?;
    Ok(Some((path, file)))
}

/// All of a file of the directory that is not longer than `limit`, if it is there.
fn read(directory: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ImportError> {
    let Some((path, file)) = open(directory, name)? else {
        return Ok(None);
    };
    let failed = |source| FileError::new("read", &path, source);
    let bytes = file.metadata().map_err(failed)?.len();
    let too_long = |bytes| {
        ImportError::Unsound(format!(
            "{name} has {bytes} bytes; at most {limit} are read"
        ))
    };
    if bytes > limit {
        return Err(too_long(bytes));
    }
    let mut content = Vec::new();
    // It may grow meanwhile.
    file.take(limit + 1)
        .read_to_end(&mut content)
        .map_err(failed)?;
    match content.len() as u64 {
        found if found > limit => Err(too_long(found)),
        _ if content.starts_with(LFS_POINTER) => Err(ImportError::Pointer(name.to_owned())),
        _ => Ok(Some(content)),
    }
}

/// A JSON object, if the file is there.
fn read_json(
    directory: &Path,
    name: &str,
    limit: u64,
) -> Result<Option<Map<String, Json>>, ImportError> {
    let text = read(directory, name, limit)?;
    text.map(|text| config::object(name, &text)).transpose()
}

/// Reads bytes as `config.json`, for the fuzzer.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_config(bytes: &[u8]) -> Result<(), ImportError> {
    let config = Config::parse(bytes)?;
    config.write(&mut Writer::new())
}

/// Reads bytes as a safetensors file and as a SentencePiece vocabulary, for the fuzzer; false when
/// something was accepted that does not lie in them.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_binary(bytes: &[u8]) -> bool {
    let pieces = sentencepiece::pieces(bytes).is_ok_and(|pieces| pieces.len() > bytes.len());
    shards::check(bytes) && !pieces
}

/// Reads bytes as the JSON files of a tokenizer, for the fuzzer.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_tokenizer(bytes: &[u8]) -> Result<(), ImportError> {
    vocabulary::check(bytes)
}
