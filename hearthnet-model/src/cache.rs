//! Where models are kept: in the user's cache directory.

use std::path::PathBuf;

/// Neither `XDG_CACHE_HOME` nor `HOME` names an absolute path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no place for models: set HOME or XDG_CACHE_HOME to an absolute path")]
pub struct NoCacheDirectory;

/// This program's directory in the user's cache: `$XDG_CACHE_HOME/hearthnet`, or
/// `$HOME/.cache/hearthnet` where that is not set (XDG Base Directory Specification, which has
/// relative paths ignored). It need not exist yet.
///
/// # Errors
/// When the environment names neither.
pub fn directory() -> Result<PathBuf, NoCacheDirectory> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .map(|cache| cache.join("hearthnet"))
        .ok_or(NoCacheDirectory)
}

/// The directory that holds pulled models, each in a directory named by its id.
///
/// # Errors
/// As [`directory`].
pub fn models() -> Result<PathBuf, NoCacheDirectory> {
    directory().map(|directory| directory.join("models"))
}
