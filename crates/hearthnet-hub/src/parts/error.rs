//! Errors of a fetch, and sources that it stopped using.

use std::fmt;
use std::io;

use hearthnet_files::part::PartError;

use super::source::{Object, Rank, SourceError};

/// Source that a fetch stopped using.
#[derive(Debug)]
pub struct Dropped {
    pub source: String,
    pub rank: Rank,
    pub why: Why,
}

/// Why a fetch stopped using a source.
#[derive(Debug)]
pub enum Why {
    /// It sent other bytes than those of the adopted model.
    Mismatch(
        /// Piece or object.
        String,
    ),
    Failed(SourceError),
}

impl Dropped {
    /// Whether the source sent other bytes than those of the adopted model.
    pub fn is_liar(&self) -> bool {
        matches!(self.why, Why::Mismatch(_))
    }
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = &self.source;
        match &self.why {
            Why::Mismatch(what) if self.rank == Rank::Neighbour => write!(
                f,
                "{source} sent wrong bytes for {what} (its disk may be damaged)"
            ),
            Why::Mismatch(what) => write!(
                f,
                "the file at {source} is not the adopted model: {what} differs"
            ),
            Why::Failed(error) => write!(f, "{source}: {error}"),
        }
    }
}

/// Why a fetch ended without all pieces. Verified pieces are kept, and the next fetch continues.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum FetchError {
    #[error(
        "no source has the missing {missing_bytes} bytes of the model ({}): connect to a neighbour \
         that has them or to the network, or bring the model file on a drive",
        list(asked)
    )]
    NoSource {
        missing_bytes: u64,
        /// Each source, with what it lacks or why it failed.
        asked: Vec<String>,
    },
    #[error(
        "no source has the {object} of the model ({}): connect to a neighbour that has the model, \
         or bring the model file on a drive",
        list(asked)
    )]
    NoObject {
        object: Object,
        /// Each source, with why it did not deliver.
        asked: Vec<String>,
    },
    #[error(
        "the disk has {} bytes free, and {needed} are needed; free some space, or hold fewer layers",
        free.map_or_else(|| "too few".to_owned(), |free| free.to_string())
    )]
    DiskFull {
        free: Option<u64>,
        /// Bytes still to be stored.
        needed: u64,
    },
    #[error(transparent)]
    Part(#[from] PartError),
    #[error("the pieces cannot be made durable: {0}")]
    Sync(io::Error),
    #[error("no thread for the transfer: {0}")]
    Thread(io::Error),
    #[error("stopped")]
    Stopped,
}

impl FetchError {
    /// Stable code for machines.
    pub fn code(&self) -> &'static str {
        self.into()
    }
}

fn list(asked: &[String]) -> String {
    match asked.is_empty() {
        true => "there is no source".to_owned(),
        false => asked.join("; "),
    }
}
