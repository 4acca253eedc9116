//! Files and folders of this machine as sources, such as those on a USB drive.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearthnet_files::gguf::files_of;
use hearthnet_files::hugging_face::OpenFile;
use hearthnet_files::joined::open_joined_at;
use hearthnet_files::manifest::{Digest, WeightsId};
use hearthnet_files::part::{Identity, Part, Piece, objects_of};
use hearthnet_platform::files::{FileState, file_state};
use parking_lot::Mutex;

use super::directory::{DirectorySource, failed};
use super::source::{
    MAX_OBJECT_READ, Object, PieceSource, Rank, SourceError, WHOLE_FILE_RUN, all_pieces,
    read_range, read_run,
};
use crate::source::CONFIG;

/// Most entries of a folder among which a model file is looked for.
const MAX_ENTRIES: usize = 1000;

fn unusable(why: impl ToString) -> SourceError {
    SourceError::Unusable(why.to_string())
}

/// Manifest and piece list of the file that was hashed last, for as long as its files are unchanged.
type Hashed = Arc<Mutex<Option<(Vec<FileState>, (Vec<u8>, Vec<u8>))>>>;

/// Whole model file, or the files of a split model, by the first. They are read and never mapped,
/// because their drive may be pulled out.
pub struct FileSource {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    identity: Identity,
    hashed: Hashed,
}

impl FileSource {
    /// # Errors
    /// The file cannot be opened, or has another length or head than the adopted one.
    pub fn open(path: &Path, identity: &Identity) -> Result<Self, SourceError> {
        Self::open_with(path, identity, Hashed::default())
    }

    fn open_with(path: &Path, identity: &Identity, hashed: Hashed) -> Result<Self, SourceError> {
        identity.check_lengths().map_err(unusable)?;
        let file = open_joined_at(path, identity.head_bytes).map_err(failed)?;
        let found = file.bytes();
        if found != identity.file_bytes {
            return Err(unusable(format!(
                "it is another file than the adopted model: it has {found} bytes instead of {}",
                identity.file_bytes
            )));
        }
        let this = Self {
            path: path.to_owned(),
            file,
            identity: *identity,
            hashed,
        };
        match Digest::of(&this.head()?) == identity.head {
            true => Ok(this),
            false => Err(unusable(
                "it is another file than the adopted model: its metadata differ",
            )),
        }
    }

    fn head(&self) -> Result<Vec<u8>, SourceError> {
        self.range(0, self.identity.head_bytes)
    }

    fn range(&self, from: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        read_range(&*self.file, &self.identity, from, len)
    }

    /// Manifest and piece list. Hashes the whole file.
    fn compute(&self) -> Result<(Vec<u8>, Vec<u8>), SourceError> {
        objects_of(&*self.file, self.head()?).map_err(unusable)
    }

    /// States of the files.
    fn states(&self) -> io::Result<Vec<FileState>> {
        let files = files_of(&self.path).into_iter();
        files
            .map(|path| Ok(file_state(&fs::metadata(path)?)))
            .collect()
    }
}

impl PieceSource for FileSource {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn rank(&self) -> Rank {
        Rank::Local
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        Ok(all_pieces())
    }

    fn run(&self) -> u32 {
        WHOLE_FILE_RUN
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        read_run(run, |from, len| self.range(from, len))
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        if object == Object::Head {
            return self
                .range(offset, u64::from(len.min(MAX_OBJECT_READ)))
                .map(Some);
        }
        let state = self.states()?;
        let mut hashed = self.hashed.lock();
        let known = hashed.take().filter(|(of, _)| *of == state);
        let (_, (manifest, pieces)) = hashed.insert(match known {
            Some(known) => known,
            None => (state, self.compute()?),
        });
        let bytes = match object {
            Object::Manifest => manifest,
            _ => pieces,
        };
        Ok(Some(cut(bytes, offset, len)))
    }
}

/// Up to `len` bytes from `offset` on.
fn cut(bytes: &[u8], offset: u64, len: u32) -> Vec<u8> {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = bytes.get(offset..).unwrap_or_default();
    rest.get(..len as usize).unwrap_or(rest).to_vec()
}

/// Part of the model in another folder.
pub struct FolderSource(Part);

impl FolderSource {
    /// Opens the folder of a part, which holds the files `model.gguf` and `held`.
    ///
    /// # Errors
    /// It is no part, or one of another model.
    pub fn open(folder: &Path, weights: &WeightsId) -> Result<Self, SourceError> {
        let part = Part::open_reading(folder);
        let part = part.map_err(unusable)?;
        let found = part.identity().weights;
        match found == *weights {
            true => Ok(Self(part)),
            false => Err(unusable(format!(
                "it is a part of another model (weights {found} instead of {weights})"
            ))),
        }
    }
}

