//! What the first pull of a model on this machine found out: a file that the catalogue does not pin
//! must be the same at every later pull.
//!
//! A pin is a small file of its own in the directory of models, `pins/ID.toml`, so that two pulls
//! at once never write the same one. It stays when the model is removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::FileError;
use crate::manifest::{Digest, WeightsId};
use crate::{atomic_file, regular_file};

/// Longest pin that is read: two keys with 64 digits each.
const MAX_BYTES: u64 = 4096;

/// What a model was when it was first pulled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// SHA-256 of the file.
    pub sha256: Digest,
    /// Identity of the weights in it.
    pub weights: WeightsId,
}

/// Why a pin cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is there, and says nothing.
    #[error("{} does not say what the model was: {reason}", path.display())]
    Damaged {
        /// The pin.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Pin {
    /// Where the pin of a model lies.
    pub fn path(models: &Path, id: &str) -> PathBuf {
        models.join("pins").join(format!("{id}.toml"))
    }

    /// The pin of a model, if it was ever pulled.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn read(models: &Path, id: &str) -> Result<Option<Self>, PinError> {
        let path = Self::path(models, id);
        let damaged = |reason: String| PinError::Damaged {
            path: path.clone(),
            reason,
        };
        let text = match regular_file::read_text(&path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => return Ok(None),
                io::ErrorKind::FileTooLarge => return Err(damaged(error.to_string())),
                _ => return Err(FileError::new("read", &path, error).into()),
            },
        };
        let pin = toml::from_str(&text).map_err(|error| damaged(error.message().to_owned()))?;
        Ok(Some(pin))
    }

    /// Keeps the pin of a model.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, models: &Path, id: &str) -> Result<(), FileError> {
        let path = Self::path(models, id);
        let text = format!(
            "sha256 = \"{}\"\nweights = \"{}\"\n",
            self.sha256, self.weights
        );
        let folder = path.parent().unwrap_or(models);
        fs::create_dir_all(folder).map_err(|e| FileError::new("create", folder, e))?;
        atomic_file::write(&path, text.as_bytes()).map_err(|e| FileError::new("write", &path, e))
    }
}
