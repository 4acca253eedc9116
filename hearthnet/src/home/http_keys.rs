//! Named keys for the HTTP interface: a file in the data directory with their names, limits and
//! digests. The keys themselves are stored nowhere.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hearthnet_http::{ApiKey, KeyLimits, NamedKey};
use hearthnet_platform::regular_file;
use serde::{Deserialize, Serialize};

use crate::cli::Failure;
use crate::home::paths::replace_file;

const KEYS_FILE: &str = "http_keys.json";

/// Longest file in bytes: some 5,000 keys.
const MAX_BYTES: u64 = 1 << 20;

/// The file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HttpKeys {
    pub(crate) keys: Vec<HttpKey>,
}

/// A named key.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HttpKey {
    pub(crate) name: String,
    /// Of the key. Keys are random, so a digest does not help to guess one.
    #[serde(with = "hex")]
    pub(crate) sha256: [u8; 32],
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) requests: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_minute: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_day: Option<u64>,
}

impl HttpKeys {
    /// File with the keys of a data directory.
    pub(crate) fn path(dir: &Path) -> PathBuf {
        dir.join(KEYS_FILE)
    }

    /// Keys of a data directory; none without a file.
    ///
    /// # Errors
    /// Text that names the file and the problem.
    pub(crate) fn read(dir: &Path) -> Result<Self, String> {
        let path = Self::path(dir);
        let bytes = match regular_file::read(&path, MAX_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            read => read.map_err(|error| error.to_string()),
        };
        bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))
            .map_err(|why| {
                format!(
                    "the named keys in {} cannot be read: {why}; `hearthnet http-key` writes this file",
                    path.display()
                )
            })
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<(), Failure> {
        let json = serde_json::to_vec_pretty(self).map_err(Failure::internal)?;
        replace_file(&Self::path(dir), &json)
    }

    /// The keys for a listener.
    pub(crate) fn named(self) -> Vec<NamedKey> {
        let named = self.keys.into_iter().map(|key| NamedKey {
            name: key.name,
            key: ApiKey::from_digest(key.sha256),
            limits: KeyLimits {
                requests: key.requests,
                tokens_per_minute: key.tokens_per_minute,
                tokens_per_day: key.tokens_per_day,
            },
        });
        named.collect()
    }
}
