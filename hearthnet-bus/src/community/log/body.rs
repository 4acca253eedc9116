//! Bodies of events: the kinds, and the canonical form of each.
//!
//! A new kind is added here (variant, name, record), in `fold/` (effect and rights; an
//! effect raises `RULES`) and in `specs/event-log.md`.

use std::collections::BTreeSet;

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use strum::VariantNames as _;

use super::adoption::Adoption;
use super::dispute::{Dispute, Finding};
use super::gave::Gave;
use super::measured::Measured;
use crate::community::invite::{JoinProof, JoinRequest, MAX_NAME_BYTES, fits_log, is_line};
use crate::identity::{by_format, cbor, raw_keys};
use crate::{CommunityId, Descriptor, DescriptorError, MAX_ENCODED, NodeId};

/// Maximum length of an event's body in bytes: the longest descriptor, and some room.
pub const MAX_BODY_BYTES: usize = 6 * 1024;
/// Maximum length of a kind in bytes.
pub const MAX_KIND_BYTES: usize = 64;
/// Maximum length of a slot in bytes: `shard:` and the longest shard id (256), with room.
pub const MAX_SLOT_BYTES: usize = 300;
/// Maximum number of endpoints that a node announces.
pub const MAX_ENDPOINTS: usize = 16;
/// Maximum length of an endpoint or software name in bytes.
pub const MAX_LINE_BYTES: usize = 128;
/// Maximum uses of an invite: more people than any community of households has.
pub const MAX_USES: u32 = 1000;
/// Maximum number of members that a withdrawal names. Checking a key takes about 10 us.
pub const MAX_NAMED: usize = 64;

/// Rights of a member, in rising order, under the names that events, commands and tables use.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Level {
    /// May chat, and read and write the log.
    Member,
    /// May also advertise and serve shards, and admit nodes that hold an invite.
    Trusted,
    Anchor,
}

/// Policy of a community. Its fields stand in canonical order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Minimum level for inviting others as `member`. Only anchors may invite at `trusted`, and
    /// only the root at `anchor`.
    #[serde(rename = "invite")]
    pub who_may_invite: Level,
    /// Whether experimental capabilities may be used in this community.
    pub research: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            who_may_invite: Level::Anchor,
            research: false,
        }
    }
}

