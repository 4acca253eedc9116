//! What makes a span need another host, and what follows from it.

use hearthnet_transport::Code;

use crate::error::ChatError;

/// Why a span needs another host.
pub(super) struct HopFailure {
    /// Which hop (`Hop::id`).
    pub(super) hop: u64,
    pub(super) code: Code,
    pub(super) error: ChatError,
    pub(super) cause: Cause,
}

/// Why a host is to be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// It has failed.
    Failed,
    /// The session with it is gone: it may be there again in a moment.
    Lost,
    /// It returned what cannot be right.
    Corrupt,
    /// It does its work, only late.
    Late,
    /// Nothing at all comes from it.
    Silent,
    /// It is about to stop.
    Leaving {
        /// Whether the stream still goes on there.
        open: bool,
    },
    /// It took the stream's memory for others, or has none for it.
    Room,
    /// It has none for a sequence that begins.
    Full,
    /// It lost the right to see what others compute.
    Barred,
}

impl Cause {
    /// Whether the stream stays where it is when nobody else has its layers.
    pub(super) fn stays(self) -> bool {
        matches!(
            self,
            Self::Late | Self::Silent | Self::Leaving { open: true }
        )
    }

    /// Whether whoever asks hears of it: the host has failed, or lost its right.
    pub(super) fn is_told(self) -> bool {
        !matches!(self, Self::Leaving { .. } | Self::Full)
    }
}
