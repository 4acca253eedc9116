//! What can have happened.

use crate::NodeId;
use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use super::ids::{Name, PipelineId, SessionId};

/// Something that happened to a pipeline, a stream, a session or a node. Codes, ids and
/// numbers, and nothing that a user wrote or read.
///
/// Written in JSON as an object with the field `kind`; of another node's events, those of a
/// kind that this version does not know become [`Event::Unknown`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    // The caller's side.
    /// A route was found and all of its streams are open.
    PipelineBuilt {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Hosts in a row; 0 when this machine runs all layers.
        hosts: u32,
        /// From looking for hosts to the last stream, in milliseconds.
        ms: u64,
    },
    /// A host was asked to run layers: what ties the host's stream to the pipeline.
    StreamAsked {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Node id of the host.
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// In which session.
        session: SessionId,
        /// The stream's number there.
        stream: u32,
        /// Its epoch.
        epoch: u32,
    },
    /// The host said that the stream is open.
    StreamReady {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Node id of the host.
        host: NodeId,
        /// In which session.
        session: SessionId,
        /// The stream's number there.
        stream: u32,
        /// Its epoch.
        epoch: u32,
    },
    /// A host's part of an answer did not come, or came wrong, or was refused.
    HostFailed {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Node id of the host.
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// What went wrong, `pipeline_stalled` and `degraded` among them.
        code: Code,
    },
    /// A host gave this pipeline's stream up for want of memory; it is opened again later.
    HostPreempted {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Node id of the host.
        host: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// The layers of a host run elsewhere, and the answer has gone on.
    FailedOver {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Who ran them before; absent when they were taken over by this machine.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<NodeId>,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// What was the reason: of a failure, or `leaving`.
        code: Code,
        /// Hosts that took over; 0 when this machine did.
        replacements: u32,
        /// Positions that were computed again.
        replayed: u32,
        /// From noticing to the next row, in milliseconds.
        ms: u64,
    },
    /// An answer to a step of an earlier epoch came, and was dropped.
    StaleAnswer {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// Node id of the host.
        host: NodeId,
    },
    /// A host said that it will end its sessions.
    HostLeaving {
        /// Node id of the host.
        host: NodeId,
        /// How long streams go on there at most, in milliseconds.
        within_ms: u64,
    },
    /// An answer is complete.
    Answered {
        /// By which.
        pipeline: PipelineId,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Those of them that were not run again.
        cached_tokens: u32,
        /// Tokens of the answer.
        completion_tokens: u32,
        /// From the request to the end, in milliseconds.
        ms: u64,
    },
    /// An answer ended unfinished.
    Aborted {
        /// Id of the pipeline.
        pipeline: PipelineId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// Whoever had asked gave up.
    Cancelled {
        /// On which.
        pipeline: PipelineId,
    },
    /// Its streams were closed.
    PipelineEnded {
        /// Id of the pipeline.
        pipeline: PipelineId,
    },

    // The host's side.
    /// The host takes callers.
    ShardServing {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// The host was told to stop, and takes nothing new.
    ShardLeaving {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// Streams that are open.
        streams: u32,
        /// How long they may go on, in milliseconds.
        within_ms: u64,
    },
    /// The host has stopped.
    ShardStopped {
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// Streams that were cut off.
        cut: u32,
    },
    /// The layers' weights are in memory.
    WeightsLoaded {
        /// What they take.
        bytes: u64,
    },
    /// The weights were put away for want of use.
    WeightsEvicted {},
    /// A caller's session began.
    SessionBegan {
        /// Id of the session.
        session: SessionId,
        /// Node id of the peer.
        peer: NodeId,
        /// `pipeline`, or what else sessions are for.
        purpose: Name,
    },
    /// It ended.
    SessionEnded {
        /// Id of the session.
        session: SessionId,
        /// Node id of the peer.
        peer: NodeId,
        /// Why, as closing codes spell it.
        code: Code,
        /// Whether this side ended it.
        by_us: bool,
    },
    /// A stream was opened for a caller.
    StreamOpened {
        /// In which session.
        session: SessionId,
        /// Node id of the peer.
        peer: NodeId,
        /// The caller's number of it.
        stream: u32,
        /// Its epoch.
        epoch: u32,
        /// First and last layer that it runs through.
        layers: (u32, u32),
    },
    /// A stream, or a step of one that is over, was refused.
    StreamRefused {
        /// In which session.
        session: SessionId,
        /// Node id of the peer.
        peer: NodeId,
        /// The caller's number of it.
        stream: u32,
        /// Its epoch.
        epoch: u32,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A stream ended.
    StreamEnded {
        /// In which session.
        session: SessionId,
        /// Node id of the peer.
        peer: NodeId,
        /// The caller's number of it.
        stream: u32,
        /// Its epoch.
        epoch: u32,
        /// `closed` by the caller, `session_ended` with its session, or the host's reason.
        code: Code,
        /// Steps that were answered.
        steps: u64,
        /// Rows that came for it.
        rows: u64,
    },

    // The node's side.
    /// The program runs as a node of its community.
    NodeStarted {},
    /// Another node is connected.
    PeerConnected {
        /// Node id of the peer.
        peer: NodeId,
    },
    /// Another node is not connected any more.
    PeerLost {
        /// Node id of the peer.
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// Another node could not be reached, or did not let this one in.
    PeerUnreachable {
        /// Node id of the peer.
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A node showed its key and was not let in.
    PeerRefused {
        /// Node id of the peer.
        peer: NodeId,
        /// The cause, as a code of the protocol.
        code: Code,
    },
    /// A member offers layers.
    AdvertSeen {
        /// Node id of the peer.
        peer: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
    },
    /// It does not any more.
    AdvertGone {
        /// Node id of the peer.
        peer: NodeId,
        /// `<model_id>:<lo>-<hi>`.
        shard: Name,
        /// `withdrawn`, `expired` or `revoked`.
        code: Code,
    },
    /// The community sent a member away.
    Revoked {
        /// Node id of the peer.
        peer: NodeId,
    },
    /// Somebody connected and did not become anybody's session: what is no TLS, and the like.
    ConnectionRefused {
        /// The cause, as a code of the protocol.
        code: Code,
    },

    /// Of a kind that this version does not know.
    #[serde(other)]
    Unknown,
}

/// Events that share a part of the ring. Each part is bounded by itself, so that no flood of
/// one kind washes another away: least of all what strangers can cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The ring has a part for each.
pub enum Class {
    /// What callers on this machine asked for.
    Pipelines,
    /// What callers of this host did.
    Host,
    /// Members, who is there and what they offer; starts and stops.
    Node,
    /// What those can cause who are not admitted.
    Strangers,
}

impl Class {
    /// All of them.
    pub(super) const ALL: [Self; 4] = [Self::Pipelines, Self::Host, Self::Node, Self::Strangers];
}

impl Event {
    /// Which part of the ring it belongs to.
    pub fn class(&self) -> Class {
        match self {
            Self::PipelineBuilt { .. }
            | Self::StreamAsked { .. }
            | Self::StreamReady { .. }
            | Self::HostFailed { .. }
            | Self::HostPreempted { .. }
            | Self::FailedOver { .. }
            | Self::StaleAnswer { .. }
            | Self::HostLeaving { .. }
            | Self::Answered { .. }
            | Self::Aborted { .. }
            | Self::Cancelled { .. }
            | Self::PipelineEnded { .. } => Class::Pipelines,
            Self::SessionBegan { .. }
            | Self::SessionEnded { .. }
            | Self::StreamOpened { .. }
            | Self::StreamRefused { .. }
            | Self::StreamEnded { .. } => Class::Host,
            Self::ShardServing { .. }
            | Self::ShardLeaving { .. }
            | Self::ShardStopped { .. }
            | Self::WeightsLoaded { .. }
            | Self::WeightsEvicted { .. }
            | Self::NodeStarted { .. }
            | Self::PeerConnected { .. }
            | Self::PeerLost { .. }
            | Self::PeerUnreachable { .. }
            | Self::AdvertSeen { .. }
            | Self::AdvertGone { .. }
            | Self::Revoked { .. }
            | Self::Unknown => Class::Node,
            Self::PeerRefused { .. } | Self::ConnectionRefused { .. } => Class::Strangers,
        }
    }

    /// Whether a caller of a host may hear of it from that host: what that caller did there and
    /// what was done to it, and what befell the host as a whole. Not who else was there.
    pub fn concerns(&self, caller: &NodeId) -> bool {
        match self {
            Self::SessionBegan { peer, .. }
            | Self::SessionEnded { peer, .. }
            | Self::StreamOpened { peer, .. }
            | Self::StreamRefused { peer, .. }
            | Self::StreamEnded { peer, .. }
            | Self::PeerRefused { peer, .. } => peer == caller,
            Self::ShardServing { .. }
            | Self::ShardLeaving { .. }
            | Self::ShardStopped { .. }
            | Self::WeightsLoaded { .. }
            | Self::WeightsEvicted {} => true,
            // What the host asks of others, whom it knows, and whatever is added here.
            _ => false,
        }
    }

    /// The pipeline that it names, if it does. Host events name none: they are joined by
    /// session, stream and epoch, see [`Event::StreamAsked`].
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

    /// Bytes of names that it holds beside its own size.
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
