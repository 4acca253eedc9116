//! Holes of sparse files: ranges without blocks on the disk, which read as zeros.

use std::fs::File;
use std::io;

/// Replaces a range by a hole: it reads as zeros, and its blocks return to the file system. Does
/// nothing where the file system or the system has no such operation.
///
/// # Errors
/// The file system's error.
pub fn punch(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, flags, offset, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            punched => punched?,
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, bytes);
    Ok(())
}

/// Offset of the first byte at or after `offset` that is not in a hole; `None` if only a hole
/// follows. Where holes are not known, all bytes count as data. Moves the file's position.
///
/// # Errors
/// The file system's error.
pub fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{SeekFrom, seek};
        use rustix::io::Errno;
        match seek(file, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(offset)),
            found => Ok(Some(found?)),
        }
    }
    #[cfg(not(target_os = "linux"))]
    Ok(Some(offset).filter(|_| file.metadata().is_ok()))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::files::{disk_bytes, write_all_at};

    #[test]
    fn a_punched_range_reads_as_zeros_and_is_no_data() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        write_all_at(&file, &[7; 1 << 20], 4 << 20).unwrap();
        file.sync_all().unwrap();
        let used = disk_bytes(&file.metadata().unwrap());
        let found = next_data(&file, 0).unwrap();
        // File systems without holes report everything as data.
        let sparse = found == Some(4 << 20);
        assert!(sparse || found == Some(0), "{found:?}");
        punch(&file, 4 << 20, 1 << 20).unwrap();
        if sparse {
            assert_eq!(next_data(&file, 0).unwrap(), None);
            file.sync_all().unwrap();
            assert!(disk_bytes(&file.metadata().unwrap()) < used);
        }
        assert_eq!(file.metadata().unwrap().len(), 8 << 20);
    }
}
