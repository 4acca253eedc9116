//! Pins: results of the first pull of a model on this machine. A file that the catalogue does not
//! pin must be the same in every later pull.
//!
//! Each pin is a file `pins/ID.toml` in the directory of models, so that parallel pulls never write
//! the same file. It is kept when the model is removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hearthnet_files::FileError;
use hearthnet_files::manifest::{Digest, WeightsId};
use hearthnet_platform::{regular_file, whole_file};
use serde::Deserialize;

/// Longest accepted pin: two keys with 64 digits each.
const MAX_BYTES: u64 = 4096;

/// State of a model at its first pull.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    pub sha256: Digest,
    pub weights: WeightsId,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not a valid pin.
    #[error("{} is not a valid pin: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
}

impl Pin {
    /// Path of the pin of a model.
    pub fn path(models: &Path, id: &str) -> PathBuf {
        models.join("pins").join(format!("{id}.toml"))
    }

    /// Reads the pin of a model; `None` if the model was never pulled.
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

    /// Stores the pin of a model.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, models: &Path, id: &str) -> Result<(), FileError> {
        let path = Self::path(models, id);
        let text = format!(
            "sha256 = \"{}\"\nweights = \"{}\"\n",
            self.sha256, self.weights
        );
        let folder = path.parent().unwrap_or(models);
        fs::create_dir_all(folder).map_err(|e| FileError::new("create", folder, e))?;
        whole_file::write(&path, text.as_bytes()).map_err(|e| FileError::new("write", &path, e))
    }
}