impl PieceSource for FolderSource {
    fn name(&self) -> String {
        self.0.folder().display().to_string()
    }

    fn rank(&self) -> Rank {
        Rank::Local
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        Ok(self.0.held())
    }

    fn run(&self) -> u32 {
        8
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        let mut bytes = Vec::new();
        for piece in run {
            match self.0.read(piece.index)? {
                Some(more) => bytes.extend(more),
                None => return Ok(None),
            }
        }
        Ok(Some(bytes))
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        Ok(Some(match object {
            Object::Head => self.0.head(offset, len.min(MAX_OBJECT_READ))?,
            Object::Manifest => cut(self.0.manifest_bytes(), offset, len),
            Object::PieceList => cut(self.0.table().list(), offset, len),
        }))
    }
}

/// Path of a model file, of a part's folder, of a folder that holds one of them, such as a drive, or
/// of a Hugging Face directory.
/// It is opened with its first use.
pub struct LocalSource {
    path: PathBuf,
    identity: Identity,
    /// Folder of all parts of this node.
    parts: PathBuf,
    found: Mutex<Option<Arc<dyn PieceSource>>>,
    hashed: Hashed,
}

impl LocalSource {
    /// `parts` is the folder of all parts of this node.
    pub fn new(path: &Path, identity: &Identity, parts: &Path) -> Self {
        Self {
            path: path.to_owned(),
            identity: *identity,
            parts: parts.to_owned(),
            found: Mutex::default(),
            hashed: Hashed::default(),
        }
    }

    /// The same path, to be opened anew, as its drive may have come back. A whole file that is
    /// unchanged is not hashed again.
    pub fn again(&self) -> Self {
        Self {
            hashed: Arc::clone(&self.hashed),
            ..Self::new(&self.path, &self.identity, &self.parts)
        }
    }

    /// Opens it.
    ///
    /// # Errors
    /// There is nothing of the adopted model.
    pub fn open(&self) -> Result<(), SourceError> {
        self.found().map(drop)
    }

    fn found(&self) -> Result<Arc<dyn PieceSource>, SourceError> {
        let mut found = self.found.lock();
        Ok(match &mut *found {
            Some(found) => Arc::clone(found),
            none => Arc::clone(none.insert(self.find()?)),
        })
    }

    /// The part of the model, or its whole file, at the path or in the folder.
    fn find(&self) -> Result<Arc<dyn PieceSource>, SourceError> {
        let (path, identity) = (self.path.as_path(), &self.identity);
        let whole = |file: &Path| FileSource::open_with(file, identity, Arc::clone(&self.hashed));
        let id = identity.weights.to_string();
        // The folder of a part has the name of its model, and its file has holes.
        let folders = match path.is_dir() {
            true => vec![
                path.to_owned(),
                path.join(&id),
                path.join("parts").join(&id),
            ],
            false => path.parent().map(Path::to_owned).into_iter().collect(),
        };
        let is_part = |folder: &PathBuf| folder.ends_with(&id) && folder.is_dir();
        if let Some(folder) = folders.into_iter().find(is_part) {
            return Ok(Arc::new(FolderSource::open(&folder, &identity.weights)?));
        }
        if !path.is_dir() {
            return Ok(Arc::new(whole(path)?));
        }
        let entries = fs::read_dir(path)?.take(MAX_ENTRIES).flatten();
        let files = entries.map(|entry| entry.path());
        let mut files = files.filter(|file| file.extension().is_some_and(|ext| ext == "gguf"));
        match files.find_map(|file| whole(&file).ok()) {
            Some(file) => Ok(Arc::new(file)),
            None if path.join(CONFIG).is_file() => {
                let directory = DirectorySource::in_folder(path, identity, &self.parts);
                Ok(Arc::new(directory))
            }
            None => Err(unusable(format!(
                "there is neither the file of the adopted model ({} bytes), nor a part of it, nor a \
                 Hugging Face directory",
                identity.file_bytes
            ))),
        }
    }
}

impl PieceSource for LocalSource {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn rank(&self) -> Rank {
        Rank::Local
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        self.found()?.pieces()
    }

    fn run(&self) -> u32 {
        8
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        self.found()?.read(run)
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        self.found()?.object(object, offset, len)
    }
}
