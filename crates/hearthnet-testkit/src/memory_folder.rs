//! Temporary folders in memory, for tests that wait for the disk thousands of times.

use std::path::Path;

pub use tempfile::TempDir;

/// A temporary folder in memory if the system has a file system there, else on the disk.
///
/// # Panics
/// If no folder can be made.
pub fn memory_folder() -> TempDir {
    let in_memory = TempDir::new_in(Path::new("/dev/shm"));
    in_memory
        .or_else(|_| TempDir::new())
        .expect("a temporary folder")
}
