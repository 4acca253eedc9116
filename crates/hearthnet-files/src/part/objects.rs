//! Files of a part's folder beside the pieces.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use hearthnet_platform::files::{names, read_exact_at, write_all_at};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use super::error::PartError;
use super::identity::Identity;
use crate::error::FileError;
use crate::manifest::{MAX_MANIFEST_BYTES, Manifest, WeightsId};
use crate::model_file::PART_FILE;

pub(super) const MANIFEST: &str = "manifest";
pub(super) const PIECES: &str = "pieces";
pub(super) const IDENTITY: &str = "identity";
pub(super) const HELD: &str = "held";

const MAX_IDENTITY_BYTES: u64 = 4096;

/// Identity that a part's folder states. Compare it with the adoption.
///
/// # Errors
/// [`PartError::Damaged`] if it is missing or damaged.
pub fn stored_identity(folder: &Path) -> Result<Identity, PartError> {
    serde_json::from_slice(&read(folder, IDENTITY, MAX_IDENTITY_BYTES)?)
        .map_err(|_| PartError::damaged(folder, "file identity is damaged"))
}

/// Manifest in a part's folder, checked against the weights.
///
/// # Errors
/// [`PartError::Damaged`] if it is missing or damaged.
pub fn stored_manifest(folder: &Path, weights: &WeightsId) -> Result<Manifest, PartError> {
    let bytes = read(folder, MANIFEST, MAX_MANIFEST_BYTES as u64)?;
    match WeightsId::of(&bytes) == *weights {
        true => Ok(Manifest::decode(&bytes)?),
        false => Err(PartError::damaged(folder, "manifest is damaged")),
    }
}

/// Reads a file of at most `most` bytes.
pub(super) fn read(folder: &Path, name: &str, most: u64) -> Result<Vec<u8>, PartError> {
    regular_file::read(&folder.join(name), most).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => PartError::damaged(folder, &format!("file {name} is missing")),
        _ => FileError::new("read", &folder.join(name), error).into(),
    })
}

/// Whether the file at `path` has another name: removing it here keeps its bytes.
pub(super) fn is_shared(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|info| names(&info) > 1)
}

/// Whether a file has this length, and begins with `head`.
fn begins_with(path: &Path, len: u64, head: &[u8]) -> bool {
    let Ok(file) = regular_file::open(path) else {
        return false;
    };
    let mut found = vec![0; head.len()];
    file.metadata().is_ok_and(|info| info.len() == len)
        && read_exact_at(&file, &mut found, 0).is_ok()
        && found == head
}

/// Removes files of a folder, in this order, as far as they exist.
pub(super) fn remove(folder: &Path, names: &[&str]) -> io::Result<()> {
    names
        .iter()
        .try_for_each(|name| match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
}

/// Writes all files but `held`. Without it nothing is claimed, and without `identity`, the last,
/// the part is not opened.
pub(super) fn write_objects(
    folder: &Path,
    identity: &Identity,
    head: &[u8],
    manifest: &[u8],
    pieces: &[u8],
) -> io::Result<()> {
    remove(folder, &[HELD, IDENTITY])?;
    whole_file::sync_folder(folder)?;
    let path = folder.join(PART_FILE);
    let has_other_length = fs::metadata(&path).is_ok_and(|info| info.len() != identity.file_bytes);
    // The target of a symbolic link is never written, and no file is cut: a process that has mapped
    // it would end.
    if path.is_symlink() || has_other_length {
        remove(folder, &[PART_FILE])?;
    }
    // A file of the user with this second name is never written.
    let shared = is_shared(&path);
    if !shared || !begins_with(&path, identity.file_bytes, head) {
        if shared {
            remove(folder, &[PART_FILE])?;
        }
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = regular_file::open_with(options, &path)?;
        if file.metadata()?.len() != identity.file_bytes {
            file.set_len(identity.file_bytes)?;
        }
        write_all_at(&file, head, 0)?;
        file.sync_all()?;
    }
    let write =
        |name: &str, bytes: &[u8]| whole_file::replace(&folder.join(name), bytes, Access::Umask);
    write(MANIFEST, manifest)?;
    write(PIECES, pieces)?;
    write(IDENTITY, &serde_json::to_vec(identity)?)
}