/// Content of an event. For people, it serialises as the fields alone, because the kind stands
/// beside it; this is not the canonical form.
#[derive(Debug, Clone, PartialEq, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Body {
    /// `community.created`: first event of the root and of every community.
    #[strum(serialize = "community.created")]
    CommunityCreated {
        /// Display name of the community: 1 to 64 bytes, no control characters.
        name: String,
        policy: Policy,
        /// First anchor.
        founder: NodeId,
    },
    /// `community.policy`: replaces the policy.
    #[strum(serialize = "community.policy")]
    PolicyChanged(Policy),
    /// `member.invited`: nodes that can sign with the key `invite` may join.
    #[strum(serialize = "member.invited")]
    Invited {
        /// Public key of the invite, made for it. Its secret is in the invite code.
        invite: NodeId,
        /// Level of the invited nodes.
        level: Level,
        /// Number of nodes that may join, 1 to [`MAX_USES`].
        uses: u32,
        /// First Unix millisecond in which the invite is no longer valid.
        expires_ms: u64,
    },
    /// `invite.withdrawn`: the invite admits no further node.
    #[strum(serialize = "invite.withdrawn")]
    InviteWithdrawn {
        invite: NodeId,
        /// Members that joined with the invite, as far as the author knew; at most [`MAX_NAMED`].
        /// If the author is an anchor, other members by this invite are removed. `None`, as in
        /// older events, removes no member. [`EventLog::append`](super::EventLog::append) fills it
        /// in.
        members: Option<BTreeSet<NodeId>>,
    },
    /// `member.admitted`: a node with an invite becomes a member.
    #[strum(serialize = "member.admitted")]
    Admitted {
        /// Request that the joining node signed with the invite's key.
        request: JoinRequest,
        level: Level,
    },
    #[strum(serialize = "member.level")]
    LevelChanged {
        node: NodeId,
        level: Level,
        /// Last durable event of the member that the author had seen. Later events of the member
        /// that sort before this one are judged by the lower of its level there and the new one.
        /// `None` in older events, which set no such limit.
        last_seq: Option<u64>,
    },
    /// `member.revoked`: removes a node for ever.
    #[strum(serialize = "member.revoked")]
    Revoked {
        node: NodeId,
        /// Last durable event of the node that the author had seen. Later ones have no effect,
        /// wherever they sort.
        last_seq: u64,
    },
    /// `member.left`: the author leaves the community. It may join again with an invite.
    #[strum(serialize = "member.left")]
    Left {},
    /// `member.named`: changes the author's display name.
    #[strum(serialize = "member.named")]
    Named {
        /// Display name: 1 to 64 bytes, no control characters.
        name: String,
    },
    /// `model.adopt`: the community's nodes shall hold this model. Replaces an earlier adoption of
    /// the same weights.
    #[strum(serialize = "model.adopt")]
    ModelAdopted(Adoption),
    /// `model.drop`: ends the adoption of a model.
    #[strum(serialize = "model.drop")]
    ModelDropped {
        #[serde(serialize_with = "by_format::hash::serialize")]
        weights: [u8; 32],
    },
    /// `audit.dispute`: the author accuses hosts of rows that contradict their own or another host's.
    #[strum(serialize = "audit.dispute")]
    Disputed(Dispute),
    /// `audit.verdict`: the author has computed the rows of a dispute.
    #[strum(serialize = "audit.verdict")]
    Judged {
        #[serde(serialize_with = "by_format::hash::serialize")]
        dispute: [u8; 32],
        finding: Finding,
    },
    /// `node.gave`: what the author has given to other members, by its own count.
    #[strum(serialize = "node.gave")]
    NodeGave(Gave),
    /// `experimental.shard.advertised`: the author serves these layers. Ephemeral.
    #[strum(serialize = "experimental.shard.advertised")]
    ShardAdvertised(Box<Descriptor>),
    /// `experimental.shard.withdrawn`: the author no longer serves the shard. Ephemeral, in the
    /// slot of the advertisement.
    #[strum(serialize = "experimental.shard.withdrawn")]
    ShardWithdrawn {
        /// Shard id, `<model_id>:<lo>-<hi>`.
        shard_id: String,
    },
    /// `node.seen`: addresses and name of the author. Ephemeral.
    #[strum(serialize = "node.seen")]
    NodeSeen {
        /// Addresses `ADDR:PORT`, at most [`MAX_ENDPOINTS`] of at most [`MAX_LINE_BYTES`] bytes.
        endpoints: Vec<String>,
        /// Display name, at most 64 bytes.
        name: String,
        /// Software name and version.
        software: String,
    },
    /// `node.measured`: what the author measured about itself. Ephemeral.
    #[strum(serialize = "node.measured")]
    NodeMeasured(Measured),
    /// `grant.revoked`: invalidates a session token. Ephemeral; it lives longer than any token.
    #[strum(serialize = "grant.revoked")]
    GrantRevoked {
        issuer: NodeId,
        #[serde(serialize_with = "hex::serialize")]
        id: [u8; 16],
    },
    /// A kind that this program does not know: stored and passed on, without effect.
    Unknown {
        kind: String,
        /// Slot of an ephemeral event; `None` if the event is durable.
        slot: Option<String>,
        /// Body as in the event.
        #[serde(serialize_with = "hex::serialize")]
        bytes: Vec<u8>,
    },
}

const ADMITTED: &str = "member.admitted";
const SHARD_ADVERTISED: &str = "experimental.shard.advertised";
/// Kind without a record of its own: the author's clock was wrong and is right now.
pub(super) const CLOCK_SET: &str = "clock.set";

impl Body {
    /// Name of the kind, as in the event.
    pub fn kind(&self) -> &str {
        match self {
            Self::Unknown { kind, .. } => kind,
            known => <&'static str>::from(known),
        }
    }

