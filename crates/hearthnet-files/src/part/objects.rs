//! Files of a part's folder beside the pieces.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use hearthnet_platform::files::write_all_at;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use super::identity::Identity;
use crate::model_file::PART_FILE;

pub(super) const MANIFEST: &str = "manifest";
pub(super) const PIECES: &str = "pieces";
pub(super) const IDENTITY: &str = "identity";
pub(super) const HELD: &str = "held";

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
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = regular_file::open_with(options, &folder.join(PART_FILE))?;
    if file.metadata()?.len() != identity.file_bytes {
        file.set_len(identity.file_bytes)?;
    }
    write_all_at(&file, head, 0)?;
    file.sync_all()?;
    let write =
        |name: &str, bytes: &[u8]| whole_file::replace(&folder.join(name), bytes, Access::Umask);
    write(MANIFEST, manifest)?;
    write(PIECES, pieces)?;
    write(IDENTITY, &serde_json::to_vec(identity)?)
}
