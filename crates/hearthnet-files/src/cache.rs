//! Location of models: the user's cache directory.

use std::path::PathBuf;

/// Neither `XDG_CACHE_HOME` nor `HOME` is an absolute path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no directory for models: set HOME or XDG_CACHE_HOME to an absolute path")]
pub struct NoCacheDirectory;

/// This program's directory in the user's cache: `$XDG_CACHE_HOME/hearthnet`, by default
/// `$HOME/.cache/hearthnet`. Relative paths are ignored, as the XDG Base Directory Specification
/// requires. The directory need not exist yet.
///
/// # Errors
/// Neither variable is usable.
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

/// Directory of pulled models, each in a directory named by its id.
///
/// # Errors
/// As [`directory`].
pub fn models() -> Result<PathBuf, NoCacheDirectory> {
    directory().map(|directory| directory.join("models"))
}