    /// Slot of an ephemeral kind; `None` for durable kinds. Of each author and slot, only the
    /// newest event is kept.
    pub fn slot(&self) -> Option<String> {
        match self {
            Self::ShardAdvertised(descriptor) => Some(format!("shard:{}", descriptor.shard_id)),
            Self::ShardWithdrawn { shard_id } => Some(format!("shard:{shard_id}")),
            Self::NodeSeen { .. } => Some("node".to_owned()),
            Self::NodeMeasured(_) => Some("measured".to_owned()),
            Self::GrantRevoked { issuer, id } => {
                Some(format!("grant:{issuer}:{}", hex::encode(id)))
            }
            Self::Unknown { slot, .. } => slot.clone(),
            _ => None,
        }
    }

    /// Checks lengths and ranges, and that an admission's request is for this community.
    pub(super) fn check(&self, community: CommunityId) -> Result<(), EventError> {
        const NODE_NAME: &str = "the node's name is not a line of 1 to 64 bytes";
        let (fits, rule) = match self {
            Self::CommunityCreated { name, .. } => (
                fits_log(name),
                "the community's name is not a line of 1 to 64 bytes",
            ),
            Self::Invited { uses, .. } => (
                (1..=MAX_USES).contains(uses),
                "an invite has 1 to 1000 uses",
            ),
            Self::InviteWithdrawn { members, .. } => (
                members.as_ref().is_none_or(|all| all.len() <= MAX_NAMED),
                "more than 64 members are named",
            ),
            Self::Admitted { request, .. } if request.community != community => {
                (false, "the request to join is for another community")
            }
            Self::Admitted { request, .. } => (fits_log(&request.name), NODE_NAME),
            Self::Named { name } => (fits_log(name), NODE_NAME),
            Self::ModelAdopted(adoption) => return adoption.check().map_err(malformed),
            Self::Disputed(dispute) => return dispute.check().map_err(malformed),
            Self::NodeGave(gave) => return gave.check().map_err(malformed),
            Self::NodeMeasured(measured) => return measured.check().map_err(malformed),
            Self::ShardAdvertised(descriptor) => return descriptor.validate().map_err(Into::into),
            Self::ShardWithdrawn { shard_id } => (
                is_line(shard_id, crate::MAX_TEXT),
                "the shard id is not a line of at most 256 bytes",
            ),
            Self::NodeSeen {
                endpoints,
                name,
                software,
            } => (
                endpoints.len() <= MAX_ENDPOINTS
                    && endpoints.iter().all(|e| is_line(e, MAX_LINE_BYTES))
                    && is_line(name, MAX_NAME_BYTES)
                    && is_line(software, MAX_LINE_BYTES),
                "the node's announcement is too long",
            ),
            Self::Unknown { kind, .. } if !is_kind(kind) => (false, "its kind is not a name"),
            Self::Unknown { slot, bytes, .. } => (
                slot.as_ref().is_none_or(|s| is_line(s, MAX_SLOT_BYTES))
                    && bytes.len() <= MAX_BODY_BYTES,
                "its slot or body is too long",
            ),
            Self::PolicyChanged(_)
            | Self::LevelChanged { .. }
            | Self::Revoked { .. }
            | Self::Left {}
            | Self::ModelDropped { .. }
            | Self::Judged { .. }
            | Self::GrantRevoked { .. } => return Ok(()),
        };
        match fits {
            true => Ok(()),
            false => Err(malformed(rule)),
        }
    }

    /// Canonical encoding.
    pub(super) fn encode(&self) -> Result<Vec<u8>, EventError> {
        let cannot = || malformed("its body cannot be encoded");
        let bytes = match self {
            Self::Unknown { bytes, .. } => return Ok(bytes.clone()),
            Self::Admitted { request, level } => cbor::encode(&Admitted {
                name: request.name.clone(),
                node: request.node,
                level: *level,
                proof: ByteArray::new(request.proof.0),
                invite: request.invite,
            })
            .map_err(|_| cannot())?,
            _ => {
                let tagged = cbor::encode(&Tagged(self.clone())).map_err(|_| cannot())?;
                let record = tagged.strip_prefix(tag(self.kind())?.as_slice());
                record.ok_or_else(cannot)?.to_vec()
            }
        };
        self.check_size(&bytes)?;
        Ok(bytes)
    }

