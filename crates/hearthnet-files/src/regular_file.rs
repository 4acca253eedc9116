//! Opens regular files only: opening a named pipe blocks until its other end opens, and a device
//! may never end. `hearthnet-bus`, which this crate does not import, has the same code.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Opens a regular file; any other file is [`io::ErrorKind::InvalidInput`].
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    let opened = options
        .custom_flags((OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed())
        .open(path);
    match opened {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(other()),
        // ENXIO: a pipe without a reader, opened for writing, or a socket.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            Err(other())
        }
        Err(error) => Err(error),
    }
}

/// Reads a regular file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open(path)?;
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let why = format!("it is longer than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

/// Same as [`read`], for UTF-8; other contents are [`io::ErrorKind::InvalidData`].
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
