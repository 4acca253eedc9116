//! Model files that are read and not mapped: one file, or the files of a split model as the one that
//! they become when they are joined.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::FileError;
use crate::gguf::{Gguf, GgufError, Joined, Piece, SplitName};
use crate::hugging_face::{Files, ImportError, LocalFile, OpenFile};
use crate::part::MAX_HEAD_BYTES;

/// First read of a head whose length is unknown. Each further read is of twice the length.
const FIRST_READ: u64 = 1 << 20;

/// Folder of this machine in which links may lead anywhere, as for a file that its owner names.
struct Folder(PathBuf);

impl Files for Folder {
    fn path(&self) -> &Path {
        &self.0
    }

    fn open(&self, name: &str) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
        let path = self.0.join(name);
        match LocalFile::open(&path) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::new("read", &path, error).into()),
        }
    }
}

/// [`open_joined`] for a path of this machine.
///
/// # Errors
/// As [`open_joined`], and if there is no file.
pub fn open_joined_at(path: &Path, hint: u64) -> Result<Box<dyn OpenFile>, ImportError> {
    let failed = |error| FileError::new("read", path, error);
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name.filter(|name| SplitName::parse(name).is_some()) else {
        return Ok(Box::new(LocalFile::open(path).map_err(failed)?));
    };
    let folder = Folder(path.parent().unwrap_or(Path::new("")).to_owned());
    let opened = open_joined(&folder, name, hint)?;
    opened.ok_or_else(|| failed(io::ErrorKind::NotFound.into()).into())
}

/// Opens the model file of this name, in a folder or on a server; `None` if there is none. If the
/// name is that of the first file of a split model, opens all of its files. `hint` is the expected
/// length of the head.
///
/// # Errors
/// [`ImportError::Model`] if the files of a split model do not belong together; otherwise as
/// [`Files::open`].
pub fn open_joined(
    folder: &dyn Files,
    name: &str,
    hint: u64,
) -> Result<Option<Box<dyn OpenFile>>, ImportError> {
    let Some(first) = folder.open(name)? else {
        return Ok(None);
    };
    let Some(split) = SplitName::parse(name).filter(|split| split.number == 1) else {
        return Ok(Some(first));
    };
    let path = first.path().to_owned();
    let mut files = vec![first];
    for name in split.all().iter().skip(1) {
        let file = folder.open(name)?;
        let missing = || {
            let (count, folder) = (split.count, folder.path().display());
            ImportError::Unsound(format!(
                "{name} is missing in {folder}: the model has {count} files"
            ))
        };
        files.push(file.ok_or_else(missing)?);
    }
    let mut heads = Vec::with_capacity(files.len());
    for file in &files {
        heads.push(head(&**file, hint)?);
    }
    let joined = Joined::of(&heads, &split.all()).map_err(refused)?;
    Ok(Some(Box::new(JoinedFile {
        path,
        files,
        joined,
    })))
}

fn refused(error: GgufError) -> ImportError {
    ImportError::Model(error.into())
}

/// Reads as much of a file as its head takes.
fn head(file: &dyn OpenFile, hint: u64) -> Result<Gguf, ImportError> {
    let most = file.bytes().min(MAX_HEAD_BYTES);
    let mut len = FIRST_READ.max(hint).min(most);
    loop {
        let mut bytes = vec![0; len as usize];
        let read = file.read_at(&mut bytes, 0);
        read.map_err(|error| FileError::new("read", file.path(), error))?;
        match Gguf::from_head(bytes, file.bytes()) {
            Ok(head) => return Ok(head),
            Err(_) if len < most => len = len.saturating_mul(2).min(most),
            Err(error) => return Err(refused(error)),
        }
    }
}

/// Files of a split model.
#[derive(Debug)]
struct JoinedFile {
    /// Path of the first.
    path: PathBuf,
    files: Vec<Box<dyn OpenFile>>,
    joined: Joined,
}

impl OpenFile for JoinedFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.joined.file_bytes()
    }

    fn read_at(&self, out: &mut [u8], from: u64) -> io::Result<()> {
        let mut rest = out;
        for piece in self.joined.pieces(from, rest.len() as u64) {
            let (Piece::Head { bytes, .. } | Piece::Padding { bytes } | Piece::File { bytes, .. }) =
                piece;
            // At most the length of `out`.
            let (own, after) = rest
                .split_at_mut_checked(bytes as usize)
                .unwrap_or_default();
            match piece {
                Piece::Head { offset, .. } => {
                    let head = self
                        .joined
                        .head()
                        .get(offset as usize..)
                        .unwrap_or_default();
                    own.copy_from_slice(head.get(..own.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
                }
                Piece::Padding { .. } => own.fill(0),
                Piece::File { file, offset, .. } => {
                    let file = self.files.get(file).ok_or(io::ErrorKind::UnexpectedEof)?;
                    file.read_at(own, offset)?;
                }
            }
            rest = after;
        }
        match rest.is_empty() {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