    /// Decodes the body of a kind. The size of an event bounds `bytes`. The caller still has to
    /// check the [keys](Body::keys) in the body.
    pub(super) fn decode(
        kind: &str,
        slot: Option<&str>,
        bytes: &[u8],
        community: CommunityId,
    ) -> Result<Self, EventError> {
        let wrong = |_| match kind {
            SHARD_ADVERTISED => no_descriptor("its body is not the canonical map of one"),
            _ => malformed("its body is not the canonical map of its kind"),
        };
        let body = match kind {
            ADMITTED => {
                let it: Admitted = cbor::decode(bytes, DEPTH).map_err(wrong)?;
                Self::Admitted {
                    request: JoinRequest {
                        community,
                        node: it.node,
                        name: it.name,
                        invite: it.invite,
                        proof: JoinProof(*it.proof),
                    },
                    level: it.level,
                }
            }
            // `Unknown` is a variant, and no kind.
            _ if is_kind(kind) && Self::VARIANTS.contains(&kind) => {
                let tagged = [&tag(kind)?, bytes].concat();
                let Tagged(body) = cbor::decode(&tagged, DEPTH + 1).map_err(wrong)?;
                body
            }
            _ => Self::Unknown {
                kind: kind.to_owned(),
                slot: slot.map(str::to_owned),
                bytes: bytes.to_vec(),
            },
        };
        if body.slot().as_deref() != slot {
            return Err(malformed("its slot is not that of its body"));
        }
        body.check_size(bytes)?;
        body.check(community)?;
        Ok(body)
    }

    /// Limits a descriptor to the size that hosts and routers exchange.
    fn check_size(&self, bytes: &[u8]) -> Result<(), EventError> {
        match self {
            Self::ShardAdvertised(_) if bytes.len() > MAX_ENCODED => {
                Err(no_descriptor("its body is too long for one"))
            }
            _ => Ok(()),
        }
    }

    /// All keys that the body holds as raw bytes. A descriptor's host is text, and checked as such.
    pub(super) fn keys(&self) -> Vec<NodeId> {
        let mut keys = self.nodes();
        match self {
            Self::InviteWithdrawn {
                members: Some(members),
                ..
            } => keys.extend(members),
            Self::NodeMeasured(measured) => {
                keys.extend(measured.links.iter().map(|link| link.node));
            }
            _ => {}
        }
        keys
    }

    /// Nodes and invites that are the event's subject: [`Body::keys`] without the members that a
    /// withdrawal or a measurement names.
    pub(super) fn nodes(&self) -> Vec<NodeId> {
        match self {
            Self::CommunityCreated { founder: node, .. }
            | Self::Invited { invite: node, .. }
            | Self::InviteWithdrawn { invite: node, .. }
            | Self::LevelChanged { node, .. }
            | Self::Revoked { node, .. }
            | Self::GrantRevoked { issuer: node, .. } => vec![*node],
            Self::Admitted { request, .. } => vec![request.node, request.invite],
            Self::Disputed(dispute) => dispute.hosts().collect(),
            Self::PolicyChanged(_)
            | Self::Left {}
            | Self::Named { .. }
            | Self::ModelAdopted(_)
            | Self::ModelDropped { .. }
            | Self::Judged { .. }
            | Self::NodeGave(_)
            | Self::NodeMeasured(_)
            | Self::ShardAdvertised(_)
            | Self::ShardWithdrawn { .. }
            | Self::NodeSeen { .. }
            | Self::Unknown { .. } => vec![],
        }
    }
}

/// Reason why bytes are not an event of this format. It depends on the bytes alone, so every node
/// refuses the same bytes at any time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// The bytes are not canonical, or a field holds an impossible value.
    #[error("this is not an event: {what}")]
    Malformed { what: &'static str },
    /// The body of an advertised shard is not a valid descriptor.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The signature, or the proof in an admission, was not made by the named key over these bytes.
    #[error("the event's signature is not valid")]
    Signature,
}

pub(super) fn malformed(what: &'static str) -> EventError {
    EventError::Malformed { what }
}

fn no_descriptor(what: &str) -> EventError {
    DescriptorError::Malformed(what.to_owned()).into()
}

impl EventError {
    /// Stable code of the refusal.
    pub fn code(&self) -> Code {
        match self {
            Self::Malformed { .. } => Code::new("log_malformed"),
            Self::Descriptor(why) => why.code(),
            Self::Signature => Code::INVALID_SIGNATURE,
        }
    }
}

