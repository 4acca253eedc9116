//! Reasons to replace the host of a span, and to stop waiting for one.

use hearthnet_transport::Code;

use crate::error::ChatError;

/// Failure of one hop.
pub(super) struct HopFailure {
    /// Id of the hop (`Hop::id`).
    pub(super) hop: u64,
    pub(super) code: Code,
    pub(super) error: ChatError,
    pub(super) cause: Cause,
}

/// Cause of a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The host or its stream failed.
    Failed,
    /// The session is lost; the host may be reachable again in a moment.
    Lost,
    /// The host returned implausible rows.
    Corrupt,
    /// The host answers, but too slowly.
    Late,
    /// The host sends nothing at all.
    Silent,
    /// The host is shutting down.
    Leaving {
        /// True while the stream is still served there.
        open: bool,
    },
    /// It preempted the stream, or has no room for a running sequence.
    Preempted,
    /// It has no room for a new sequence.
    NoCapacity,
    /// It is not authorised to compute for this node any more, or convicted.
    Unauthorized,
}

impl Cause {
    /// Returns true if the stream stays on its host when no other host has the layers.
    pub(super) fn stays(self) -> bool {
        matches!(
            self,
            Self::Late | Self::Silent | Self::Leaving { open: true }
        )
    }

    /// Returns true if the caller is notified that the host is degraded.
    pub(super) fn is_told(self) -> bool {
        !matches!(self, Self::Leaving { .. } | Self::NoCapacity)
    }
}

/// Reason that waiting ended without a message.
pub(super) enum Interrupted {
    Cancelled,
    HopFailure(HopFailure),
    /// Index and code of a host that the caller should know it waits for.
    Waiting(usize, Code),
}
