//! Where things live on this machine (XDG base directories).

use std::path::PathBuf;

use hearthnet_bus::NodeKey;

use crate::args::Global;
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

impl Global {
    /// The directory of this node's key and records.
    ///
    /// # Errors
    /// When neither a flag nor the environment names one.
    pub(crate) fn dir(&self) -> Result<PathBuf, Failure> {
        let usual = || xdg("XDG_DATA_HOME", ".local/share").map(|d| d.join("hearthnet"));
        self.data_dir.clone().or_else(usual).ok_or_else(|| {
            Failure::new(
                Kind::Host,
                "there is no home directory to keep this node's key in",
            )
            .hint("name one with --data-dir")
        })
    }

    /// This node's key, made on first use.
    pub(crate) fn node_key(&self) -> Result<NodeKey, Failure> {
        NodeKey::load_or_create(&self.dir()?.join("node.key")).map_err(|e| {
            Failure::new(Kind::Host, e.to_string())
                .hint("--data-dir names another directory for this node's key")
        })
    }
}
