//! Sealed evidence of disputes: a folder of the data directory, one file for each, named by its hash.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use hearthnet_bus::node::weights::MAX_DATA_BYTES;
use hearthnet_bus::sealed::{MAX_SEALED_BYTES, hash_of};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use crate::cli::{Failure, Kind};

const FOLDER: &str = "evidence";

#[derive(Debug, Clone)]
pub(crate) struct EvidenceFolder(PathBuf);

impl EvidenceFolder {
    /// Folder in a data directory. It is made with the first file.
    pub(crate) fn of(dir: &Path) -> Self {
        Self(dir.join(FOLDER))
    }

    /// Failure to read or write here.
    pub(crate) fn failure(&self, what: &str, error: io::Error) -> Failure {
        let kind = Kind::of_io(&error);
        Failure::file(what, &self.0, error).of_kind(kind)
    }

    fn path(&self, hash: &[u8; 32]) -> PathBuf {
        self.0.join(hex::encode(hash))
    }

    /// Returns whether there is evidence with this hash. Only checked bytes are written.
    pub(crate) fn has(&self, hash: &[u8; 32]) -> bool {
        self.path(hash).is_file()
    }

    /// Writes sealed evidence.
    pub(crate) fn put(&self, sealed: &[u8]) -> io::Result<()> {
        whole_file::make_folder(&self.0, Access::Owner)?;
        whole_file::replace(&self.path(&hash_of(sealed)), sealed, Access::Owner)
    }

    /// Evidence with this hash; `None` if it is not here, or was damaged.
    pub(crate) fn read(&self, hash: &[u8; 32]) -> io::Result<Option<Vec<u8>>> {
        match regular_file::read(&self.path(hash), MAX_SEALED_BYTES as u64) {
            Ok(bytes) => Ok(Some(bytes).filter(|bytes| hash_of(bytes) == *hash)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Piece of the evidence, as pieces of weights are numbered. `None` if it is not here.
    pub(crate) fn piece(&self, hash: &[u8; 32], index: u32) -> Option<Vec<u8>> {
        let mut file = regular_file::open(&self.path(hash)).ok()?;
        let start = u64::from(index).checked_mul(MAX_DATA_BYTES as u64)?;
        file.seek(SeekFrom::Start(start)).ok()?;
        let mut piece = Vec::new();
        let read = file.take(MAX_DATA_BYTES as u64).read_to_end(&mut piece);
        (read.ok()? > 0).then_some(piece)
    }

    /// Removes all files but those with these hashes.
    pub(crate) fn keep(&self, hashes: &BTreeSet<[u8; 32]>) -> io::Result<()> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        let names: BTreeSet<String> = hashes.iter().map(hex::encode).collect();
        for entry in entries {
            let entry = entry?;
            let is_kept = entry
                .file_name()
                .to_str()
                .is_some_and(|it| names.contains(it));
            if !is_kept {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_is_read_in_pieces_found_damaged_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = EvidenceFolder::of(dir.path());
        let sealed: Vec<u8> = (0..MAX_DATA_BYTES as u32 + 9).map(|n| n as u8).collect();
        let hash = hash_of(&sealed);
        assert_eq!(folder.read(&hash).unwrap(), None);
        folder.keep(&BTreeSet::new()).unwrap();
        folder.put(&sealed).unwrap();
        assert!(folder.has(&hash));
        assert_eq!(folder.read(&hash).unwrap().as_ref(), Some(&sealed));
        let pieces = [0, 1].map(|index| folder.piece(&hash, index).unwrap());
        assert_eq!(pieces.concat(), sealed);
        assert_eq!(folder.piece(&hash, 2), None);
        assert_eq!(folder.piece(&[7; 32], 0), None);
        fs::write(folder.path(&hash), &sealed[1..]).unwrap();
        assert_eq!(folder.read(&hash).unwrap(), None);
        folder.keep(&BTreeSet::from([hash])).unwrap();
        assert!(folder.has(&hash));
        folder.keep(&BTreeSet::new()).unwrap();
        assert!(!folder.has(&hash));
    }
}
