//! Opening and making a part, and making it again if it was damaged while it is open.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_platform::files::read_exact_at;
use hearthnet_platform::whole_file::{self, Access};
use hearthnet_platform::{holes, regular_file};
use parking_lot::{Mutex, RwLock};

use super::error::PartError;
use super::identity::Identity;
use super::objects::{MANIFEST, PIECES, is_shared, read, stored_identity, write_objects};
use super::set::PieceSet;
use super::store::{Files, Part, Sets};
use super::{MAX_HEAD_BYTES, PIECE_BYTES};
use crate::error::{FileError, ModelError};
use crate::folder_lock;
use crate::manifest::{Digest, MAX_MANIFEST_BYTES, WeightsId};
use crate::model_file::{ModelFile, PART_FILE, part_folder};

/// Far beyond the tensors of a manifest of the greatest length.
const MAX_TENSORS: u64 = 1 << 20;

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
            let mut sets = part.sets.lock();
            part.table.all().for_each(|index| sets.held.insert(index));
            sets.is_dirty = true;
        }
        part.store_claims().map_err(failed)?;
        Ok(part)
    }

    fn load(folder: &Path, lock: Option<File>) -> Result<Self, PartError> {
        let mut part = Self::unclaimed(folder, lock)?;
        match part.stored_claims() {
            Some(held) => part.sets.lock().held = held,
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
            let mut sets = self.sets.lock();
            sets.held = held;
            sets.is_dirty = true;
        }
        match self.is_writer() {
            true => self.store_claims(),
            false => Ok(()),
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
        let _storing = self.storing.lock();
        let _alone = self.writing.write();
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
        *self.files.write() = made.files.into_inner();
        {
            let mut sets = self.sets.lock();
            if !is_same {
                sets.held = PieceSet::none(self.table.len());
                sets.written = PieceSet::none(self.table.len());
            }
            sets.is_dirty = true;
        }
        self.store_claims().map_err(failed)?;
        Ok(true)
    }
}
