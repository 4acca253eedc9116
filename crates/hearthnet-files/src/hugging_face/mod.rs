//! Import of Hugging Face model directories: `config.json`, safetensors and a tokenizer.
//!
//! A directory becomes a GGUF file with the tensors, names, types and metadata that llama.cpp's own
//! converter produces, optionally with quantised weights. The result is a model file like any
//! other, and its identity is that of the file. So all code for model files applies to directories,
//! and no computation exists twice.
//!
//! Model classes are described as data (`classes`). Anything unknown (a class, a key of
//! `config.json`, a kind of RoPE, a tensor, a pre-tokeniser) is an error and never a guess.
//!
//! The files are hostile: lengths, shapes and offsets are checked before use. Weights are read and
//! written a megabyte at a time, so a directory of any size needs little memory.

mod class;
mod class_base;
mod classes;
mod config;
mod delta;
mod directory;
mod encoder_classes;
mod error;
mod finder;
mod gemma4;
mod json;
mod lfm2;
mod mamba;
mod modules;
mod muse_glimmer;
mod names;
mod plan;
mod planned;
mod rope;
mod routed_classes;
mod sentencepiece;
mod shards;
mod tensors;
mod vocabulary;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_platform::whole_file;
use sha2::{Digest as _, Sha256};

pub(crate) use directory::LocalFile;
pub use directory::{Files, OpenFile};
pub use error::ImportError;
pub use tensors::Tensors;

use crate::convert::file_type;
use crate::error::FileError;
use crate::folder_lock::lock;
use crate::gguf::writer::{WriteError, Writer};
use crate::gguf::{TensorType, Value};
use crate::model_file::ModelFile;
use crate::stamp::stamp;
use directory::read;
use modules::{DENSE, DENSE_CONFIG, DENSE_WEIGHTS};
use plan::{CONFIG, Plan};
use planned::Planned;
use shards::Shards;

const MAX_CARD_BYTES: u64 = 4 << 20;
/// Part of the names of imported files. Change the number if the same directory gives another file.
const FORMAT: &str = "hearthnet-import-1";

/// Directory whose hyperparameters and tensor shapes have been checked.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    plan: Plan,
}

