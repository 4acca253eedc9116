//! Models that are split into several files, as `llama-gguf-split` of llama.cpp writes them.
//!
//! The files are named `NAME-00001-of-0000N.gguf` and lie in one folder. Each is a GGUF file with
//! some of the tensors and the keys `split.no` (from 0), `split.count` and `split.tensors.count`
//! (tensors of the whole model). All other metadata is in the first file.
//!
//! Joined, they have the head and the tensors of one file: the metadata of the first without
//! `split.*`, then all tensors in order. All other code sees that file, whose offsets are mapped to
//! the files that hold the bytes.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::reader::{DEFAULT_ALIGNMENT, MAX_TENSORS};
use super::writer::Writer;
use super::{Gguf, TensorInfo};

/// Number of files.
pub(crate) const SPLIT_COUNT: &str = "split.count";
/// Number of a file, from 0.
const SPLIT_NO: &str = "split.no";
/// Tensors in all files.
const SPLIT_TENSORS: &str = "split.tensors.count";
const SPLIT_PREFIX: &str = "split.";

/// The largest known models have some 200 files.
const MAX_FILES: u32 = 1 << 12;
/// Longest metadata of a joined file, which is copied into memory. That of a model with 262,144
/// tokens takes some 10 MB.
const MAX_HEAD_BYTES: usize = 64 << 20;

/// Name of one file of a split model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitName<'a> {
    /// Name of the model: what stands before `-00001-of-0000N.gguf`.
    pub stem: &'a str,
    /// Number of the file, from 1.
    pub number: u32,
    /// Number of files, at least 2.
    pub count: u32,
}

impl<'a> SplitName<'a> {
    /// Reads a file name; `None` for other names.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|c| c.is_ascii_digit());
        if !digits(number) || !digits(count) || stem.is_empty() {
            return None;
        }
        let (number, count) = (number.parse().ok()?, count.parse().ok()?);
        let sound = (2..=MAX_FILES).contains(&count) && (1..=count).contains(&number);
        sound.then_some(Self {
            stem,
            number,
            count,
        })
    }

    /// Name of another file of the same model.
    pub fn of(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }

    /// Names of all files, in order.
    pub fn all(&self) -> Vec<String> {
        (1..=self.count).map(|number| self.of(number)).collect()
    }
}

/// Name of the file at a path as that of a split model.
fn split_name(path: &Path) -> Option<SplitName<'_>> {
    SplitName::parse(path.file_name()?.to_str()?)
}

/// Paths of all files of the model of which `path` is the first file; for every other path, itself.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    match split_name(path).filter(|name| name.number == 1) {
        Some(name) => {
            let all = name.all().into_iter();
            all.map(|name| path.with_file_name(name)).collect()
        }
        None => vec![path.to_owned()],
    }
}

/// Paths of all files of a split model, of which `first` is open.
pub(super) fn paths(first: &Gguf, path: &Path) -> Result<Option<Vec<PathBuf>>, GgufError> {
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
pub(super) fn missing(error: GgufError, path: &Path, count: usize) -> GgufError {
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

/// Range of the joined file that one of the files holds.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Offset in the joined file.
    start: u64,
    bytes: u64,
    /// Index of the file that holds it.
    file: usize,
    /// Offset there.
    offset: u64,
}

/// Layout of the file that the files of a model become when they are joined.
#[derive(Debug)]
pub struct Joined {
    head: Vec<u8>,
    file_bytes: u64,
    /// In order of `start`, without overlap.
    places: Vec<Place>,
}

/// What a range of the joined file consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// Bytes of [`Joined::head`] from this offset on.
    Head { offset: u64, bytes: u64 },
    /// Zeros between two tensors.
    Padding { bytes: u64 },
    /// Bytes of a file.
    File {
        file: usize,
        offset: u64,
        bytes: u64,
    },
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

    /// Everything before the first tensor's data.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Length of the joined file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// What the range of `bytes` bytes from `from` on consists of, in order. Ends with the file.
    pub fn pieces(&self, from: u64, bytes: u64) -> Vec<Piece> {
        let head = self.head.len() as u64;
        let end = from.saturating_add(bytes).min(self.file_bytes);
        let mut at = from;
        let mut pieces = Vec::new();
        if at < head.min(end) {
            let bytes = head.min(end) - at;
            pieces.push(Piece::Head { offset: at, bytes });
            at += bytes;
        }
        let first = self
            .places
            .partition_point(|place| place.start + place.bytes <= at);
        for place in self
            .places
            .iter()
            .skip(first)
            .take_while(|place| place.start < end)
        {
            if at < place.start {
                let bytes = place.start - at;
                pieces.push(Piece::Padding { bytes });
            }
            let within = at.max(place.start) - place.start;
            let bytes = (place.start + place.bytes).min(end) - place.start - within;
            pieces.push(Piece::File {
                file: place.file,
                offset: place.offset + within,
                bytes,
            });
            at = place.start + within + bytes;
        }
        if at < end {
            pieces.push(Piece::Padding { bytes: end - at });
        }
        pieces
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
    let differs = |(key, value): &(&str, super::Value<'_>)| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_as_published_are_names_of_a_split_model() {
        let name = SplitName::parse("m-Q4-00002-of-00003.gguf").unwrap();
        assert_eq!((name.stem, name.number, name.count), ("m-Q4", 2, 3));
        assert_eq!(name.all().first().unwrap(), "m-Q4-00001-of-00003.gguf");
        for other in [
            "m.gguf",
            "m-00001-of-00001.gguf",
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-00002.bin",
            "-00001-of-00002.gguf",
            "m-00001-of-99999.gguf",
            "m-+0001-of-00002.gguf",
        ] {
            assert_eq!(SplitName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_range_of_a_joined_file_is_found_in_its_files() {
        let place = |start, bytes, file, offset| Place {
            start,
            bytes,
            file,
            offset,
        };
        let joined = Joined {
            head: vec![1; 64],
            file_bytes: 192,
            places: vec![place(64, 40, 0, 96), place(128, 33, 1, 32)],
        };
        let all = joined.pieces(0, 1000);
        assert_eq!(
            all,
            [
                Piece::Head {
                    offset: 0,
                    bytes: 64
                },
                Piece::File {
                    file: 0,
                    offset: 96,
                    bytes: 40
                },
                Piece::Padding { bytes: 24 },
                Piece::File {
                    file: 1,
                    offset: 32,
                    bytes: 33
                },
                Piece::Padding { bytes: 31 },
            ]
        );
        let bytes = |piece: &Piece| match *piece {
            Piece::Head { bytes, .. } | Piece::Padding { bytes } | Piece::File { bytes, .. } => {
                bytes
            }
        };
        for from in 0..192 {
            for len in [0, 1, 30, 100, 200] {
                let found: u64 = joined.pieces(from, len).iter().map(bytes).sum();
                assert_eq!(found, len.min(192 - from), "{from} {len}");
            }
        }
        assert_eq!(
            joined.pieces(70, 10),
            [Piece::File {
                file: 0,
                offset: 102,
                bytes: 10
            }]
        );
        assert_eq!(joined.pieces(104, 2), [Piece::Padding { bytes: 2 }]);
        assert!(joined.pieces(500, 2).is_empty());
    }
}
