//! Hugging Face directories as sources, in a folder or over HTTP.
//!
//! A directory has the tensors of the adopted file in another order, shape and type. A piece is made
//! of the ranges of the directory's tensors that it consists of, as an import would write it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_files::FileError;
use hearthnet_files::hugging_face::{Files, ImportError, OpenFile, Tensors};
use hearthnet_files::manifest::{Digest, Manifest, WeightsId};
use hearthnet_files::part::{Identity, Part, Piece, stored_manifest, tensor_at};
use parking_lot::Mutex;

use super::http::Ranges;
use super::source::{PieceSource, Rank, SourceError, all_pieces};
use crate::pull::PullOptions;
use crate::source::Source;

/// Most pieces per read: 4 MiB, made of up to 28 MiB of a directory in F32.
const RUN: u32 = 16;
/// Longest file that is taken whole from a server without ranges: an index of weights.
const MAX_WHOLE_BYTES: u64 = 16 << 20;

/// Hugging Face directory that becomes the adopted model file when it is imported. It has none of the
/// objects. Its headers are read with the first use, when the part has the manifest.
pub struct DirectorySource {
    name: String,
    rank: Rank,
    files: Box<dyn Files + Send + Sync>,
    /// Folder of the part.
    part: PathBuf,
    weights: WeightsId,
    opened: Mutex<Option<Arc<Opened>>>,
}

struct Opened {
    manifest: Manifest,
    tensors: Tensors,
}

impl DirectorySource {
    /// Folder of this machine. `parts` is the folder of all parts.
    pub fn in_folder(folder: &Path, identity: &Identity, parts: &Path) -> Self {
        let name = folder.display().to_string();
        Self::new(
            name,
            Rank::Local,
            Box::new(folder.to_owned()),
            identity,
            parts,
        )
    }

    /// Directory of a `config.json` on the hub, or at an address. `parts` is the folder of all parts.
    pub fn at(source: &Source, options: &PullOptions, identity: &Identity, parts: &Path) -> Self {
        let files = RemoteFiles::beside(source, options);
        Self::new(
            source.to_string(),
            Rank::Hub,
            Box::new(files),
            identity,
            parts,
        )
    }

    fn new(
        name: String,
        rank: Rank,
        files: Box<dyn Files + Send + Sync>,
        identity: &Identity,
        parts: &Path,
    ) -> Self {
        let weights = identity.weights;
        Self {
            name,
            rank,
            files,
            part: Part::folder_in(parts, &weights),
            weights,
            opened: Mutex::default(),
        }
    }

    fn opened(&self) -> Result<Arc<Opened>, SourceError> {
        let mut opened = self.opened.lock();
        if let Some(opened) = &*opened {
            return Ok(Arc::clone(opened));
        }
        let manifest = stored_manifest(&self.part, &self.weights)
            .map_err(|error| SourceError::Unusable(error.to_string()))?;
        let tensors = Tensors::open(&*self.files, &manifest).map_err(failed)?;
        Ok(Arc::clone(
            opened.insert(Arc::new(Opened { manifest, tensors })),
        ))
    }
}

impl Opened {
    /// Tensor of a piece, and the piece's range of bytes in it.
    fn place(&self, piece: &Piece) -> Result<(&str, Range<u64>), SourceError> {
        let Some((entry, at)) = tensor_at(&self.manifest, piece.index) else {
            let why = format!("the adopted model has no piece {}", piece.index);
            return Err(SourceError::Unusable(why));
        };
        Ok((&entry.name, at..at + u64::from(piece.len)))
    }

    /// Bytes of pieces that follow each other in one tensor.
    fn read(
        &self,
        tensor: &str,
        range: Range<u64>,
        pieces: &[Piece],
    ) -> Result<Vec<u8>, SourceError> {
        let bytes = self.tensors.read_range(tensor, range).map_err(failed)?;
        let mut rest = &*bytes;
        for piece in pieces {
            let (own, after) = rest
                .split_at_checked(piece.len as usize)
                .unwrap_or_default();
            // The queue would call the source a liar. But it may be another revision, or an adopted
            // file that another program has converted.
            if Digest::of(own) != piece.sha256 {
                return Err(SourceError::Unusable(format!(
                    "tensor {tensor} differs from the adopted model: the directory has changed, or \
                     the adopted file is another conversion of it"
                )));
            }
            rest = after;
        }
        Ok(bytes)
    }
}

/// A failure to read may pass; any other is one of the directory.
pub(super) fn failed(error: ImportError) -> SourceError {
    match error {
        ImportError::File(error) => match error.source.downcast() {
            Ok(error) => error,
            Err(error) => SourceError::Io(error),
        },
        other => SourceError::Unusable(other.to_string()),
    }
}

impl PieceSource for DirectorySource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        self.opened()?;
        Ok(all_pieces())
    }

    fn run(&self) -> u32 {
        RUN
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        let opened = self.opened()?;
        let mut bytes = Vec::new();
        let mut rest = run;
        while let Some(first) = rest.first() {
            let (tensor, mut range) = opened.place(first)?;
            let mut count = 1;
            for piece in rest.iter().skip(1) {
                let (next, place) = opened.place(piece)?;
                if next != tensor || place.start != range.end {
                    break;
                }
                range.end = place.end;
                count += 1;
            }
            let (pieces, after) = rest.split_at(count);
            bytes.extend(opened.read(tensor, range, pieces)?);
            rest = after;
        }
        Ok(Some(bytes))
    }
}

/// Files of one folder on an HTTP server.
pub(super) struct RemoteFiles {
    source: Source,
    name: PathBuf,
    options: PullOptions,
}

impl RemoteFiles {
    /// Files beside this one.
    pub(super) fn beside(source: &Source, options: &PullOptions) -> Self {
        Self {
            source: source.clone(),
            name: PathBuf::from(source.to_string()),
            options: options.clone(),
        }
    }
}

impl Files for RemoteFiles {
    fn path(&self) -> &Path {
        &self.name
    }

    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
        let beside = self.source.beside(name);
        let Some(url) = beside.and_then(|source| source.address(&self.options.hub)) else {
            let problem = format!("{name:?} is no name of a file that is fetched");
            return Err(ImportError::Unsound(problem));
        };
        let path = self.name.with_file_name(name);
        // Weights stay open, so they are never kept whole.
        let whole = if name.ends_with(".json") {
            MAX_WHOLE_BYTES
        } else {
            0
        };
        match Ranges::find(url, &self.options, whole) {
            Ok(None) => Ok(None),
            Ok(Some((file, begin))) => Ok(Some(Box::new(RemoteFile { path, file, begin }))),
            Err(error) => Err(FileError::new("read", &path, io::Error::other(error)).into()),
        }
    }
}

struct RemoteFile {
    path: PathBuf,
    file: Ranges,
    /// First bytes.
    begin: Vec<u8>,
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RemoteFile").field(&self.path).finish()
    }
}

impl OpenFile for RemoteFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.file.file_bytes
    }

    fn read_at(&self, out: &mut [u8], from: u64) -> io::Result<()> {
        let known = usize::try_from(from)
            .ok()
            .and_then(|from| self.begin.get(from..)?.get(..out.len()));
        match known {
            Some(known) => out.copy_from_slice(known),
            None if out.is_empty() => {}
            None => {
                let bytes = self.file.range(from, out.len() as u64);
                out.copy_from_slice(&bytes.map_err(io::Error::other)?);
            }
        }
        Ok(())
    }
}
