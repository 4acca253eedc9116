//! Opens model files; checks and joins those of split models.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_platform::regular_file;

use super::error::GgufError;
use super::reader::{self, DEFAULT_ALIGNMENT, MAX_TENSORS, TensorInfo};
use super::split::{Joined, MAX_FILES, Place, files_of, split_name};
use super::value::Value;
use super::writer::Writer;
use super::{Data, Gguf};

/// Number of files.
pub(crate) const SPLIT_COUNT: &str = "split.count";
/// Number of a file, from 0.
const SPLIT_NO: &str = "split.no";
/// Tensors in all files.
const SPLIT_TENSORS: &str = "split.tensors.count";
const SPLIT_PREFIX: &str = "split.";

/// Longest metadata of a joined file, which is copied into memory. That of a model with 262,144
/// tokens takes some 10 MB.
const MAX_HEAD_BYTES: usize = 64 << 20;

impl Gguf {
    /// Maps a file and checks its header. Of a split model, `path` is the first file, and the others
    /// lie beside it.
    ///
    /// # Errors
    /// [`GgufError::Io`] if the file cannot be opened or mapped, [`GgufError::Split`] if the files of
    /// a split model do not belong together, any other variant if a file is not valid.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let first = Self::map_one(&open(path)?, path)?;
        let Some(paths) = paths_of(&first, path)? else {
            return Ok(first);
        };
        let mut files = vec![first];
        for path in paths.iter().skip(1) {
            let file = open(path).map_err(|error| missing(error, path, paths.len()))?;
            files.push(Self::map_one(&file, path)?);
        }
        Self::join(files, &paths)
    }

    /// Maps open files and checks their headers: the file of a model, or all files of a split one, in
    /// order. `path` is only used in error messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn map(files: &[File], path: &Path) -> Result<Self, GgufError> {
        let mut mapped = Vec::with_capacity(files.len());
        for file in files {
            mapped.push(Self::map_one(file, path)?);
        }
        match mapped.len() {
            1 => mapped.pop().ok_or_else(|| GgufError::Magic(Vec::new())),
            _ => {
                let names: Vec<PathBuf> = files.iter().map(|_| path.to_owned()).collect();
                Self::join(mapped, &names)
            }
        }
    }

    /// Joins the files of a split model, in order; `paths` are for messages.
    fn join(files: Vec<Self>, paths: &[PathBuf]) -> Result<Self, GgufError> {
        let names = paths.iter().map(|path| path.display().to_string());
        let joined = Joined::of(&files, &names.collect::<Vec<_>>())?;
        let header = reader::parse(joined.head(), joined.file_bytes())?;
        Ok(Self {
            data: Data::Joined(joined, files),
            header,
        })
    }

    /// Checks the files of a split model in memory, in order.
    ///
    /// # Errors
    /// Any variant but [`GgufError::Io`].
    pub fn from_files(files: Vec<Vec<u8>>) -> Result<Self, GgufError> {
        let names = (1..=files.len()).map(|number| PathBuf::from(format!("file {number}")));
        let names: Vec<PathBuf> = names.collect();
        let files: Result<Vec<Self>, GgufError> = files.into_iter().map(Self::from_bytes).collect();
        Self::join(files?, &names)
    }
}

fn open(path: &Path) -> Result<File, GgufError> {
    regular_file::open(path).map_err(|source| GgufError::Io {
        path: path.to_owned(),
        source,
    })
}

/// Paths of all files of a split model, of which `first` is open.
fn paths_of(first: &Gguf, path: &Path) -> Result<Option<Vec<PathBuf>>, GgufError> {
    let Some(count) = count_of(first)? else {
        return Ok(None);
    };
    let shown = path.display();
    match split_name(path) {
        Some(name) if name.number != 1 => Err(GgufError::Split(format!(
            "{shown} is file {} of {} of a model: name the first one, {}",
            name.number,
            name.count,
            name.of(1)
        ))),
        Some(name) if name.count == count => Ok(Some(files_of(path))),
        _ => Err(GgufError::Split(format!(
            "{shown} is one of the {count} files of a model, but its name is not that of the first: \
             give all of them their names back (NAME-00001-of-{count:05}.gguf, ...)"
        ))),
    }
}

/// Error for a file of a split model that cannot be opened.
fn missing(error: GgufError, path: &Path, count: usize) -> GgufError {
    match error {
        GgufError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            GgufError::Split(format!(
                "{} is missing: the model has {count} files, which must lie in one folder",
                path.display()
            ))
        }
        other => other,
    }
}

/// Number of files of the model that a file belongs to; `None` for a whole model.
fn count_of(file: &Gguf) -> Result<Option<u32>, GgufError> {
    let count = file.u32(SPLIT_COUNT).map_err(wrong)?;
    match count.filter(|count| *count > 1) {
        Some(count) if count > MAX_FILES => Err(GgufError::Split(format!(
            "the model has {count} files; at most {MAX_FILES} are read"
        ))),
        count => Ok(count),
    }
}

