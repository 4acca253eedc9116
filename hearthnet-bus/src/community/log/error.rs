//! What can go wrong with a log, and why events are refused.

use std::io;
use std::path::{Path, PathBuf};

use super::body::EventError;
use super::event::MAX_AHEAD_MS;
use super::fold::NoEffect;
use crate::{CommunityId, NodeId, RandomnessError};
use hearthnet_transport::Code;

/// Why an operation on the log failed. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// There is no log in this folder.
    #[error(
        "this machine is in no community yet ({} is missing); make one with `hearthnet community \
         create`, or join one with `hearthnet community join`",
        path.display()
    )]
    NoCommunity {
        /// The file that was looked for.
        path: PathBuf,
    },
    /// There is a log in this folder already, of this or another community.
    #[error(
        "{} holds a community's log already; a data directory has one community",
        path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file was written by a newer program.
    #[error("{} was written by a newer hearthnet (format {found}); update this one", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The format that it says it has.
        found: i64,
    },
    /// The log cannot be written at the moment: the disk is full, or it fails. Reading goes
    /// on, and writing is tried again with each call.
    #[error("the event log cannot be written: {reason}; what was acknowledged is safe")]
    ReadOnly {
        /// What the system says.
        reason: String,
    },
    /// Another process held the file for longer than five seconds.
    #[error("the event log is busy: another hearthnet process has been writing for 5 s")]
    Busy,
    /// The file is damaged.
    #[error("the event log is damaged: {what}")]
    Corrupt {
        /// What was found.
        what: String,
    },
    /// The event would change nothing, or its author may not make it.
    #[error(transparent)]
    NoEffect(#[from] NoEffect),
    /// The event is not one that can stand in a log.
    #[error(transparent)]
    Event(#[from] EventError),
    /// Two histories were signed with this key, so nobody takes its events any more.
    #[error(
        "two histories were signed with the key {author}: was it copied to two machines, or an \
         old backup restored? Its events no longer count; make a new key and join again"
    )]
    Frozen {
        /// Key of the author.
        author: NodeId,
    },
    /// The log has later events by this key, but not all before them, or was restored after
    /// damage: a new event could take the place of one that others have.
    #[error(
        "this machine's own events are not all back yet; connect to a member of the community \
         first"
    )]
    Behind {
        /// Key of the author.
        author: NodeId,
    },
    /// The clock of this machine is too far from those of the members that were heard: others would
    /// not take what is written by it.
    #[error(
        "this machine's clock is {} min {} that of the other members, so nothing is written: others \
         would not take it",
        offset_ms.unsigned_abs() / 60_000,
        match offset_ms.is_negative() { true => "ahead of", false => "behind" }
    )]
    Clock {
        /// How far theirs are ahead, in milliseconds; negative: behind.
        offset_ms: i64,
    },
    /// This author has used up its part of the log.
    #[error("{author} has written as much to the log as one author may")]
    Quota {
        /// Key of the author.
        author: NodeId,
    },
    /// The file system refused.
    #[error("could not {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or folder that was to be used.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system gave no thread for the log.
    #[error("the system gives no thread to watch the event log: {0}")]
    Thread(#[source] io::Error),
    /// What was to be exported could not be written.
    #[error("could not write the export: {0}")]
    Export(#[source] io::Error),
    /// No randomness for a key, where a community is founded.
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
    /// SQLite failed in a way that none of the above describes.
    #[error("the event log's database failed: {0}")]
    Database(#[source] rusqlite::Error),
}

impl LogError {
    /// The stable code.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::NoCommunity { .. } => "no_community",
            Self::Exists { .. } => "community_exists",
            Self::ReadOnly { .. } => "log_read_only",
            Self::Busy => "log_busy",
            Self::Corrupt { .. } => "log_corrupt",
            Self::NoEffect(why) => return why.code(),
            Self::Event(why) => return why.code(),
            Self::Frozen { .. } => "log_fork",
            Self::Behind { .. } => "log_behind",
            Self::Clock { .. } => "clock_wrong",
            Self::Quota { .. } => "log_quota",
            Self::Format { .. }
            | Self::Io { .. }
            | Self::Export(_)
            | Self::Thread(_)
            | Self::Randomness(_)
            | Self::Database(_) => "log_failed",
        })
    }
}

impl LogError {
    /// What was found in a damaged file.
    pub(super) fn corrupt(what: &str) -> Self {
        Self::Corrupt { what: what.into() }
    }

    /// For `map_err`: what was tried with which file.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

impl From<rusqlite::Error> for LogError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::Error;
        use rusqlite::ErrorCode;
        match error.sqlite_error_code() {
            Some(
                ErrorCode::DiskFull
                | ErrorCode::SystemIoFailure
                | ErrorCode::ReadOnly
                | ErrorCode::CannotOpen
                | ErrorCode::PermissionDenied,
            ) => Self::ReadOnly {
                reason: error.to_string(),
            },
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Corrupt {
                what: error.to_string(),
            },
            // A value that no program of ours wrote: a key of another length, a negative number.
            None if matches!(
                error,
                Error::FromSqlConversionFailure(..)
                    | Error::IntegralValueOutOfRange(..)
                    | Error::InvalidColumnType(..)
            ) =>
            {
                Self::corrupt(&error.to_string())
            }
            _ => Self::Database(error),
        }
    }
}

/// Why a received event was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Not an event, or not signed by its author.
    #[error(transparent)]
    Invalid(#[from] EventError),
    /// An event of another community.
    #[error("this event belongs to the community {0}")]
    Foreign(CommunityId),
    /// Its time is more than [`MAX_AHEAD_MS`] ahead of this machine's clock. It may be taken
    /// later, or with what its author wrote after it.
    #[error(
        "this event is dated {ahead_ms} ms ahead, more than {MAX_AHEAD_MS}; compare the clocks \
         of the machines"
    )]
    Time {
        /// How far ahead.
        ahead_ms: u64,
    },
    /// An ephemeral event that expired, or that a newer one in its slot replaced.
    #[error("this event expired, or a newer one replaced it")]
    Stale,
    /// Its author signed two histories; this event lies beyond where they part, and the proof
    /// is complete.
    #[error("{author} signed two histories, and is frozen")]
    Fork {
        /// Key of the author.
        author: NodeId,
    },
    /// Its author, or strangers together, have used up their part of the log.
    #[error("{author} has written as much to the log as it may")]
    Quota {
        /// Key of the author.
        author: NodeId,
    },
}

impl Refusal {
    /// The stable code, as in the list of attacks.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::Invalid(why) => return why.code(),
            Self::Foreign(_) => "log_foreign",
            Self::Time { .. } => "log_time",
            Self::Stale => "log_stale",
            Self::Fork { .. } => "log_fork",
            Self::Quota { .. } => "log_quota",
        })
    }
}

/// Whether the log can be written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogHealth {
    /// It can.
    Ok,
    /// It cannot, because the disk is full or fails. Reading goes on; what was acknowledged
    /// is safe. Writing is tried again with each call and every second in between, so this
    /// ends by itself.
    ReadOnly {
        /// What the system says.
        reason: String,
        /// Since when, in Unix milliseconds.
        since_ms: u64,
    },
    /// The file was found damaged while it was in use. It is repaired when the program is
    /// started again.
    Damaged {
        /// What was found.
        what: String,
        /// Since when, in Unix milliseconds.
        since_ms: u64,
    },
}
