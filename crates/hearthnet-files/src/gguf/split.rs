//! Models that are split into several files, as `llama-gguf-split` of llama.cpp writes them.
//!
//! The files are named `NAME-00001-of-0000N.gguf` and lie in one folder. Each is a GGUF file with
//! some of the tensors and the keys `split.no` (from 0), `split.count` and `split.tensors.count`
//! (tensors of the whole model). All other metadata is in the first file.
//!
//! `join.rs` checks that files belong together. Joined, they have the head and the tensors of one file: the metadata of the first without
//! `split.*`, then all tensors in order. All other code sees that file, whose offsets are mapped to
//! the files that hold the bytes.

use std::path::{Path, PathBuf};

/// The largest known models have some 200 files.
pub(super) const MAX_FILES: u32 = 1 << 12;
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
pub(super) fn split_name(path: &Path) -> Option<SplitName<'_>> {
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

/// Range of the joined file that one of the files holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Offset in the joined file.
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Index of the file that holds it.
    pub(super) file: usize,
    /// Offset there.
    pub(super) offset: u64,
}

/// Layout of the file that the files of a model become when they are joined.
#[derive(Debug)]
pub struct Joined {
    pub(super) head: Vec<u8>,
    pub(super) file_bytes: u64,
    /// In order of `start`, without overlap.
    pub(super) places: Vec<Place>,
}

/// Bytes from which a range of the joined file is put together.
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
    /// Everything before the first tensor's data.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Length of the joined file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Pieces of the range of `bytes` bytes from `from` on, in order. The range ends with the file.
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