fn wrong(error: impl ToString) -> GgufError {
    GgufError::Split(error.to_string())
}

impl Joined {
    /// Joins the files of a model, in order. `names` are theirs, for messages. Of the files, only
    /// the heads are read.
    ///
    /// # Errors
    /// [`GgufError::Split`] if a file is not the one that its place requires.
    pub fn of(files: &[Gguf], names: &[String]) -> Result<Self, GgufError> {
        let [first, ..] = files else {
            return Err(wrong("the model has no files"));
        };
        let mut tensors = Vec::new();
        let mut seen = BTreeSet::new();
        for (index, (file, name)) in files.iter().zip(names).enumerate() {
            check_place(file, name, (index, files.len()))?;
            check_metadata(first, file, name)?;
            for info in file.tensors() {
                if !seen.insert(info.name.as_str()) {
                    return Err(wrong(format!(
                        "{name} holds tensor {:?}, which a file before it holds as well: one of them \
                         is a copy, or of another model",
                        info.name
                    )));
                }
                tensors.push((index, info));
            }
        }
        let stated = first.u32(SPLIT_TENSORS).map_err(wrong)?;
        if tensors.len() as u64 > MAX_TENSORS || stated.is_some_and(|n| n as usize != tensors.len())
        {
            let stated = stated.map_or_else(|| format!("at most {MAX_TENSORS}"), |n| n.to_string());
            return Err(wrong(format!(
                "the {} files of the model hold {} tensors together, where {SPLIT_TENSORS} says \
                 {stated}: one of them is of another model",
                files.len(),
                tensors.len()
            )));
        }
        Self::lay_out(first, &tensors)
    }

    fn lay_out(first: &Gguf, tensors: &[(usize, &TensorInfo)]) -> Result<Self, GgufError> {
        let size: usize = first
            .header
            .metadata
            .values()
            .map(|slot| slot.bytes.len())
            .sum();
        if size > MAX_HEAD_BYTES {
            return Err(wrong(format!(
                "the metadata has {size} bytes; at most {MAX_HEAD_BYTES} are read"
            )));
        }
        let mut writer = Writer::new();
        let alignment = first.alignment();
        if alignment != DEFAULT_ALIGNMENT {
            writer.align(alignment as u32).map_err(wrong)?;
        }
        for (key, value) in first.metadata() {
            if !key.starts_with(SPLIT_PREFIX) && key != "general.alignment" {
                writer.set(key, value).map_err(wrong)?;
            }
        }
        for (_, info) in tensors {
            writer
                .tensor(&info.name, &info.dims, info.dtype)
                .map_err(wrong)?;
        }
        let head = writer.head();
        let mut end = head.len() as u64;
        let mut places = Vec::with_capacity(tensors.len());
        for (file, info) in tensors {
            let start = end;
            places.push(Place {
                start,
                bytes: info.bytes,
                file: *file,
                offset: info.offset,
            });
            let next = start.checked_add(info.bytes);
            end = next
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| wrong("the files of the model are too large together"))?;
        }
        Ok(Self {
            head,
            file_bytes: end,
            places,
        })
    }
}

/// Checks that a file is the one of this index of so many.
fn check_place(file: &Gguf, name: &str, (index, count): (usize, usize)) -> Result<(), GgufError> {
    let is = |key: &str, value: usize| -> Result<bool, GgufError> {
        Ok(file
            .u32(key)
            .map_err(wrong)?
            .is_some_and(|found| found as usize == value))
    };
    if !is(SPLIT_COUNT, count)? {
        return Err(wrong(format!(
            "{name} is not one of {count} files of a model: its {SPLIT_COUNT} is {}",
            shown(file, SPLIT_COUNT)
        )));
    }
    if !is(SPLIT_NO, index)? {
        return Err(wrong(format!(
            "{name} is named as file {} of {count}, but its {SPLIT_NO} is {} instead of {index}: the \
             files were renamed or copied over one another",
            index + 1,
            shown(file, SPLIT_NO)
        )));
    }
    Ok(())
}

/// Checks that what a later file says of the model is what the first one says.
fn check_metadata(first: &Gguf, file: &Gguf, name: &str) -> Result<(), GgufError> {
    let differs = |(key, value): &(&str, Value<'_>)| {
        let own = key.starts_with(SPLIT_PREFIX) && *key != SPLIT_TENSORS;
        !own && *key != "general.alignment" && first.get(key).as_ref() != Some(value)
    };
    match file.metadata().find(differs) {
        None => Ok(()),
        Some((key, value)) => Err(wrong(format!(
            "{name} is of another model: its {key:?} is {value}, and that of the first file {}",
            shown(first, key)
        ))),
    }
}

fn shown(file: &Gguf, key: &str) -> String {
    file.get(key)
        .map_or_else(|| "missing".to_owned(), |value| value.to_string())
}