impl Directory {
    /// Reads `config.json` and the headers of the weights.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let plan = Plan::read(path, true)?;
        let path = path.to_owned();
        Ok(Self { path, plan })
    }

    /// Writes the model file, with the weights unchanged or stored as `dtype` as by
    /// [`crate::convert::convert`]. The file gets its name when it is complete and on disk.
    ///
    /// `progress` receives the source bytes done and the total, every few milliseconds. Setting
    /// `cancel` ends the work soon after.
    ///
    /// # Errors
    /// See [`ImportError`]. No file is left behind.
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
            self.plan
                .tensors
                .iter_mut()
                .for_each(|tensor| tensor.quantize(dtype));
        }
        let writer = self.header(dtype)?;
        let failed = |source| FileError::new("write", target, source);
        let mut file = whole_file::begin(target).map_err(failed)?;
        let total = self.plan.tensors.iter().map(Planned::source_bytes).sum();
        let mut done = 0;
        let written: Result<(), ImportError> = writer.write(&mut file, |index, out| {
            let Some(tensor) = self.plan.tensors.get(index) else {
                return Ok(());
            };
            tensor.write(&self.plan.shards, out, cancel, &mut |bytes| {
                done += bytes;
                progress(done, total);
            })
        });
        let finished = written.and_then(|()| {
            whole_file::finish(file, target).map_err(|error| WriteError::Io(error).into())
        });
        finished.map_err(|error| match error {
            ImportError::Write(WriteError::Io(source)) => failed(source).into(),
            other => other,
        })
    }

    /// Header of the file: everything before the tensors' data.
    fn header(&self, dtype: Option<TensorType>) -> Result<Writer, ImportError> {
        let mut writer = Writer::new();
        self.plan.config.write(&mut writer)?;
        self.plan.rope.write(&self.plan.config, &mut writer)?;
        let modules = &self.plan.modules;
        self.plan.config.write_modules(modules, &mut writer)?;
        writer.set("general.type", Value::String("model"))?;
        writer.set(
            "general.name",
            Value::String(&name_of(&self.path.canonicalize().unwrap_or_default())),
        )?;
        if let Some(license) = self.license()? {
            writer.set("general.license", Value::String(&license))?;
        }
        let matrices = self
            .plan
            .tensors
            .iter()
            .filter(|tensor| tensor.dims.len() > 1);
        let most = matrices
            .map(|tensor| tensor.base)
            .min_by_key(|base| *base == TensorType::F32);
        let most = dtype.or(most).unwrap_or(TensorType::F32);
        writer.set("general.file_type", Value::U32(file_type(most)))?;
        writer.set("general.quantization_version", Value::U32(2))?;
        vocabulary::write_recommended(&self.path, &mut writer)?;
        vocabulary::write(&self.path, &self.plan.config, &mut writer)?;
        for tensor in &self.plan.tensors {
            tensor.add_to(&mut writer)?;
        }
        Ok(writer)
    }

    /// Licence in the model card.
    fn license(&self) -> Result<Option<String>, ImportError> {
        let Some(bytes) = read(self.path.as_path(), "README.md", MAX_CARD_BYTES)? else {
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

/// Model file of a directory below `cache`, written if it is missing. Its name depends on the
/// directory's contents, so a changed directory gives another file. `progress` is used as in
/// [`Directory::write`].
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
    // A file of this name was complete when it was renamed; if it is broken now, it is written
    // again.
    if ModelFile::open(&target).is_ok() {
        return Ok(target);
    }
    let directory = Directory::open(path)?;
    let parent = target.parent().unwrap_or(cache);
    fs::create_dir_all(parent).map_err(|e| FileError::new("create", parent, e))?;
    let lock = lock(parent, || !cancel.load(Ordering::Relaxed))?;
    let _lock = lock.ok_or(ImportError::Cancelled)?;
    // The previous holder of the lock may have written it.
    if ModelFile::open(&target).is_err() {
        clean(parent);
        directory.write(dtype, &target, cancel, progress)?;
    }
    Ok(target)
}

/// Removes leftovers of a process that was killed while writing.
fn clean(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|e| e == "part") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Repository (`OWNER/NAME`) and revision of a canonical path in the cache of the hub's own programs:
/// `models--OWNER--NAME/snapshots/REVISION`.
pub fn repository_of(path: &Path) -> Option<(String, String)> {
    let snapshots = path.parent().filter(|path| path.ends_with("snapshots"))?;
    let model = last(snapshots.parent()?)?;
    let (owner, name) = model.strip_prefix("models--")?.split_once("--")?;
    Some((format!("{owner}/{name}"), last(path)?))
}

fn last(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// Name of the model for a canonical path: that of the repository in the cache of the hub's own
/// programs, else the last component.
fn name_of(path: &Path) -> String {
    let repository = repository_of(path);
    let of_hub = repository.and_then(|(name, _)| Some(name.rsplit_once('/')?.1.to_owned()));
    of_hub.or_else(|| last(path)).unwrap_or_default()
}

/// Path below `cache` of the model file of a directory.
///
/// # Errors
/// The directory cannot be read.
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
    // The name must be neither a hidden file nor a command option.
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

/// Names of the files of a model; some may not exist.
fn files(path: &Path) -> Result<Vec<String>, ImportError> {
    let others = "generation_config.json model.safetensors.index.json tokenizer.json \
        tokenizer_config.json tokenizer.model added_tokens.json chat_template.jinja \
        chat_template.json README.md modules.json 1_Pooling/config.json";
    let mut names = Shards::names(path)?;
    names.push(CONFIG.to_owned());
    names.extend(others.split(' ').map(str::to_owned));
    for (folder, _) in DENSE {
        let files = [DENSE_WEIGHTS, DENSE_CONFIG].map(|file| format!("{folder}/{file}"));
        // The names of other directories' imports do not change.
        names.extend(files.into_iter().filter(|file| path.join(file).exists()));
    }
    Ok(names)
}

/// Fuzzing: reads bytes as `config.json`.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_config(bytes: &[u8]) -> Result<(), ImportError> {
    let config = config::Config::parse(bytes)?;
    let mut writer = Writer::new();
    config.write(&mut writer)?;
    rope::Rope::read(&config)?.write(&config, &mut writer)
}

/// Fuzzing: reads bytes as a safetensors file. Returns false if an accepted tensor does not lie
/// within the bytes.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_weights(bytes: &[u8]) -> bool {
    shards::check(bytes)
}

/// Fuzzing: reads bytes as a SentencePiece vocabulary. Returns false if it has more pieces than bytes.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_pieces(bytes: &[u8]) -> bool {
    sentencepiece::pieces(bytes).map_or(true, |pieces| pieces.len() <= bytes.len())
}

/// Fuzzing: reads bytes as the JSON files of a tokenizer.
#[cfg(feature = "fuzzing")]
pub(crate) fn check_tokenizer(bytes: &[u8]) -> Result<(), ImportError> {
    vocabulary::check(bytes)
}
