//! Sealed evidence of disputes: a folder of the data directory, one file for each, named by its hash.
//! Evidence that is being fetched has the extension `part`, so that a transfer goes on where it
//! ended.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use hearthnet_bus::node::weights::MAX_DATA_BYTES;
use hearthnet_bus::sealed::{MAX_SEALED_BYTES, hash_of};
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

use crate::cli::{Failure, Kind};

const FOLDER: &str = "evidence";
/// Extension of evidence that is not whole.
const PART: &str = "part";

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

    fn part(&self, hash: &[u8; 32]) -> PathBuf {
        self.path(hash).with_extension(PART)
    }

    /// Bytes that have come of evidence that is being fetched.
    pub(crate) fn part_length(&self, hash: &[u8; 32]) -> u64 {
        fs::metadata(self.part(hash)).map_or(0, |part| part.len())
    }

    /// Writes a piece of such evidence at `at`, and drops what is behind it.
    pub(crate) fn put_piece(&self, hash: &[u8; 32], at: u64, piece: &[u8]) -> io::Result<()> {
        whole_file::make_folder(&self.0, Access::Owner)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let mut part = options.open(self.part(hash))?;
        part.set_len(at)?;
        part.seek(SeekFrom::Start(at))?;
        part.write_all(piece)
    }

    /// Drops what has come.
    pub(crate) fn drop_part(&self, hash: &[u8; 32]) -> io::Result<()> {
        match fs::remove_file(self.part(hash)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Checks what has come. Returns whether it is the evidence, which then is there as a whole.
    /// Other bytes are dropped.
    pub(crate) fn finish(&self, hash: &[u8; 32]) -> io::Result<bool> {
        let part = self.part(hash);
        let sealed = regular_file::read(&part, MAX_SEALED_BYTES as u64)?;
        if hash_of(&sealed) != *hash {
            self.drop_part(hash)?;
            return Ok(false);
        }
        File::open(&part)?.sync_all()?;
        fs::rename(&part, self.path(hash))?;
        whole_file::sync_folder(&self.0)?;
        Ok(true)
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
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            if !name.is_some_and(|it| names.contains(it)) {
                fs::remove_file(path)?;
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

    #[test]
    fn a_transfer_goes_on_where_it_ended_and_wrong_bytes_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let folder = EvidenceFolder::of(dir.path());
        let sealed: Vec<u8> = (0..100).collect();
        let hash = hash_of(&sealed);
        assert_eq!(folder.part_length(&hash), 0);
        folder.put_piece(&hash, 0, &sealed[..60]).unwrap();
        folder.keep(&BTreeSet::from([hash])).unwrap();
        assert_eq!(folder.part_length(&hash), 60);
        assert!(!folder.has(&hash));
        // A piece that was torn is written again.
        folder.put_piece(&hash, 40, &sealed[40..]).unwrap();
        assert!(folder.finish(&hash).unwrap());
        assert_eq!(folder.read(&hash).unwrap(), Some(sealed));
        assert_eq!(folder.part_length(&hash), 0);
        let other = [9; 32];
        folder.put_piece(&other, 0, &[1, 2, 3]).unwrap();
        assert!(!folder.finish(&other).unwrap());
        assert!(!folder.has(&other) && folder.part_length(&other) == 0);
        folder.put_piece(&other, 0, &[1, 2, 3]).unwrap();
        folder.keep(&BTreeSet::from([hash])).unwrap();
        assert_eq!(folder.part_length(&other), 0);
    }
}
