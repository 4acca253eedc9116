//! Opens regular files only. Opening a named pipe waits for its other end, and a device may never
//! end: both are refused at once.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading.
///
/// # Errors
/// As [`open_with`].
pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Opens a regular file.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if `path` is not a regular file; otherwise the file system's
/// error.
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    let opened = options
        .custom_flags((OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed())
        .open(path);
    match opened {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(other()),
        // The system refuses to open a pipe without a reader for writing, and any socket.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            Err(other())
        }
        Err(error) => Err(error),
    }
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// As [`open`], and [`io::ErrorKind::FileTooLarge`] if the file is longer.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    all_of(open(path)?, most)
}

/// Reads an open file of at most `most` bytes to its end.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] if the file is longer; otherwise the file system's error.
pub fn all_of(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let why = format!("it is longer than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

/// Reads a regular file of at most `most` bytes that holds UTF-8.
///
/// # Errors
/// As [`read`], and [`io::ErrorKind::InvalidData`] if the content is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn a_pipe_without_its_other_end_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let write = open_with(OpenOptions::new().write(true), &pipe);
        for opened in [
            open(&pipe),
            write,
            open(dir.path()),
            open("/dev/zero".as_ref()),
        ] {
            assert_eq!(opened.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        let long = read(&path, 3).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, b"\xff").unwrap();
        let text = read_text(&path, 3).unwrap_err();
        assert_eq!(text.kind(), io::ErrorKind::InvalidData);
    }
}
