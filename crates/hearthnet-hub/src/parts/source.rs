//! Sources of pieces.

use std::io;
use std::ops::Range;
use std::time::Duration;

use hearthnet_files::hugging_face::OpenFile;
use hearthnet_files::part::{Identity, Piece};

use crate::pull::SourceError as HttpError;

/// Order in which sources are asked. A piece is asked from a higher rank only if no source of a
/// lower rank that works has it. For the first 2 s of a fetch, a source that has not answered counts
/// as having every piece.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rank {
    /// File or folder of this machine, which a person has named.
    Local,
    /// Member of the community. It may fetch the model at the same time, so its pieces can grow.
    Neighbour,
    /// HTTP server.
    Hub,
}

/// Objects of a model beside its pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Object {
    /// Everything in the model file before the first tensor's data.
    Head,
    Manifest,
    /// SHA-256 of every piece.
    #[strum(serialize = "piece list")]
    PieceList,
}

/// Source of one model's pieces. All calls may block, but must end by a timeout of the source.
/// Calls come from several threads.
pub trait PieceSource: Send + Sync {
    /// Name for people, such as a member's name or an address.
    fn name(&self) -> String;

    fn rank(&self) -> Rank;

    /// Numbers of the pieces that it has. Called again every few seconds.
    ///
    /// # Errors
    /// The source cannot be asked.
    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError>;

    /// Most reads at the same time.
    fn lanes(&self) -> usize {
        match self.rank() {
            Rank::Hub => 4,
            Rank::Local | Rank::Neighbour => 2,
        }
    }

    /// Most pieces per read.
    fn run(&self) -> u32;

    /// Reads pieces, one after the other in the file with at most 256 bytes between two, and returns
    /// the concatenation of their bytes. `None` if it lacks one of them.
    ///
    /// # Errors
    /// The source cannot be read.
    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError>;

    /// Reads up to `len` bytes of an object, at least one. `None` if it does not have the object.
    ///
    /// # Errors
    /// The source cannot be read.
    fn object(
        &self,
        _object: Object,
        _offset: u64,
        _len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        Ok(None)
    }
}

/// Why a source did not deliver.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum SourceError {
    /// A later try may succeed.
    #[error("{0}")]
    Unavailable(String),
    /// It cannot be used for this model.
    #[error("{0}")]
    Unusable(String),
    #[error("it did not give a whole answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// The server answers a request for a byte range with the whole file.
    #[error("the server does not support byte ranges; give another source, or pull the whole file")]
    NoRanges,
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// Longest `Retry-After` of a server that is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

impl SourceError {
    /// Stable code for machines.
    pub fn code(&self) -> &'static str {
        self.into()
    }

    /// Bytes of the failed read that arrived.
    pub(super) fn received(&self) -> u64 {
        match self {
            Self::Http(HttpError::Interrupted { done, .. }) => *done,
            _ => 0,
        }
    }

    /// Least time until another read may succeed; `None` if none will.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable(_) => Some(Duration::ZERO),
            Self::Http(HttpError::Busy { retry_after, .. }) => {
                Some(retry_after.unwrap_or_default()).filter(|wait| *wait <= LONGEST_WAIT)
            }
            Self::Http(error) if error.may_pass() => Some(Duration::ZERO),
            _ => None,
        }
    }
}

/// Most bytes of an object per read of a whole file.
pub(super) const MAX_OBJECT_READ: u32 = 8 << 20;

/// Most pieces per read of a whole file: 8 MiB.
pub(super) const WHOLE_FILE_RUN: u32 = 32;

/// Numbers of the pieces of a whole file, however many it has.
pub(super) fn all_pieces() -> Vec<Range<u32>> {
    std::iter::once(0..u32::MAX).collect()
}

/// Reads the pieces of a run; `range` reads bytes of the whole file, from a position, so many.
pub(super) fn read_run(
    run: &[Piece],
    range: impl FnOnce(u64, u64) -> Result<Vec<u8>, SourceError>,
) -> Result<Option<Vec<u8>>, SourceError> {
    let (from, len) = span_of(run);
    Ok(Some(cut_out(run, range(from, len)?)))
}

/// Reads an object of a source that has only the head. `range` reads a number of bytes of the head.
pub(super) fn read_head(
    object: Object,
    len: u32,
    range: impl FnOnce(u64) -> Result<Vec<u8>, SourceError>,
) -> Result<Option<Vec<u8>>, SourceError> {
    match object {
        Object::Head if len > 0 => range(len.min(MAX_OBJECT_READ).into()).map(Some),
        _ => Ok(None),
    }
}

/// Up to `len` bytes of the adopted file from a position on, as far as the file goes.
pub(super) fn read_range(
    file: &dyn OpenFile,
    identity: &Identity,
    from: u64,
    len: u64,
) -> Result<Vec<u8>, SourceError> {
    let len = len.min(identity.file_bytes.saturating_sub(from));
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    file.read_at(&mut bytes, from)?;
    Ok(bytes)
}

/// First position and length of a run in the file.
fn span_of(run: &[Piece]) -> (u64, u64) {
    let from = run.first().map_or(0, |first| first.offset);
    let end = run
        .last()
        .map_or(0, |last| last.offset.saturating_add(u64::from(last.len)));
    (from, end.saturating_sub(from))
}

/// Removes the bytes between the pieces of a run from those of its span.
fn cut_out(run: &[Piece], mut span: Vec<u8>) -> Vec<u8> {
    let (from, _) = span_of(run);
    let mut end = 0;
    for piece in run {
        let start = usize::try_from(piece.offset.saturating_sub(from)).unwrap_or(usize::MAX);
        let stop = start.saturating_add(piece.len as usize);
        if end <= start && stop <= span.len() {
            span.copy_within(start..stop, end);
            end += piece.len as usize;
        }
    }
    span.truncate(end);
    span
}
