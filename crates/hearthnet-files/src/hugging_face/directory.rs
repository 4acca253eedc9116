//! Files of a model directory.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_platform::files::read_exact_at;
use hearthnet_platform::regular_file;
use serde_json::{Map, Value as Json};

use super::error::ImportError;
use super::json::object;
use crate::error::FileError;

/// First bytes of a pointer file that Git leaves for Git LFS. (As the length of a safetensors
/// header, the first eight bytes exceed any file.)
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Files of a model directory, on this machine or elsewhere.
pub trait Files {
    /// Path or address of the directory, for messages.
    fn path(&self) -> &Path;

    /// Opens the file of this name; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be opened, or must not be.
    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError>;
}

/// Open file of a model directory.
pub trait OpenFile: Debug + Send + Sync {
    /// Path or address, for messages.
    fn path(&self) -> &Path;

    /// Length when it was opened, in bytes.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `from` on.
    ///
    /// # Errors
    /// The file cannot be read, or ends before.
    fn read_at(&self, out: &mut [u8], from: u64) -> io::Result<()>;
}

impl Files for Path {
    fn path(&self) -> &Path {
        self
    }

    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
        let Some((path, file)) = open(self, name)? else {
            return Ok(None);
        };
        let opened = LocalFile::of(path.clone(), file);
        let file = opened.map_err(|source| FileError::new("read", &path, source))?;
        Ok(Some(Box::new(file)))
    }
}

impl Files for PathBuf {
    fn path(&self) -> &Path {
        self
    }

    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
        Files::open(self.as_path(), name)
    }
}

/// File of this machine.
#[derive(Debug)]
pub(crate) struct LocalFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LocalFile {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::of(path.to_owned(), regular_file::open(path)?)
    }

    fn of(path: PathBuf, file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        Ok(Self { path, file, bytes })
    }
}

impl OpenFile for LocalFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, out: &mut [u8], from: u64) -> io::Result<()> {
        read_exact_at(&self.file, out, from)
    }
}

/// Opens a file of the directory, if it exists.
///
/// A link is accepted if its target lies in the directory. In the cache of the hub's own programs,
/// which consists of links, the target may lie anywhere in that cache.
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

/// Reads a file of the directory of at most `limit` bytes, if it exists.
pub(super) fn read(
    directory: &(impl Files + ?Sized),
    name: &str,
    limit: u64,
) -> Result<Option<Vec<u8>>, ImportError> {
    let Some(file) = directory.open(name)? else {
        return Ok(None);
    };
    let bytes = file.bytes();
    if bytes > limit {
        return Err(ImportError::Unsound(format!(
            "{name} has {bytes} bytes; at most {limit} are read"
        )));
    }
    let mut content = vec![0; bytes as usize];
    file.read_at(&mut content, 0)
        .map_err(|source| FileError::new("read", file.path(), source))?;
    match content.starts_with(LFS_POINTER) {
        true => Err(ImportError::Pointer(name.to_owned())),
        false => Ok(Some(content)),
    }
}

/// Reads a JSON object, if the file exists.
pub(super) fn read_json(
    directory: &(impl Files + ?Sized),
    name: &str,
    limit: u64,
) -> Result<Option<Map<String, Json>>, ImportError> {
    let text = read(directory, name, limit)?;
    text.map(|text| object(name, &text)).transpose()
}
