//! Folder of a part that is not open: its space on the disk, its last use, the homes that use it, and
//! its removal.
//!
//! Several homes of one user may share a folder of parts. Each home leaves a file with a name of
//! its own in the part's folder `homes`. A home that ends its use removes this file, and the whole
//! part if no other home has one.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use hearthnet_platform::files::{self, names};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use super::error::PartError;
use super::objects::{self, HELD, IDENTITY, MANIFEST, PIECES, remove};
use super::opening::lock_folder;
use super::store::Part;
use crate::error::FileError;
use crate::manifest::WeightsId;
use crate::model_file::PART_FILE;

/// Empty file whose time of change is that of the last use.
const USED: &str = "used";
/// Folder with a file per home that uses the part.
const HOMES: &str = "homes";

/// Weights ids of the parts below the folder of all parts. Links and other names are left out.
pub fn parts_in(parts: &Path) -> Vec<WeightsId> {
    let entries = fs::read_dir(parts).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let named = folders.filter_map(|entry| {
        let name = entry.file_name();
        let id: WeightsId = name.to_str()?.parse().ok()?;
        // The name that a part's folder has, and no other spelling of it.
        (name == *id.to_string()).then_some(id)
    });
    let mut found: Vec<WeightsId> = named.collect();
    found.sort_unstable();
    found
}

/// Bytes on the disk that the removal of a part's folder would free. The user's own file, of which
/// the part's file is a second name, is not counted.
pub fn disk_bytes(folder: &Path) -> u64 {
    let all = [PART_FILE, MANIFEST, PIECES, IDENTITY, HELD].into_iter();
    let found = all.filter_map(|name| fs::symlink_metadata(folder.join(name)).ok());
    found
        .filter(|info| names(info) < 2)
        .map(|info| files::disk_bytes(&info))
        .sum()
}

/// Whether the part's file is a second name of a file of the user.
pub fn is_shared(folder: &Path) -> bool {
    objects::is_shared(&folder.join(PART_FILE))
}

/// Records that the part is used at this moment.
///
/// # Errors
/// The file system's error.
pub fn note_use(folder: &Path) -> io::Result<()> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false);
    let file = regular_file::open_with(options, &folder.join(USED))?;
    file.set_modified(SystemTime::now())
}

