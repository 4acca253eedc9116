//! Owners, permissions and numbers of files.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
    PermissionsExt as _,
};
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::OFlags;

/// Access that a new file or folder gives. The umask of the process may restrict it further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only its owner: 0600, folders 0700.
    Owner,
    /// Everyone may read it, its owner may write it: 0644, folders 0755.
    Readable,
    /// Everyone may read and write it, as far as the umask allows: 0666, folders 0777.
    Umask,
}

impl Access {
    /// Permission bits of a file, and of a folder.
    pub(crate) fn modes(self) -> (u32, u32) {
        match self {
            Self::Owner => (0o600, 0o700),
            Self::Readable => (0o644, 0o755),
            Self::Umask => (0o666, 0o777),
        }
    }
}

/// Permissions of a file that group or others may use in some way; `None` if only its owner may.
pub fn open_to_others(file: &Metadata) -> Option<u32> {
    let mode = file.mode() & 0o777;
    Some(mode).filter(|mode| mode & 0o077 != 0)
}

/// Returns the permission bits of a folder in which other users may create, replace or remove
/// files; `None` for other folders.
pub fn writable_by_others(folder: &Path) -> Option<u32> {
    let mode = fs::metadata(folder).ok()?.mode() & 0o7777;
    (mode & 0o022 != 0).then_some(mode)
}

/// User id of the file's owner; `None` if it is the user of this process.
pub fn foreign_owner(file: &Metadata) -> Option<u32> {
    Some(file.uid()).filter(|&owner| owner != rustix::process::geteuid().as_raw())
}

/// Closes an existing file to all but its owner.
///
/// # Errors
/// The file system's error.
pub fn close_file_to_others(file: &Path) -> io::Result<()> {
    fs::set_permissions(file, Permissions::from_mode(Access::Owner.modes().0))
}

/// Closes a folder to all but its owner.
///
/// # Errors
/// The file system's error.
pub fn close_folder_to_others(folder: &Path) -> io::Result<()> {
    fs::set_permissions(folder, Permissions::from_mode(Access::Owner.modes().1))
}

/// A file that is created is private to its owner.
pub fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options.mode(Access::Owner.modes().0)
}

/// Creates a folder and its missing parents.
///
/// # Errors
/// The file system's error.
pub fn create_folders(path: &Path, access: Access) -> io::Result<()> {
    let mode = access.modes().1;
    DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// Opens a file for reading, except through a symbolic link. Avoids waiting for the other end of a
/// pipe.
///
/// # Errors
/// The file system's error, also for a link.
pub fn open_no_link(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
    OpenOptions::new()
        .read(true)
        .custom_flags(flags.cast_signed())
        .open(path)
}

/// Whether the file is a device of characters, as `/dev/null`.
///
/// # Errors
/// The file system's error.
pub fn is_character_device(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.file_type().is_char_device())
}

/// Device and inode number of a file itself, not of what a link leads to. No other file has them
/// while it exists or is open.
///
/// # Errors
/// The file system's error.
pub fn number(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Inode number of a file.
pub fn inode(file: &Metadata) -> u64 {
    file.ino()
}

/// Number of names (hard links) of a file.
pub fn names(file: &Metadata) -> u64 {
    file.nlink()
}

/// Bytes that a file takes on the disk. Less than its length if it has holes.
pub fn disk_bytes(file: &Metadata) -> u64 {
    file.blocks().saturating_mul(512)
}

/// Length, times of change and inode of a file, by which an unchanged file is recognised.
pub type FileState = (u64, Option<SystemTime>, i128, u64);

/// State of a file now.
pub fn file_state(file: &Metadata) -> FileState {
    let modified = file.modified().ok();
    (file.len(), modified, changed_ns(file), inode(file))
}

/// Time of the last change of a file's content or properties, in ns since 1970. Programs cannot set
/// it.
pub fn changed_ns(file: &Metadata) -> i128 {
    i128::from(file.ctime()) * 1_000_000_000 + i128::from(file.ctime_nsec())
}

/// Bytes that a user without special rights may still write to the file system of `path`.
///
/// # Errors
/// The file system's error.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(path)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Fills `out` with the bytes from `offset` on. The file's position does not change.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`] if the file ends before; otherwise the file system's error.
pub fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(out, offset)
}

/// Writes `bytes` from `offset` on. The file's position does not change.
///
/// # Errors
/// The file system's error.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}
