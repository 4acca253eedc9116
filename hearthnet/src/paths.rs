//! Where things live on this machine (XDG base directories).

use std::path::PathBuf;

use crate::failure::{Failure, Kind};

/// `$VARIABLE`, or `~/FALLBACK`; `None` without a home.
pub(crate) fn xdg(variable: &str, fallback: &str) -> Option<PathBuf> {
    let set = std::env::var_os(variable)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from);
    set.or_else(|| {
        std::env::var_os("HOME")
            .filter(|v| !v.is_empty())
            .map(|h| PathBuf::from(h).join(fallback))
    })
}

/// The directory of this node's key and records.
///
/// # Errors
/// When neither a flag nor the environment names one.
pub(crate) fn data_dir(flag: Option<PathBuf>) -> Result<PathBuf, Failure> {
    flag.or_else(|| xdg("XDG_DATA_HOME", ".local/share").map(|d| d.join("hearthnet")))
        .ok_or_else(|| {
            Failure::new(
                Kind::Host,
                "there is no home directory to keep this node's key in",
            )
            .hint("name one with --data-dir")
        })
}