/// Time of the last recorded use, in ms since 1970; 0 if none is recorded.
pub fn last_use_ms(folder: &Path) -> u64 {
    let modified = fs::metadata(folder.join(USED)).and_then(|info| info.modified());
    let since = modified
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Records that a home uses a part. `home` is a file name that is the home's own.
///
/// # Errors
/// The file system's error.
pub fn enter(folder: &Path, home: &str) -> io::Result<()> {
    let file = file_of(folder, home)?;
    if file.exists() {
        return Ok(());
    }
    whole_file::make_folder(&folder.join(HOMES), Access::Umask)?;
    File::create(file).map(drop)
}

/// Renames a home in a part, if it uses the part.
///
/// # Errors
/// The file system's error.
pub fn rename(folder: &Path, from: &str, to: &str) -> io::Result<()> {
    match fs::rename(file_of(folder, from)?, file_of(folder, to)?) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns true if a home uses the part.
pub fn uses(folder: &Path, home: &str) -> bool {
    file_of(folder, home).is_ok_and(|file| file.is_file())
}

/// Whether a home other than `home` uses a part.
///
/// # Errors
/// The file system's error, also if `home` is no file name.
pub fn is_used_beside(folder: &Path, home: &str) -> io::Result<bool> {
    let own = file_of(folder, home)?;
    match fs::read_dir(folder.join(HOMES)) {
        Ok(entries) => {
            let paths: io::Result<Vec<_>> = entries.map(|it| it.map(|it| it.path())).collect();
            Ok(paths?.iter().any(|path| *path != own))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Ends a home's use of a part that this process has not open. Returns whether the part was
/// removed: it stays while another home uses it.
///
/// # Errors
/// [`PartError::InUse`] if a process has the part open for writing, and no other home uses it; then
/// nothing is changed.
pub fn leave(folder: &Path, home: &str) -> Result<bool, PartError> {
    let failed = |source| FileError::new("remove", folder, source);
    match lock_folder(folder) {
        Ok(_lock) => end_use(folder, home),
        // It is open for the other home.
        Err(PartError::InUse(_)) if is_used_beside(folder, home).map_err(failed)? => {
            remove(&folder.join(HOMES), &[home]).map_err(failed)?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn file_of(folder: &Path, home: &str) -> io::Result<PathBuf> {
    // A name, and no path.
    match Path::new(home).file_name() == Some(OsStr::new(home)) {
        true => Ok(folder.join(HOMES).join(home)),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Requires the lock of the folder.
fn end_use(folder: &Path, home: &str) -> Result<bool, PartError> {
    let failed = |source| FileError::new("remove", folder, source);
    // An error if `home` is a path.
    if !is_used_beside(folder, home).map_err(failed)? {
        // First what takes the space: after an interruption nothing tells that this home used the part.
        remove(folder, &[PART_FILE]).map_err(failed)?;
        fs::remove_dir_all(folder).map_err(failed)?;
        return Ok(true);
    }
    remove(&folder.join(HOMES), &[home]).map_err(failed)?;
    Ok(false)
}

impl Part {
    /// Bytes on the disk that the removal of the part would free.
    pub fn disk_bytes(&self) -> u64 {
        disk_bytes(self.folder())
    }

    /// Ends a home's use of this part. Returns whether the part was removed: it stays while another
    /// home uses it. What has the part open keeps reading the removed file.
    ///
    /// # Errors
    /// The part is open for reading only, or the file system's error.
    pub fn leave(&self, home: &str) -> Result<bool, PartError> {
        match self.is_writer() {
            true => end_use(self.folder(), home),
            false => Err(PartError::ReadOnly),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: WeightsId = WeightsId([0xab; 32]);

    /// Folder of a part, without a part in it.
    fn folder(parts: &Path) -> PathBuf {
        let folder = Part::folder_in(parts, &WEIGHTS);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(PART_FILE), [1; 8192]).unwrap();
        folder
    }

    #[test]
    fn a_part_is_removed_with_the_last_home_that_uses_it() {
        let parts = tempfile::tempdir().unwrap();
        let folder = folder(parts.path());
        for home in ["one", "two", "one"] {
            enter(&folder, home).unwrap();
        }
        assert!(uses(&folder, "one") && !uses(&folder, "three"));
        assert!(is_used_beside(&folder, "one").unwrap());
        assert!(!leave(&folder, "one").unwrap());
        assert!(!uses(&folder, "one") && folder.join(PART_FILE).exists());
        // Again, and by a home that never used it.
        for home in ["one", "three"] {
            assert!(!leave(&folder, home).unwrap());
        }
        assert!(!is_used_beside(&folder, "two").unwrap());
        let lock = lock_folder(&folder).unwrap();
        // Open for another home.
        enter(&folder, "one").unwrap();
        assert!(!leave(&folder, "one").unwrap());
        assert!(!uses(&folder, "one") && uses(&folder, "two"));
        let error = leave(&folder, "two").unwrap_err();
        assert_eq!(error.code(), "in_use");
        assert!(uses(&folder, "two"));
        drop(lock);
        assert!(leave(&folder, "two").unwrap());
        assert!(!folder.exists() && parts.path().exists());
    }

    #[test]
    fn a_home_with_a_new_name_uses_the_parts_that_it_used_before() {
        let parts = tempfile::tempdir().unwrap();
        let folder = folder(parts.path());
        rename(&folder, "old", "new").unwrap();
        enter(&folder, "old").unwrap();
        rename(&folder, "old", "new").unwrap();
        assert!(!uses(&folder, "old") && uses(&folder, "new"));
        assert!(!is_used_beside(&folder, "new").unwrap());
    }

    #[test]
    fn a_home_is_a_name_and_no_path() {
        let parts = tempfile::tempdir().unwrap();
        let folder = folder(parts.path());
        for home in ["", "..", "a/b", "/a", "a/"] {
            enter(&folder, home).unwrap_err();
            leave(&folder, home).unwrap_err();
            assert!(!uses(&folder, home) && folder.exists(), "{home}");
        }
    }

    #[test]
    fn only_folders_with_the_name_of_a_part_are_parts() {
        let parts = tempfile::tempdir().unwrap();
        assert!(parts_in(&parts.path().join("none")).is_empty());
        let folder = folder(parts.path());
        for other in ["notes", &"AB".repeat(32), &"ab".repeat(31)] {
            fs::create_dir(parts.path().join(other)).unwrap();
        }
        fs::write(parts.path().join("cd".repeat(32)), "").unwrap();
        assert_eq!(parts_in(parts.path()), [WEIGHTS]);
        fs::remove_dir_all(folder).unwrap();
        assert!(parts_in(parts.path()).is_empty());
    }

    #[test]
    fn a_file_with_another_name_takes_no_space_and_the_last_use_is_remembered() {
        let parts = tempfile::tempdir().unwrap();
        let folder = folder(parts.path());
        File::open(folder.join(PART_FILE))
            .and_then(|file| file.sync_all())
            .unwrap();
        assert!(disk_bytes(&folder) >= 8192);
        assert!(!is_shared(&folder));
        fs::hard_link(folder.join(PART_FILE), parts.path().join("own.gguf")).unwrap();
        assert!(is_shared(&folder));
        assert_eq!(disk_bytes(&folder), 0);
        assert_eq!(last_use_ms(&folder), 0);
        note_use(&folder).unwrap();
        let first = last_use_ms(&folder);
        assert!(first > 1 << 40);
        note_use(&folder).unwrap();
        assert!(last_use_ms(&folder) >= first);
    }
}
