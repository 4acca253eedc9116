//! Files and folders of this machine as sources, such as those on a USB drive.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hearthnet_files::ModelFile;
use hearthnet_files::manifest::{Manifest, WeightsId};
use hearthnet_files::part::{Part, Piece, identity_of};
use hearthnet_platform::files::read_exact_at;
use hearthnet_platform::regular_file;

use super::source::{
    MAX_OBJECT_READ, Object, PieceSource, Rank, SourceError, WHOLE_FILE_RUN, all_pieces, read_run,
};
use crate::pull::SourceError as HttpError;

/// Whole model file.
pub struct FileSource {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    /// Manifest and piece list, once computed.
    objects: Mutex<Option<(Vec<u8>, Vec<u8>)>>,
}

impl FileSource {
    /// `file_bytes` is the length of the adopted file.
    ///
    /// # Errors
    /// The file cannot be opened, or has another length.
    pub fn open(path: &Path, file_bytes: u64) -> Result<Self, SourceError> {
        let file = regular_file::open(path)?;
        let found = file.metadata()?.len();
        let expected = file_bytes;
        if found != expected {
            return Err(HttpError::Length { expected, found }.into());
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            file_bytes,
            objects: Mutex::default(),
        })
    }

    fn range(&self, from: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        let len = len.min(self.file_bytes.saturating_sub(from));
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        read_exact_at(&self.file, &mut bytes, from)?;
        Ok(bytes)
    }

    /// Manifest and piece list. Hashes the whole file.
    fn compute(&self) -> Result<(Vec<u8>, Vec<u8>), SourceError> {
        let unusable = |error: &dyn std::fmt::Display| SourceError::Unusable(error.to_string());
        let model = ModelFile::open(&self.path).map_err(|error| unusable(&error))?;
        let manifest = Manifest::of(&model, &mut |_, _| {});
        let identity = identity_of(&model, &manifest, &mut |_, _| {});
        let (_, pieces) = identity.map_err(|error| unusable(&error))?;
        Ok((manifest.encode(), pieces))
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

    fn lanes(&self) -> usize {
        2
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
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let (manifest, pieces) = match &mut *objects {
            Some(objects) => objects,
            none => none.insert(self.compute()?),
        };
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
        let part = part.map_err(|error| SourceError::Unusable(error.to_string()))?;
        let found = part.identity().weights;
        match found == *weights {
            true => Ok(Self(part)),
            false => Err(SourceError::Unusable(format!(
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

    fn lanes(&self) -> usize {
        2
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