fn is_kind(kind: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._".contains(&b);
    (1..=MAX_KIND_BYTES).contains(&kind.len()) && kind.bytes().all(plain)
}

/// Nesting limit of a record: a map that holds a map or a list, plus one.
const DEPTH: usize = 4;

/// Bytes that serde writes before the record of a kind: `{kind:`, a map with one entry.
fn tag(kind: &str) -> Result<Vec<u8>, EventError> {
    let name = cbor::encode(&kind).map_err(|_| malformed("its kind cannot be encoded"))?;
    Ok([&[0xa1], name.as_slice()].concat())
}

/// Body as serde writes an enum, `{kind: record}`. In an event, kind and record are separate
/// fields.
#[derive(Serialize, Deserialize)]
struct Tagged(#[serde(with = "Record")] Body);

/// Encoded record of each variant of [`Body`]. The fields stand in the order of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Body", deny_unknown_fields)]
enum Record {
    #[serde(rename = "community.created")]
    CommunityCreated {
        name: String,
        policy: Policy,
        #[serde(with = "raw_keys")]
        founder: NodeId,
    },
    #[serde(rename = "community.policy")]
    PolicyChanged(Policy),
    #[serde(rename = "member.invited")]
    Invited {
        #[serde(rename = "key", with = "raw_keys")]
        invite: NodeId,
        uses: u32,
        level: Level,
        #[serde(rename = "until")]
        expires_ms: u64,
    },
    #[serde(rename = "invite.withdrawn")]
    InviteWithdrawn {
        #[serde(rename = "key", with = "raw_keys")]
        invite: NodeId,
        #[serde(
            default,
            skip_serializing_if = "Option::is_none",
            with = "raw_keys::option_set"
        )]
        members: Option<BTreeSet<NodeId>>,
    },
    #[serde(rename = "member.level")]
    LevelChanged {
        #[serde(rename = "seq", default, skip_serializing_if = "Option::is_none")]
        last_seq: Option<u64>,
        #[serde(with = "raw_keys")]
        node: NodeId,
        level: Level,
    },
    #[serde(rename = "member.revoked")]
    Revoked {
        #[serde(rename = "seq")]
        last_seq: u64,
        #[serde(with = "raw_keys")]
        node: NodeId,
    },
    #[serde(rename = "member.left")]
    Left {},
    #[serde(rename = "member.named")]
    Named { name: String },
    #[serde(rename = "model.adopt")]
    ModelAdopted(Adoption),
    #[serde(rename = "model.drop")]
    ModelDropped {
        #[serde(with = "by_format::hash")]
        weights: [u8; 32],
    },
    #[serde(rename = "audit.dispute")]
    Disputed(Dispute),
    #[serde(rename = "audit.verdict")]
    Judged {
        #[serde(with = "by_format::hash")]
        dispute: [u8; 32],
        finding: Finding,
    },
    #[serde(rename = "node.gave")]
    NodeGave(Gave),
    #[serde(rename = "experimental.shard.advertised")]
    ShardAdvertised(Box<Descriptor>),
    #[serde(rename = "experimental.shard.withdrawn")]
    ShardWithdrawn {
        #[serde(rename = "shard")]
        shard_id: String,
    },
    #[serde(rename = "node.seen")]
    NodeSeen {
        name: String,
        software: String,
        endpoints: Vec<String>,
    },
    #[serde(rename = "node.measured")]
    NodeMeasured(Measured),
    #[serde(rename = "grant.revoked")]
    GrantRevoked {
        #[serde(with = "serde_bytes")]
        id: [u8; 16],
        #[serde(with = "raw_keys")]
        issuer: NodeId,
    },
    // The community is the event's: see `Admitted`.
    #[serde(skip)]
    Admitted { request: JoinRequest, level: Level },
    #[serde(skip)]
    Unknown {
        kind: String,
        slot: Option<String>,
        bytes: Vec<u8>,
    },
}

/// Record of [`Body::Admitted`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Admitted {
    name: String,
    #[serde(with = "raw_keys")]
    node: NodeId,
    level: Level,
    proof: ByteArray<64>,
    #[serde(with = "raw_keys")]
    invite: NodeId,
}
