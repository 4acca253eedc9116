//! Open part: writing, reading and eviction of its pieces.
//!
//! `held` never claims a piece that is not on the disk: pieces are synced before they are claimed,
//! and no longer claimed before their blocks are given back. If `held` is missing or damaged, the
//! pieces in the file are hashed and those that fit are claimed.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_platform::files::{inode, names, read_exact_at, write_all_at};
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_platform::{holes, regular_file};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::PIECE_BYTES;
use super::error::PartError;
use super::identity::Identity;
use super::objects::HELD;
use super::set::PieceSet;
use super::table::PieceTable;
use crate::error::{FileError, ModelError};
use crate::folder_lock;
use crate::gguf::{Gguf, TensorInfo};
use crate::manifest::{Digest, Manifest, hash_each};
use crate::model_file::{Holdings, ModelFile, PART_FILE};

/// Part of a model in a folder.
#[derive(Debug)]
pub struct Part {
    pub(super) folder: PathBuf,
    pub(super) identity: Identity,
    pub(super) table: PieceTable,
    pub(super) manifest: Manifest,
    pub(super) encoded: Vec<u8>,
    pub(super) files: RwLock<Files>,
    pub(super) sets: Mutex<Sets>,
    /// Held shared while a piece is written, and exclusively while pieces are evicted: a piece that
    /// is written and then punched out must not be claimed.
    pub(super) writing: RwLock<()>,
    /// Held while the claims change on the disk.
    pub(super) storing: Mutex<()>,
}

/// Open files. [`Part::restore`] replaces them.
#[derive(Debug)]
pub(super) struct Files {
    /// File with the pieces.
    pub(super) pieces: File,
    /// `None` if the part is open for reading only.
    pub(super) lock: Option<File>,
}

#[derive(Debug)]
pub(super) struct Sets {
    /// Verified and on the disk.
    pub(super) held: PieceSet,
    /// Verified and written, but not synced yet.
    pub(super) written: PieceSet,
    /// Whether `held` differs from its file.
    pub(super) is_dirty: bool,
}

impl Part {
    /// Claims in the file `held`; `None` if it is missing or damaged.
    pub(super) fn stored_claims(&self) -> Option<PieceSet> {
        let count = self.table.len();
        let most = PieceSet::encoded_bytes(count);
        let bytes = regular_file::read(&self.folder.join(HELD), most).ok()?;
        PieceSet::decode(&bytes, count)
    }

    /// Hashes pieces in the file, on all processors; whether each has its hash.
    pub(super) fn hash(
        &self,
        pieces: &[u32],
        progress: &mut dyn FnMut(u64, u64),
    ) -> io::Result<Vec<(u32, bool)>> {
        let gguf = Gguf::open(&self.path()).map_err(io::Error::other)?;
        let found = pieces.iter().filter_map(|&index| self.table.piece(index));
        let found: Vec<_> = found.collect();
        let ranges = found.iter().map(|piece| {
            let start = usize::try_from(piece.offset).ok();
            let range = start.and_then(|start| Some(start..start.checked_add(piece.len as usize)?));
            range
                .and_then(|range| gguf.bytes().get(range))
                .unwrap_or_default()
        });
        let ranges: Vec<&[u8]> = ranges.collect();
        let digests = hash_each(&gguf, &ranges, progress);
        let each = found.iter().zip(digests);
        Ok(each
            .map(|(piece, found)| (piece.index, found == piece.sha256))
            .collect())
    }

    /// Path of the file with the pieces.
    pub fn path(&self) -> PathBuf {
        self.folder.join(PART_FILE)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether the file with the pieces has another name: it is the user's own, and takes no disk
    /// space for the part.
    pub fn is_shared(&self) -> bool {
        self.files()
            .pieces
            .metadata()
            .is_ok_and(|info| names(&info) > 1)
    }

    /// Whether this value has the part open for writing.
    pub(super) fn is_writer(&self) -> bool {
        self.files().lock.is_some()
    }

    pub(super) fn files(&self) -> RwLockReadGuard<'_, Files> {
        self.files.read()
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Canonical encoding of the manifest.
    pub fn manifest_bytes(&self) -> &[u8] {
        &self.encoded
    }

    pub fn table(&self) -> &PieceTable {
        &self.table
    }

    /// Reads at most `len` bytes of the head from `offset` on. They are not hashed again: the
    /// receiver hashes the whole head.
    ///
    /// # Errors
    /// The file system's error.
    pub fn head(&self, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        let left = self.identity.head_bytes.saturating_sub(offset);
        // At most `len`.
        let mut bytes = vec![0; left.min(u64::from(len)) as usize];
        read_exact_at(&self.files().pieces, &mut bytes, offset)?;
        Ok(bytes)
    }

    /// Model with the tensors of this part, and the format of keys and values that its manifest states.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn model_file(self: &Arc<Self>) -> Result<ModelFile, ModelError> {
        let holdings = Arc::<Self>::clone(self) as Arc<dyn Holdings>;
        ModelFile::open_part(&self.path(), holdings, self.manifest.spec().attention.cache)
    }

