//! Folder of a part.
//!
//! `held` never claims a piece that is not on the disk: pieces are synced before they are claimed,
//! and no longer claimed before their blocks are given back. If `held` is missing or damaged, the
//! pieces in the file are hashed and those that fit are claimed.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use hearthnet_platform::files::{inode, names, read_exact_at, write_all_at};
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_platform::{holes, regular_file};

use super::error::PartError;
use super::identity::Identity;
use super::objects::{HELD, MANIFEST, PIECES, is_shared, read, stored_identity, write_objects};
use super::set::PieceSet;
use super::table::PieceTable;
use super::{MAX_HEAD_BYTES, PIECE_BYTES};
use crate::error::{FileError, ModelError};
use crate::folder_lock;
use crate::gguf::{Gguf, TensorInfo};
use crate::manifest::{Digest, MAX_MANIFEST_BYTES, Manifest, WeightsId, hash_each};
use crate::model_file::{Holdings, ModelFile, PART_FILE, part_folder};

/// Far beyond the tensors of a manifest of the greatest length.
const MAX_TENSORS: u64 = 1 << 20;

/// Part of a model in a folder.
#[derive(Debug)]
pub struct Part {
    folder: PathBuf,
    identity: Identity,
    table: PieceTable,
    manifest: Manifest,
    encoded: Vec<u8>,
    files: RwLock<Files>,
    sets: Mutex<Sets>,
    /// Held shared while a piece is written, and exclusively while pieces are evicted: a piece that
    /// is written and then punched out must not be claimed.
    writing: RwLock<()>,
    /// Held while the claims change on the disk.
    storing: Mutex<()>,
}

/// Open files. [`Part::restore`] replaces them.
#[derive(Debug)]
struct Files {
    /// File with the pieces.
    pieces: File,
    /// `None` if the part is open for reading only.
    lock: Option<File>,
}

#[derive(Debug)]
struct Sets {
    /// Verified and on the disk.
    held: PieceSet,
    /// Verified and written, but not synced yet.
    written: PieceSet,
    /// Whether `held` differs from its file.
    is_dirty: bool,
}

