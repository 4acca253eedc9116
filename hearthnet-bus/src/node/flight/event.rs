//! Events of the flight record.

use crate::NodeId;
use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use super::ids::{Name, PipelineId, SessionId};

/// Name of one epoch of a stream, which both ends know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct StreamTrace {
    pub session: SessionId,
    pub stream: u32,
    pub epoch: u32,
}

/// An event of a pipeline, a stream, a session or a node. It holds codes, ids and numbers, and no
/// text of a user.
///
/// In JSON it is an object with the field `kind`. An unknown kind from another node becomes
/// [`Event::Unknown`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    // The caller's side.
    /// A route was found and all of its streams are open.
    PipelineBuilt {
        pipeline: PipelineId,
        /// Number of hosts in the route; 0 if this machine runs all layers.
        hosts: u32,
        /// Time from the search for hosts to the last open stream, in milliseconds.
        ms: u64,
    },
    /// A host was asked to open a stream. Ties the host's stream to the pipeline.
    StreamAsked {
        pipeline: PipelineId,
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        #[serde(flatten)]
        trace: StreamTrace,
    },
    /// The host has opened the stream.
    StreamReady {
        pipeline: PipelineId,
        host: NodeId,
        #[serde(flatten)]
        trace: StreamTrace,
    },
    /// A host's step result was missing, wrong or refused.
    HostFailed {
        pipeline: PipelineId,
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// Cause, for example `pipeline_stalled` or `degraded`.
        code: Code,
    },
    /// A host preempted this pipeline's stream for lack of memory. It is opened again later.
    HostPreempted {
        pipeline: PipelineId,
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// The layers of a host run elsewhere, and the answer has continued.
    FailedOver {
        pipeline: PipelineId,
        /// Former host; absent if this machine had taken the layers over.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<NodeId>,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// Code of the failure, or `leaving`.
        code: Code,
        /// Number of replacing hosts; 0 if this machine takes over.
        replacements: u32,
        /// Positions that were recomputed.
        replayed: u32,
        /// Time from the detection to the next row, in milliseconds.
        ms: u64,
    },
    /// A result of an earlier epoch arrived and was dropped.
    StaleAnswer {
        pipeline: PipelineId,
        host: NodeId,
    },
    /// A host announced that it will end its sessions.
    HostLeaving {
        host: NodeId,
        /// Longest time that streams may continue there, in milliseconds.
        within_ms: u64,
    },
    /// An answer is complete.
    Answered {
        pipeline: PipelineId,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Prompt tokens that were not recomputed.
        cached_tokens: u32,
        /// Tokens of the answer.
        completion_tokens: u32,
        /// Time from the request to the end, in milliseconds.
        ms: u64,
    },
    /// An answer ended early.
    Aborted {
        pipeline: PipelineId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// The client cancelled the request.
    Cancelled {
        pipeline: PipelineId,
    },
    /// The pipeline's streams were closed.
    PipelineEnded {
        pipeline: PipelineId,
    },

    // The host's side.
    /// The host accepts callers.
    ShardServing {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// The host was told to stop, and accepts no new streams.
    ShardLeaving {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        streams: u32,
        /// Longest time that streams may continue, in milliseconds.
        within_ms: u64,
    },
    /// The host has stopped.
    ShardStopped {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// Streams that were aborted.
        cut: u32,
    },
    /// The layers' weights are in memory.
    WeightsLoaded {
        bytes: u64,
    },
    /// Idle weights were unloaded.
    WeightsEvicted {},
    SessionBegan {
        session: SessionId,
        peer: NodeId,
        /// `pipeline`, or another purpose of sessions.
        purpose: Name,
    },
    SessionEnded {
        session: SessionId,
        peer: NodeId,
        /// Close code.
        code: Code,
        /// True if this side ended it.
        by_us: bool,
    },
    /// A stream was opened for a caller.
    StreamOpened {
        peer: NodeId,
        #[serde(flatten)]
        trace: StreamTrace,
        /// First and last layer of the stream.
        layers: (u32, u32),
    },
    /// A stream, or a step of a closed stream, was refused.
    StreamRefused {
        peer: NodeId,
        #[serde(flatten)]
        trace: StreamTrace,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A stream ended.
    StreamEnded {
        peer: NodeId,
        #[serde(flatten)]
        trace: StreamTrace,
        /// `closed` by the caller, `session_ended` with its session, or the host's reason.
        code: Code,
        /// Answered steps.
        steps: u64,
        /// Received rows.
        rows: u64,
    },

    // The node's side.
    /// The program started as a node of its community.
    NodeStarted {},
    PeerConnected {
        peer: NodeId,
    },
    PeerLost {
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A dialled node could not be reached, or refused this one.
    PeerUnreachable {
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A node proved or claimed a key that was refused.
    PeerRefused {
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A member advertises layers.
    AdvertSeen {
        peer: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// A member's advertisement ended.
    AdvertGone {
        peer: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// `withdrawn`, `expired` or `revoked`.
        code: Code,
    },
    /// A member was revoked.
    Revoked {
        peer: NodeId,
    },
    /// A connection ended before a session, for example because it was not TLS.
    ConnectionRefused {
        /// The cause, as a code of the protocol.
        code: Code,
    },

    /// A kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// Part of the ring in which an event is kept. Each part has its own bounds, so that a flood of one
/// class, above all of strangers, does not displace another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The ring has a part for each.
pub enum Class {
    /// Events of pipelines of this machine.
    Pipelines,
    /// Events of callers of this host.
    Host,
    /// Members and their advertisements; starts and stops.
    Node,
    /// Events that peers without admission can cause.
    Strangers,
}

impl Class {
    pub(super) const ALL: [Self; 4] = [Self::Pipelines, Self::Host, Self::Node, Self::Strangers];
}

impl Event {
    pub fn class(&self) -> Class {
        match self {
            Self::PeerRefused { .. } | Self::ConnectionRefused { .. } => Class::Strangers,
            Self::HostLeaving { .. } => Class::Pipelines,
            _ if self.pipeline().is_some() => Class::Pipelines,
            _ if self.caller().is_some() => Class::Host,
            _ => Class::Node,
        }
    }

    /// Caller of the session or stream in an event of a host.
    fn caller(&self) -> Option<&NodeId> {
        match self {
            Self::SessionBegan { peer, .. }
            | Self::SessionEnded { peer, .. }
            | Self::StreamOpened { peer, .. }
            | Self::StreamRefused { peer, .. }
            | Self::StreamEnded { peer, .. } => Some(peer),
            _ => None,
        }
    }

    /// True if `caller` may read the event in a host's record: the caller's own sessions and
    /// streams, and events of the host as a whole. Events of other callers are excluded.
    pub fn concerns(&self, caller: &NodeId) -> bool {
        match self {
            Self::PeerRefused { peer, .. } => peer == caller,
            Self::ShardServing { .. }
            | Self::ShardLeaving { .. }
            | Self::ShardStopped { .. }
            | Self::WeightsLoaded { .. }
            | Self::WeightsEvicted {} => true,
            // Events of the host's own calls, and kinds that are added later, have no `caller`.
            _ => self.caller() == Some(caller),
        }
    }

    /// Caller and trace of a stream in an event of a host.
    pub(super) fn hosted_stream(&self) -> Option<(NodeId, StreamTrace)> {
        match self {
            Self::StreamOpened { peer, trace, .. }
            | Self::StreamRefused { peer, trace, .. }
            | Self::StreamEnded { peer, trace, .. } => Some((*peer, *trace)),
            _ => None,
        }
    }

    /// The pipeline that the event names. Host events name none: they are joined by session, stream
    /// and epoch, see [`StreamTrace`].
    pub fn pipeline(&self) -> Option<PipelineId> {
        match self {
            Self::PipelineBuilt { pipeline, .. }
            | Self::StreamAsked { pipeline, .. }
            | Self::StreamReady { pipeline, .. }
            | Self::HostFailed { pipeline, .. }
            | Self::HostPreempted { pipeline, .. }
            | Self::FailedOver { pipeline, .. }
            | Self::StaleAnswer { pipeline, .. }
            | Self::Answered { pipeline, .. }
            | Self::Aborted { pipeline, .. }
            | Self::Cancelled { pipeline }
            | Self::PipelineEnded { pipeline } => Some(*pipeline),
            _ => None,
        }
    }

    /// Heap bytes of the event's names.
    pub(super) fn name_bytes(&self) -> usize {
        match self {
            Self::StreamAsked { shard, .. }
            | Self::HostPreempted { shard, .. }
            | Self::ShardServing { shard }
            | Self::ShardLeaving { shard, .. }
            | Self::ShardStopped { shard, .. }
            | Self::AdvertSeen { shard, .. } => shard.as_str().len(),
            Self::HostFailed { shard, code, .. }
            | Self::FailedOver { shard, code, .. }
            | Self::AdvertGone { shard, code, .. } => shard.as_str().len() + code.as_str().len(),
            Self::Aborted { code, .. }
            | Self::SessionEnded { code, .. }
            | Self::StreamRefused { code, .. }
            | Self::StreamEnded { code, .. }
            | Self::PeerLost { code, .. }
            | Self::PeerUnreachable { code, .. }
            | Self::PeerRefused { code, .. }
            | Self::ConnectionRefused { code } => code.as_str().len(),
            Self::SessionBegan { purpose, .. } => purpose.as_str().len(),
            _ => 0,
        }
    }
}