    /// Pieces that are verified and on the disk. Sorted.
    pub fn held(&self) -> Vec<Range<u32>> {
        self.sets.lock().held.runs(self.table.all(), true)
    }

    /// Pieces of `wanted` that have not been written yet, in the same order.
    pub fn missing(&self, wanted: &[Range<u32>]) -> Vec<Range<u32>> {
        let here = {
            let sets = self.sets.lock();
            let mut here = sets.held.clone();
            here.insert_all(&sets.written);
            here
        };
        let each = wanted.iter().cloned();
        each.flat_map(|range| here.runs(range, false)).collect()
    }

    /// Verifies a piece and writes it. It is held after the next [`Self::sync`]. Does nothing if it
    /// is held.
    ///
    /// # Errors
    /// [`PartError::Mismatch`] if the bytes are not those of the piece; [`PartError::Shared`] if the
    /// file is the user's own; [`PartError::File`] if the disk is full or fails.
    pub fn write(&self, index: u32, bytes: &[u8]) -> Result<(), PartError> {
        let Some(piece) = self.table.piece(index) else {
            let count = self.table.len();
            return Err(PartError::NoPiece { index, count });
        };
        if bytes.len() != piece.len as usize || Digest::of(bytes) != piece.sha256 {
            let tensor = self.table.tensor_of(index).unwrap_or_default();
            return Err(PartError::Mismatch(format!("piece {index} of {tensor}")));
        }
        if !self.is_writer() {
            return Err(PartError::ReadOnly);
        }
        let _shared = self.writing.read();
        // Bytes that a process may have mapped are not written again.
        if self.sets.lock().held.contains(index) {
            return Ok(());
        }
        // A file of the user with this second name is never written.
        if self.is_shared() {
            return Err(PartError::Shared(self.path()));
        }
        write_all_at(&self.files().pieces, bytes, piece.offset)
            .map_err(|source| FileError::new("write", &self.path(), source))?;
        self.sets.lock().written.insert(index);
        Ok(())
    }

    /// Makes all written pieces durable, then claims them.
    ///
    /// # Errors
    /// The file system's error. If the pieces could not be synced they are missing again.
    pub fn sync(&self) -> io::Result<()> {
        let _storing = self.storing.lock();
        let written = self.sets.lock().written.clone();
        let synced = self.files().pieces.sync_data();
        {
            // After a failed sync the system may have dropped pages, and a second sync succeeds.
            let mut sets = self.sets.lock();
            sets.written.remove_all(&written);
            synced?;
            if !written.runs(self.table.all(), true).is_empty() {
                sets.held.insert_all(&written);
                sets.is_dirty = true;
            }
        }
        self.store_claims()
    }

    /// Writes the file `held` if it has changed.
    pub(super) fn store_claims(&self) -> io::Result<()> {
        let bytes = {
            let mut sets = self.sets.lock();
            if !std::mem::take(&mut sets.is_dirty) {
                return Ok(());
            }
            sets.held.encode()
        };
        // Not `write`, which tolerates that the folder cannot be synced.
        let replace = || whole_file::replace(&self.folder.join(HELD), &bytes, Access::Umask);
        let stored = self.check_place().and_then(|()| replace());
        if stored.is_err() {
            self.sets.lock().is_dirty = true;
        }
        stored
    }

    /// Checks that the part is in its folder. After its removal a new part may be there, of which
    /// this one must not claim pieces.
    pub(super) fn check_place(&self) -> io::Result<()> {
        let there = fs::symlink_metadata(self.path())?;
        match inode(&there) == inode(&self.files().pieces.metadata()?) {
            true => Ok(()),
            false => Err(io::Error::other("another part is in its folder")),
        }
    }

    /// Reads and verifies a held piece; `None` if it is not held. A damaged piece is no longer held.
    ///
    /// # Errors
    /// The file system's error.
    pub fn read(&self, index: u32) -> io::Result<Option<Vec<u8>>> {
        let held = self.sets.lock().held.contains(index);
        let Some(piece) = self.table.piece(index).filter(|_| held) else {
            return Ok(None);
        };
        let mut bytes = vec![0; piece.len as usize];
        read_exact_at(&self.files().pieces, &mut bytes, piece.offset)?;
        if Digest::of(&bytes) == piece.sha256 {
            return Ok(Some(bytes));
        }
        self.forget(&[index]);
        Ok(None)
    }