/// Opens the model file at `path`, which may be that of a part. A part is opened for reading, with
/// the pieces that it holds at this moment.
///
/// # Errors
/// As [`ModelFile::open`]; [`ModelError::Part`] if the part cannot be opened.
pub fn open_model(path: &Path) -> Result<ModelFile, ModelError> {
    match part_folder(path) {
        None => ModelFile::open(path),
        Some(folder) => match Part::open_reading(&folder) {
            Ok(part) => Arc::new(part).model_file(),
            Err(PartError::Model(error)) => Err(error),
            Err(error) => Err(ModelError::Part(error.to_string())),
        },
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn lock_folder(folder: &Path) -> Result<File, PartError> {
    let lock = folder_lock::lock(folder, || false)?;
    lock.ok_or_else(|| PartError::InUse(folder.to_owned()))
}

impl Part {
    /// Folder of the part of a model below the folder of all parts.
    pub fn folder_in(parts: &Path, weights: &WeightsId) -> PathBuf {
        parts.join(weights.to_string())
    }

    /// Opens a part for writing. Checks everything but the pieces.
    ///
    /// The hashes of head and piece list are those that the folder states: compare
    /// [`Self::identity`] with the adoption.
    ///
    /// # Errors
    /// [`PartError::InUse`] if another process, or this one, has it open for writing;
    /// [`PartError::Damaged`] if an object is missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, PartError> {
        if !folder.is_dir() {
            return Err(PartError::damaged(folder, "folder does not exist"));
        }
        let lock = lock_folder(folder)?;
        Self::load(folder, Some(lock))
    }

    /// Opens a part beside the process that writes it. Pieces that are fetched later are not seen.
    ///
    /// # Errors
    /// As [`Self::open`], without [`PartError::InUse`].
    pub fn open_reading(folder: &Path) -> Result<Self, PartError> {
        Self::load(folder, None)
    }

    /// Opens the part of `identity` in the folder of all parts for writing. Makes it of the three
    /// objects if it is missing, or damaged, or of another file of the same weights. Then pieces
    /// that are in place stay held.
    ///
    /// # Errors
    /// [`PartError::Mismatch`] if an object differs from `identity`; [`PartError::Disagrees`] if
    /// they contradict each other; [`PartError::InUse`] as [`Self::open`].
    pub fn create(
        parts: &Path,
        identity: &Identity,
        head: &[u8],
        manifest: &[u8],
        pieces: &[u8],
    ) -> Result<Self, PartError> {
        Self::make(parts, identity, (head, manifest, pieces), false)
    }

    /// As [`Self::create`]. With `holds_all` it holds all pieces, which are not read.
    pub(super) fn make(
        parts: &Path,
        identity: &Identity,
        (head, manifest, pieces): (&[u8], &[u8], &[u8]),
        holds_all: bool,
    ) -> Result<Self, PartError> {
        identity.table(head, manifest, pieces)?;
        let folder = Self::folder_in(parts, &identity.weights);
        let failed = |source| FileError::new("write", &folder, source);
        whole_file::make_folder(&folder, Access::Umask).map_err(failed)?;
        let lock = lock_folder(&folder)?;
        // Claims are read once, below: without the file `held` that means to hash all pieces.
        match Self::unclaimed(&folder, None) {
            Ok(part) if part.identity == *identity => {}
            _ => {
                write_objects(&folder, identity, head, manifest, pieces).map_err(failed)?;
            }
        }
        if !holds_all {
            return Self::load(&folder, Some(lock));
        }
        let part = Self::unclaimed(&folder, Some(lock))?;
        {
            let mut sets = locked(&part.sets);
            part.table.all().for_each(|index| sets.held.insert(index));
            sets.is_dirty = true;
        }
        part.store_claims().map_err(failed)?;
        Ok(part)
    }

    fn load(folder: &Path, lock: Option<File>) -> Result<Self, PartError> {
        let mut part = Self::unclaimed(folder, lock)?;
        match part.stored_claims() {
            Some(held) => locked(&part.sets).held = held,
            None => part
                .rebuild()
                .map_err(|source| FileError::new("open", &part.path(), source))?,
        }
        Ok(part)
    }

    /// Opens a part and checks its objects. It holds no piece yet.
    fn unclaimed(folder: &Path, lock: Option<File>) -> Result<Self, PartError> {
        let damaged = |what: &str| PartError::damaged(folder, what);
        let identity = stored_identity(folder)?;
        if folder.file_name() != Some(identity.weights.to_string().as_ref()) {
            return Err(damaged("name is not that of its model"));
        }
        let encoded = read(folder, MANIFEST, MAX_MANIFEST_BYTES as u64)?;
        // Every piece but the last of each tensor has the full length.
        let most = identity.file_bytes / u64::from(PIECE_BYTES) + MAX_TENSORS;
        let list = read(folder, PIECES, most.saturating_mul(32))?;
        let path = folder.join(PART_FILE);
        // It may lead to a file of the user.
        if path.is_symlink() {
            return Err(damaged("file model.gguf is a symbolic link"));
        }
        let failed = |source| FileError::new("open", &path, source);
        let mut options = File::options();
        let options = options.read(true).write(lock.is_some());
        let file = match regular_file::open_with(options, &path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged("file model.gguf is missing"));
            }
            // A file that its user may only read, too: with this second name it is never written.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_shared(&path) => {
                regular_file::open(&path).map_err(failed)?
            }
            opened => opened.map_err(failed)?,
        };
        if file.metadata().map_err(failed)?.len() != identity.file_bytes
            || identity.head_bytes > identity.file_bytes.min(MAX_HEAD_BYTES)
        {
            return Err(damaged("file model.gguf has another length"));
        }
        // Limited by MAX_HEAD_BYTES.
        let mut head = vec![0; identity.head_bytes as usize];
        read_exact_at(&file, &mut head, 0).map_err(failed)?;
        let (table, manifest) = match identity.table(&head, &encoded, &list) {
            Err(PartError::Mismatch(what)) => {
                return Err(damaged(&format!("copy of {what} is damaged")));
            }
            checked => checked?,
        };
        let count = table.len();
        Ok(Self {
            folder: folder.to_owned(),
            identity,
            table,
            manifest,
            encoded,
            files: RwLock::new(Files { pieces: file, lock }),
            sets: Mutex::new(Sets {
                held: PieceSet::none(count),
                written: PieceSet::none(count),
                is_dirty: false,
            }),
            writing: RwLock::default(),
            storing: Mutex::default(),
        })
    }

    /// Claims in the file `held`; `None` if it is missing or damaged.
    fn stored_claims(&self) -> Option<PieceSet> {
        let count = self.table.len();
        let most = PieceSet::encoded_bytes(count);
        let bytes = regular_file::read(&self.folder.join(HELD), most).ok()?;
        PieceSet::decode(&bytes, count)
    }

    /// Claims all pieces in the file that have their hash.
    fn rebuild(&mut self) -> io::Result<()> {
        let mut data = Vec::new();
        for piece in self.table.all().filter_map(|index| self.table.piece(index)) {
            let next = holes::next_data(&self.files().pieces, piece.offset)?;
            if next.is_some_and(|at| at < piece.offset + u64::from(piece.len)) {
                data.push(piece.index);
            }
        }
        if self.is_writer() {
            self.files().pieces.sync_data()?;
        }
        let mut held = PieceSet::none(self.table.len());
        for &(index, genuine) in &self.hash(&data, &mut |_, _| ())? {
            if genuine {
                held.insert(index);
            }
        }
        {
            let mut sets = locked(&self.sets);
            sets.held = held;
            sets.is_dirty = true;
        }
        match self.is_writer() {
            true => self.store_claims(),
            false => Ok(()),
        }
    }

    /// Hashes pieces in the file, on all processors; whether each has its hash.
    fn hash(
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

    fn files(&self) -> RwLockReadGuard<'_, Files> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
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

    /// Model with the tensors of this part.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn model_file(self: &Arc<Self>) -> Result<ModelFile, ModelError> {
        ModelFile::open_part(&self.path(), Arc::<Self>::clone(self) as Arc<dyn Holdings>)
    }

    /// Pieces that are verified and on the disk. Sorted.
    pub fn held(&self) -> Vec<Range<u32>> {
        locked(&self.sets).held.runs(self.table.all(), true)
    }

    /// Pieces of `wanted` that have not been written yet, in the same order.
    pub fn missing(&self, wanted: &[Range<u32>]) -> Vec<Range<u32>> {
        let here = {
            let sets = locked(&self.sets);
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
        let _shared = self.writing.read().unwrap_or_else(PoisonError::into_inner);
        // Bytes that a process may have mapped are not written again.
        if locked(&self.sets).held.contains(index) {
            return Ok(());
        }
        // A file of the user with this second name is never written.
        if self.is_shared() {
            return Err(PartError::Shared(self.path()));
        }
        write_all_at(&self.files().pieces, bytes, piece.offset)
            .map_err(|source| FileError::new("write", &self.path(), source))?;
        locked(&self.sets).written.insert(index);
        Ok(())
    }

    /// Makes all written pieces durable, then claims them.
    ///
    /// # Errors
    /// The file system's error. If the pieces could not be synced they are missing again.
    pub fn sync(&self) -> io::Result<()> {
        let _storing = locked(&self.storing);
        let written = locked(&self.sets).written.clone();
        let synced = self.files().pieces.sync_data();
        {
            // After a failed sync the system may have dropped pages, and a second sync succeeds.
            let mut sets = locked(&self.sets);
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
    fn store_claims(&self) -> io::Result<()> {
        let bytes = {
            let mut sets = locked(&self.sets);
            if !std::mem::take(&mut sets.is_dirty) {
                return Ok(());
            }
            sets.held.encode()
        };
        // Not `write`, which tolerates that the folder cannot be synced.
        let replace = || whole_file::replace(&self.folder.join(HELD), &bytes, Access::Umask);
        let stored = self.check_place().and_then(|()| replace());
        if stored.is_err() {
            locked(&self.sets).is_dirty = true;
        }
        stored
    }

    /// Checks that the part is in its folder. After its removal a new part may be there, of which
    /// this one must not claim pieces.
    fn check_place(&self) -> io::Result<()> {
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
        let held = locked(&self.sets).held.contains(index);
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
        let _storing = locked(&self.storing);
        let _alone = self.writing.write().unwrap_or_else(PoisonError::into_inner);
        {
            let mut sets = locked(&self.sets);
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

    /// Makes what is missing of a part that is open for writing: its folder and files may have been
    /// removed, cut or damaged since it was opened. If the file with the pieces is another one then,
    /// no piece is held. Returns whether the part was incomplete.
    ///
    /// # Errors
    /// [`PartError::Damaged`] if the head cannot be read any more; [`PartError::InUse`] if another
    /// process has made the part again; [`PartError::File`] as [`Self::create`].
    pub fn restore(&self) -> Result<bool, PartError> {
        let _storing = locked(&self.storing);
        let _alone = self.writing.write().unwrap_or_else(PoisonError::into_inner);
        let is_sound = || {
            let stored = Self::unclaimed(&self.folder, None);
            stored.is_ok_and(|stored| stored.identity == self.identity)
        };
        if !self.is_writer() || (self.check_place().is_ok() && is_sound()) {
            return Ok(false);
        }
        // Limited by MAX_HEAD_BYTES.
        let head = self.head(0, self.identity.head_bytes as u32);
        let head = head.unwrap_or_default();
        if Digest::of(&head) != self.identity.head {
            let what = "copy of the head is damaged";
            return Err(PartError::damaged(&self.folder, what));
        }
        let failed = |source| FileError::new("write", &self.folder, source);
        whole_file::make_folder(&self.folder, Access::Umask).map_err(failed)?;
        let own = self.files().lock.as_ref().map(File::try_clone).transpose();
        let own = own.map_err(failed)?;
        let lock = match own.filter(|own| folder_lock::is_of(own, &self.folder)) {
            Some(own) => own,
            None => lock_folder(&self.folder)?,
        };
        let list = self.table.list();
        write_objects(&self.folder, &self.identity, &head, &self.encoded, list).map_err(failed)?;
        let made = Self::unclaimed(&self.folder, Some(lock))?;
        let is_same = self.check_place().is_ok();
        *self.files.write().unwrap_or_else(PoisonError::into_inner) = made
            .files
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        {
            let mut sets = locked(&self.sets);
            if !is_same {
                sets.held = PieceSet::none(self.table.len());
                sets.written = PieceSet::none(self.table.len());
            }
            sets.is_dirty = true;
        }
        self.store_claims().map_err(failed)?;
        Ok(true)
    }

    /// Whether all pieces of a tensor are in `held`.
    fn has_all_of(&self, tensor: &TensorInfo, held: &PieceSet) -> bool {
        let found = self.table.layout().tensor(&tensor.name);
        found.is_some_and(|found| held.contains_all(found.pieces.clone()))
    }

    /// Gives up damaged pieces, also on the disk if this or no process has the part open for
    /// writing.
    fn forget(&self, pieces: &[u32]) {
        let _storing = locked(&self.storing);
        let is_writer = self.is_writer();
        let lock = match is_writer {
            true => None,
            false => folder_lock::lock(&self.folder, || false).ok().flatten(),
        };
        {
            let mut sets = locked(&self.sets);
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
        self.has_all_of(tensor, &locked(&self.sets).held)
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
        let held = stored.unwrap_or_else(|| locked(&self.sets).held.clone());
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
