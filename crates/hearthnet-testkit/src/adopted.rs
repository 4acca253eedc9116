//! Adopted models, and parts that hold their pieces.

use std::ops::Range;
use std::path::{Path, PathBuf};

use hearthnet_files::part::{Identity, Part, PartError, identity_of};
use hearthnet_files::{Manifest, ModelFile};
use tempfile::TempDir;

/// Model with the objects of its adoption, and an empty folder of parts.
#[derive(Debug)]
pub struct Adopted {
    pub model: ModelFile,
    /// Bytes of the model file; of a split model, of the joined one.
    pub file: Vec<u8>,
    pub manifest: Manifest,
    pub identity: Identity,
    /// Piece list.
    pub pieces: Vec<u8>,
    /// Folder of the parts of a node.
    pub parts: TempDir,
}

impl Adopted {
    /// # Panics
    /// If the model cannot be adopted, or no folder can be made.
    pub fn of(model: ModelFile) -> Self {
        let manifest = Manifest::of(&model, &mut |_, _| {});
        let adopted = identity_of(&model, &manifest, &mut |_, _| {});
        let (identity, pieces) = adopted.expect("a model that can be adopted");
        let mut file = Vec::new();
        let joined = model.gguf().write_joined(&mut file);
        joined.expect("memory takes all bytes");
        Self {
            model,
            file,
            manifest,
            identity,
            pieces,
            parts: TempDir::new().expect("a temporary folder"),
        }
    }

    pub fn head(&self) -> &[u8] {
        &self.file[..self.identity.head_bytes as usize]
    }

    /// Folder of the part in [`Self::parts`].
    pub fn path(&self) -> PathBuf {
        Part::folder_in(self.parts.path(), &self.identity.weights)
    }

    /// Opens the part in [`Self::parts`], and makes it if it is missing.
    ///
    /// # Errors
    /// As [`Part::create`].
    pub fn create(&self) -> Result<Part, PartError> {
        self.create_in(self.parts.path())
    }

    /// As [`Self::create`], in another folder of parts.
    ///
    /// # Errors
    /// As [`Part::create`].
    pub fn create_in(&self, parts: &Path) -> Result<Part, PartError> {
        let manifest = self.manifest.encode();
        Part::create(parts, &self.identity, self.head(), &manifest, &self.pieces)
    }

    /// Bytes of a piece.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn bytes(&self, part: &Part, index: u32) -> &[u8] {
        let piece = part.table().piece(index).expect("a piece of the model");
        &self.file[piece.offset as usize..][..piece.len as usize]
    }

    /// Stores the wanted pieces that a part lacks.
    ///
    /// # Panics
    /// If they cannot be stored.
    pub fn fetch(&self, part: &Part, wanted: &[Range<u32>]) {
        for index in part.missing(wanted).into_iter().flatten() {
            let stored = part.write(index, self.bytes(part, index));
            stored.expect("a part that takes the piece");
        }
        part.sync().expect("a part on a sound disk");
    }

    /// Asserts that a part holds the wanted pieces, with the bytes of the file.
    ///
    /// # Panics
    /// If it does not.
    pub fn assert_holds(&self, part: &Part, wanted: &[Range<u32>]) {
        assert_eq!(part.missing(wanted), []);
        for index in wanted.iter().cloned().flatten() {
            let held = part.read(index).expect("a part on a sound disk");
            assert!(
                held.as_deref() == Some(self.bytes(part, index)),
                "piece {index}"
            );
        }
    }
}