    /// Frees the disk space of pieces: first the claims, then the blocks. A part of a whole file
    /// (see [`Self::of_file`]) gives up the claims only.
    ///
    /// Only for tensors that no process is loading: a hole appears in open files at once. What was
    /// loaded is a copy and stays.
    ///
    /// # Errors
    /// The file system's error.
    pub fn evict(&self, pieces: &[Range<u32>]) -> io::Result<()> {
        if !self.is_writer() {
            return Err(io::Error::other(PartError::ReadOnly));
        }
        let _storing = self.storing.lock();
        let _alone = self.writing.write();
        {
            let mut sets = self.sets.lock();
            for index in pieces.iter().cloned().flatten() {
                sets.held.remove(index);
                sets.written.remove(index);
            }
            sets.is_dirty = true;
        }
        self.store_claims()?;
        // The user's own file has the same bytes.
        if self.is_shared() {
            return Ok(());
        }
        // Pieces of a tensor are adjacent: one hole frees the blocks between them, too.
        let mut hole: Option<Range<u64>> = None;
        let each = pieces.iter().cloned().flatten();
        for piece in each.filter_map(|index| self.table.piece(index)) {
            let end = piece.offset + u64::from(piece.len);
            match &mut hole {
                Some(hole) if hole.end == piece.offset => hole.end = end,
                _ => {
                    if let Some(done) = hole.replace(piece.offset..end) {
                        holes::punch(&self.files().pieces, done.start, done.end - done.start)?;
                    }
                }
            }
        }
        match hole {
            Some(last) => holes::punch(&self.files().pieces, last.start, last.end - last.start),
            None => Ok(()),
        }
    }

    /// Whether all pieces of a tensor are in `held`.
    fn has_all_of(&self, tensor: &TensorInfo, held: &PieceSet) -> bool {
        let found = self.table.layout().tensor(&tensor.name);
        found.is_some_and(|found| held.contains_all(found.pieces.clone()))
    }

    /// Gives up damaged pieces, also on the disk if this or no process has the part open for
    /// writing.
    fn forget(&self, pieces: &[u32]) {
        let _storing = self.storing.lock();
        let is_writer = self.is_writer();
        let lock = match is_writer {
            true => None,
            false => folder_lock::lock(&self.folder, || false).ok().flatten(),
        };
        {
            let mut sets = self.sets.lock();
            // Pieces that were fetched since this value was opened.
            if lock.is_some()
                && let Some(stored) = self.stored_claims()
            {
                sets.held = stored;
            }
            pieces.iter().for_each(|&index| sets.held.remove(index));
            sets.is_dirty = true;
        }
        if !is_writer && lock.is_none() {
            return;
        }
        if let Err(error) = self.store_claims() {
            tracing::warn!(%error, "the list of held pieces cannot be stored");
        }
    }
}

impl Holdings for Part {
    fn manifest(&self) -> &[u8] {
        &self.encoded
    }

    fn holds(&self, tensor: &TensorInfo) -> bool {
        self.has_all_of(tensor, &self.sets.lock().held)
    }

    fn is_genuine(&self, tensor: &TensorInfo, data: &[u8]) -> bool {
        let Some(known) = self.table.layout().tensor(&tensor.name) else {
            return false;
        };
        if Digest::of(data) == known.sha256 {
            return true;
        }
        let pieces = known.pieces.clone().zip(data.chunks(PIECE_BYTES as usize));
        let damaged = pieces.filter(|(index, bytes)| {
            let piece = self.table.piece(*index);
            piece.is_none_or(|piece| Digest::of(bytes) != piece.sha256)
        });
        let damaged: Vec<u32> = damaged.map(|(index, _)| index).collect();
        self.forget(&damaged);
        false
    }

    fn given_up(&self, tensors: &[&TensorInfo]) -> Option<String> {
        // Another process may have given up pieces since this value was opened.
        let stored = match self.is_writer() {
            true => None,
            false => self.stored_claims(),
        };
        let held = stored.unwrap_or_else(|| self.sets.lock().held.clone());
        let gone = tensors.iter().find(|info| !self.has_all_of(info, &held));
        gone.map(|info| info.name.clone())
    }

    fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Option<String>, ModelError> {
        let held: Vec<u32> = self.held().into_iter().flatten().collect();
        let hashed = self.hash(&held, progress).map_err(|source| {
            ModelError::Part(FileError::new("read", &self.path(), source).to_string())
        })?;
        let damaged = hashed.iter().filter(|(_, genuine)| !genuine);
        let damaged: Vec<u32> = damaged.map(|(index, _)| *index).collect();
        let Some(first) = damaged.first() else {
            return Ok(None);
        };
        self.forget(&damaged);
        Ok(self.table.tensor_of(*first).map(str::to_owned))
    }
}
