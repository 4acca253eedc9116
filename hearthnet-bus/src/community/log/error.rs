//! Errors of the log, and reasons for refusing events.

use std::io;
use std::path::{Path, PathBuf};

use super::body::EventError;
use super::event::MAX_AHEAD_MS;
use super::fold::NoEffect;
use crate::{CommunityId, NodeId, RandomnessError};
use hearthnet_transport::Code;

/// Reason why an operation on the log failed. A failed operation changes nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// There is no log in this folder.
    #[error(
        "this machine is in no community yet ({} is missing); make one with `hearthnet community \
         create`, or join one with `hearthnet community join`",
        path.display()
    )]
    NoCommunity { path: PathBuf },
    /// The folder already has a log, of this or another community.
    #[error(
        "{} holds a community's log already; a data directory has one community",
        path.display()
    )]
    Exists { path: PathBuf },
    #[error("{} was written by a newer hearthnet (format {found}); update this one", path.display())]
    Format {
        path: PathBuf,
        /// Format version in the file.
        found: i64,
    },
    /// The log cannot be written now: the disk is full or fails. Reading still works, and each call
    /// tries to write again.
    #[error("the event log cannot be written: {reason}; events written so far are safe")]
    ReadOnly {
        /// Error text of the system.
        reason: String,
    },
    #[error("the event log is busy: another hearthnet process has been writing for 5 s")]
    Busy,
    #[error("the event log is damaged: {what}")]
    Corrupt { what: String },
    /// The event would change nothing, or its author may not make it.
    #[error(transparent)]
    NoEffect(#[from] NoEffect),
    /// The event is malformed.
    #[error(transparent)]
    Event(#[from] EventError),
    /// Two histories were signed with this key, so other nodes reject its events.
    #[error(
        "two histories were signed with the key {author}: was it copied to two machines, or an \
         old backup restored? Its events no longer count; make a new key and join again"
    )]
    Frozen { author: NodeId },
    /// The log lacks some of this key's own events, or was restored after damage. A new event could
    /// reuse the number of an event that other nodes have.
    #[error(
        "some of this machine's own events may be missing; connect to the other members of the \
         community first, which send them"
    )]
    Behind { author: NodeId },
    /// The clock of this machine differs too much from those of the other members. They would
    /// reject events dated by it.
    #[error(
        "this machine's clock is {} min {} that of the other members, which would refuse its events, \
         so nothing is written",
        offset_ms.unsigned_abs() / 60_000,
        match offset_ms.is_negative() { true => "ahead of", false => "behind" }
    )]
    Clock {
        /// Offset of the other members' clocks from this one, in ms; positive: they are ahead.
        offset_ms: i64,
    },
    /// The author's quota of durable events is used up.
    #[error("{author} has used up its quota of the event log")]
    Quota { author: NodeId },
    #[error("could not {action} {}: {source}", path.display())]
    Io {
        /// The failed operation, as a verb for the message.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("the system cannot start a thread for the event log: {0}")]
    Thread(#[source] io::Error),
    #[error("could not write the export: {0}")]
    Export(#[source] io::Error),
    /// The system provided no randomness for the keys of a new community.
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
    /// SQLite failed in a way that no other variant describes.
    #[error("the event log's database failed: {0}")]
    Database(#[source] rusqlite::Error),
}

impl LogError {
    /// Stable code of the error.
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
    pub(super) fn corrupt(what: &str) -> Self {
        Self::Corrupt { what: what.into() }
    }

    /// Returns a closure for `map_err` that adds the operation and the file.
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
            // Values that this program never writes: a key of another length, a negative number.
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

/// Reason why a received event was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The bytes are not a well-formed event, or its author did not sign it.
    #[error(transparent)]
    Invalid(#[from] EventError),
    #[error("this event belongs to the community {0}")]
    Foreign(CommunityId),
    /// The event's time is more than [`MAX_AHEAD_MS`] ahead of this machine's clock. It may be
    /// accepted later, or together with the author's next event.
    #[error(
        "this event is dated {ahead_ms} ms ahead, more than {MAX_AHEAD_MS}; compare the clocks \
         of the machines"
    )]
    Time {
        /// Milliseconds ahead of this machine's clock.
        ahead_ms: u64,
    },
    /// The ephemeral event expired, or its slot has a newer one.
    #[error("this event expired, or a newer one replaced it")]
    Stale,
    /// The event lies beyond the fork of its author's history, and the proof of the fork is
    /// complete.
    #[error("{author} signed two histories and is frozen")]
    Fork { author: NodeId },
    /// The author's quota, or the quota of all strangers together, is used up.
    #[error("{author} has used up its quota of the event log")]
    Quota { author: NodeId },
}

impl Refusal {
    /// Stable code of the refusal.
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

#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogHealth {
    Ok,
    /// The disk is full or fails. Reading still works, and acknowledged events are safe. Writing is
    /// retried with each call and every second, so this state ends by itself.
    ReadOnly {
        /// Error text of the system.
        reason: String,
        /// Start of the state, in Unix milliseconds.
        since_ms: u64,
    },
    /// The file was found damaged while in use. The next start of the program repairs it.
    Damaged {
        what: String,
        /// Time of the discovery, in Unix milliseconds.
        since_ms: u64,
    },
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rusqlite::Connection;

    use super::*;

    #[test]
    fn a_log_that_another_process_writes_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.sqlite");
        let [writes, waits] = [(); 2].map(|()| Connection::open(&path).unwrap());
        waits.busy_timeout(Duration::ZERO).unwrap();
        writes.execute_batch("begin exclusive").unwrap();
        let refused = waits.execute_batch("create table t (a)").unwrap_err();
        assert_eq!(LogError::from(refused).code(), "log_busy");
        writes.execute_batch("rollback").unwrap();
        waits.execute_batch("create table t (a)").unwrap();
    }
}
