//! Files of a model directory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hearthnet_platform::regular_file;
use serde_json::{Map, Value as Json};

use super::error::ImportError;
use super::json::object;
use crate::error::FileError;

/// First bytes of a pointer file that Git leaves for Git LFS. (As the length of a safetensors
/// header, the first eight bytes exceed any file.)
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Opens a file of the directory, if it exists.
///
/// A link is accepted if its target lies in the directory. In the cache of the hub's own programs,
/// which consists of links, the target may lie anywhere in that cache.
pub(super) fn open(directory: &Path, name: &str) -> Result<Option<(PathBuf, File)>, ImportError> {
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
    directory: &Path,
    name: &str,
    limit: u64,
) -> Result<Option<Vec<u8>>, ImportError> {
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
    // The file may grow meanwhile.
    file.take(limit + 1)
        .read_to_end(&mut content)
        .map_err(failed)?;
    match content.len() as u64 {
        found if found > limit => Err(too_long(found)),
        _ if content.starts_with(LFS_POINTER) => Err(ImportError::Pointer(name.to_owned())),
        _ => Ok(Some(content)),
    }
}

/// Reads a JSON object, if the file exists.
pub(super) fn read_json(
    directory: &Path,
    name: &str,
    limit: u64,
) -> Result<Option<Map<String, Json>>, ImportError> {
    let text = read(directory, name, limit)?;
    text.map(|text| object(name, &text)).transpose()
}
