//! What events say: the kinds, and the canonical form of each.
//!
//! A kind is added here (its variant, its name, its record), in
//! `fold.rs` (what it does, and who may), and in `specs/event-log.md`.

use std::collections::BTreeSet;
use std::fmt;

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;

use crate::community::invite::{JoinProof, JoinRequest, MAX_NAME_BYTES, fits_log};
use crate::identity::cbor;
use crate::identity::raw_keys;
use crate::{CommunityId, Descriptor, DescriptorError, MAX_ENCODED, NodeId};

/// Longest body of an event, in bytes: the longest descriptor and some room.
pub const MAX_BODY_BYTES: usize = 6 * 1024;
/// Longest kind and longest slot, in bytes: a slot carries a shard id (256) and a prefix.
pub const MAX_KIND_BYTES: usize = 64;
/// Longest slot, in bytes: `shard:` and the longest shard id, with room.
pub const MAX_SLOT_BYTES: usize = 300;
/// Most endpoints that one node tells the others.
pub const MAX_ENDPOINTS: usize = 16;
/// Longest endpoint and software name, in bytes.
pub const MAX_LINE_BYTES: usize = 128;
/// Most uses of one invite: more people than any community of households has.
pub const MAX_USES: u32 = 1000;
/// Most members that the end of an invite names: each is a key to check, some 10 us.
pub const MAX_NAMED: usize = 64;

/// What a member may do, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// May ask for answers, and read and write the log.
    Member,
    /// May also advertise and serve shards, and admit those who hold an invite.
    Trusted,
    /// May also invite, promote, demote and revoke members below itself.
    Anchor,
}

impl Level {
    /// As events, commands and tables spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Member => "member",
            Self::Trusted => "trusted",
            Self::Anchor => "anchor",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a community has agreed on. Its fields stand in canonical order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The lowest level that may invite others as `member`. Only anchors may invite
    /// `trusted` ones, and only the root anchors.
    #[serde(rename = "invite")]
    pub who_may_invite: Level,
    /// Whether experimental capabilities may be used in this community at all.
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

/// What an event says. Serialised (for people; not the canonical form) as the fields alone:
/// the kind stands beside it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Body {
    /// `community.created`: the first event of the root, and of every community.
    CommunityCreated {
        /// What people call the community: 1 to 64 bytes, no control characters.
        name: String,
        /// The policy at the beginning.
        policy: Policy,
        /// The first anchor.
        founder: NodeId,
    },
    /// `community.policy`: a new policy, in place of the one before.
    PolicyChanged(Policy),
    /// `member.invited`: whoever can sign with `invite` may join.
    Invited {
        /// The invite: a fresh public key, whose secret is in the invite code.
        invite: NodeId,
        /// What the invited become.
        level: Level,
        /// How many may join with it, 1 to [`MAX_USES`].
        uses: u32,
        /// First Unix millisecond in which it no longer holds.
        expires_ms: u64,
    },
    /// `invite.withdrawn`: nobody joins with this invite any more.
    InviteWithdrawn {
        /// The invite.
        invite: NodeId,
        /// The members that came by it, as far as the author of this event knew, at most [`MAX_NAMED`]:
        /// others are none from here on, if an anchor says so. Absent, none is put out, as in events of
        /// before there was such a list. [`EventLog::append`](super::EventLog::append) fills it in.
        members: Option<BTreeSet<NodeId>>,
    },
    /// `member.admitted`: a node that showed an invite is a member.
    Admitted {
        /// What the joiner signed with the invite's key.
        request: JoinRequest,
        /// The invite's level.
        level: Level,
    },
    /// `member.level`: a member is promoted or demoted.
    LevelChanged {
        /// The member's key.
        node: NodeId,
        /// The new level.
        level: Level,
        /// The last durable event of the member that the author of this event had seen: later
        /// ones that sort before this one are judged by no higher level than the new one.
        /// `None` in events of before there was such a bound.
        last_seq: Option<u64>,
    },
    /// `member.revoked`: a key has no place in the community any more, for ever.
    Revoked {
        /// The member's key.
        node: NodeId,
        /// The last durable event of that node that counts; all later ones have no effect,
        /// wherever they sort. What the author of this event had seen of the node.
        last_seq: u64,
    },
    /// `member.left`: its author is no member any more, because it does not want to be. With a
    /// new invite it may come back.
    Left {},
    /// `member.named`: what its author is called from now on.
    Named {
        /// Display name, 1 to 64 bytes, no control characters.
        name: String,
    },
    /// `experimental.shard.advertised`: a shard host serves these layers. Ephemeral.
    ShardAdvertised(Box<Descriptor>),
    /// `experimental.shard.withdrawn`: it does no longer. Ephemeral, in the slot of the
    /// advertisement that it takes back.
    ShardWithdrawn {
        /// The shard, `<model_id>:<lo>-<hi>`.
        shard_id: String,
    },
    /// `node.seen`: where a node listens, and what it is called. Ephemeral.
    NodeSeen {
        /// `ADDR:PORT`, at most [`MAX_ENDPOINTS`] of at most [`MAX_LINE_BYTES`] bytes.
        endpoints: Vec<String>,
        /// Display name, at most 64 bytes.
        name: String,
        /// Software name and version.
        software: String,
    },
    /// `grant.revoked`: a session token is not to be accepted any more. Ephemeral: it lives
    /// longer than any token.
    GrantRevoked {
        /// Who issued the token.
        issuer: NodeId,
        /// The token's id.
        #[serde(serialize_with = "hex::serialize")]
        id: [u8; 16],
    },
    /// A kind that this program does not know: kept and passed on, without effect.
    Unknown {
        /// The kind.
        kind: String,
        /// The slot, if the event is ephemeral.
        slot: Option<String>,
        /// Its body as it stands in the event.
        #[serde(serialize_with = "hex::serialize")]
        bytes: Vec<u8>,
    },
}

const CREATED: &str = "community.created";
const POLICY: &str = "community.policy";
const INVITED: &str = "member.invited";
const WITHDRAWN: &str = "invite.withdrawn";
const ADMITTED: &str = "member.admitted";
const LEVEL: &str = "member.level";
const REVOKED: &str = "member.revoked";
const LEFT: &str = "member.left";
const NAMED: &str = "member.named";
const SHARD_ADVERTISED: &str = "experimental.shard.advertised";
const SHARD_WITHDRAWN: &str = "experimental.shard.withdrawn";
const SEEN: &str = "node.seen";
const GRANT_REVOKED: &str = "grant.revoked";
/// A kind without a body of its own: its author's clock was wrong before, and is right now.
pub(super) const CLOCK_SET: &str = "clock.set";

/// The kinds that [`Record`] reads.
const RECORDS: [&str; 12] = [
    CREATED,
    POLICY,
    INVITED,
    WITHDRAWN,
    LEVEL,
    REVOKED,
    LEFT,
    NAMED,
    SHARD_ADVERTISED,
    SHARD_WITHDRAWN,
    SEEN,
    GRANT_REVOKED,
];

impl Body {
    /// The kind, as it stands in the event.
    pub fn kind(&self) -> &str {
        match self {
            Self::CommunityCreated { .. } => CREATED,
            Self::PolicyChanged(_) => POLICY,
            Self::Invited { .. } => INVITED,
            Self::InviteWithdrawn { .. } => WITHDRAWN,
            Self::Admitted { .. } => ADMITTED,
            Self::LevelChanged { .. } => LEVEL,
            Self::Revoked { .. } => REVOKED,
            Self::Left {} => LEFT,
            Self::Named { .. } => NAMED,
            Self::ShardAdvertised(_) => SHARD_ADVERTISED,
            Self::ShardWithdrawn { .. } => SHARD_WITHDRAWN,
            Self::NodeSeen { .. } => SEEN,
            Self::GrantRevoked { .. } => GRANT_REVOKED,
            Self::Unknown { kind, .. } => kind,
        }
    }

    /// The slot of an ephemeral kind: of one author and slot only the newest event is kept.
    /// `None` for durable kinds.
    pub fn slot(&self) -> Option<String> {
        match self {
            Self::ShardAdvertised(descriptor) => Some(format!("shard:{}", descriptor.shard_id)),
            Self::ShardWithdrawn { shard_id } => Some(format!("shard:{shard_id}")),
            Self::NodeSeen { .. } => Some("node".to_owned()),
            Self::GrantRevoked { issuer, id } => {
                Some(format!("grant:{issuer}:{}", hex::encode(id)))
            }
            Self::Unknown { slot, .. } => slot.clone(),
            _ => None,
        }
    }

    /// Checks that the body can stand in an event: lengths, ranges, the proof of an
    /// admission.
    pub(super) fn check(&self, community: CommunityId) -> Result<(), EventError> {
        let malformed = |what| Err(malformed(what));
        match self {
            Self::CommunityCreated { name, .. } => {
                if !fits_log(name) {
                    return malformed("the community's name is not a line of 1 to 64 bytes");
                }
            }
            Self::Invited { uses, .. } => {
                if *uses == 0 || *uses > MAX_USES {
                    return malformed("an invite has 1 to 1000 uses");
                }
            }
            Self::InviteWithdrawn { members, .. } => {
                if members.as_ref().is_some_and(|all| all.len() > MAX_NAMED) {
                    return malformed("more than 64 members are named");
                }
            }
            Self::Admitted { request, .. } => {
                if request.community != community {
                    return malformed("the request to join is for another community");
                }
                if !fits_log(&request.name) {
                    return malformed("the node's name is not a line of 1 to 64 bytes");
                }
            }
            Self::Named { name } => {
                if !fits_log(name) {
                    return malformed("the node's name is not a line of 1 to 64 bytes");
                }
            }
            Self::ShardAdvertised(descriptor) => {
                descriptor.validate()?;
            }
            Self::ShardWithdrawn { shard_id } => {
                if !is_line(shard_id, crate::MAX_TEXT) {
                    return malformed("the shard id is not a line of at most 256 bytes");
                }
            }
            Self::NodeSeen {
                endpoints,
                name,
                software,
            } => {
                if endpoints.len() > MAX_ENDPOINTS
                    || !endpoints.iter().all(|e| is_line(e, MAX_LINE_BYTES))
                    || !is_line(name, MAX_NAME_BYTES)
                    || !is_line(software, MAX_LINE_BYTES)
                {
                    return malformed("what the node says of itself is too long");
                }
            }
            Self::Unknown { kind, slot, bytes } => {
                let plain =
                    |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._".contains(&b);
                if kind.is_empty() || kind.len() > MAX_KIND_BYTES || !kind.bytes().all(plain) {
                    return malformed("its kind is not a name");
                }
                if slot.as_ref().is_some_and(|s| !is_line(s, MAX_SLOT_BYTES))
                    || bytes.len() > MAX_BODY_BYTES
                {
                    return malformed("its slot or body is too long");
                }
            }
            Self::PolicyChanged(_)
            | Self::LevelChanged { .. }
            | Self::Revoked { .. }
            | Self::Left {}
            | Self::GrantRevoked { .. } => {}
        }
        Ok(())
    }

    /// The canonical bytes.
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

    /// Reads the body of a kind. `bytes` are bounded by the size of an event. The keys of its
    /// [keys](Body::keys) are still to be checked.
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
            _ if RECORDS.contains(&kind) => {
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

    /// A descriptor is no longer here than where hosts and routers exchange it.
    fn check_size(&self, bytes: &[u8]) -> Result<(), EventError> {
        match self {
            Self::ShardAdvertised(_) if bytes.len() > MAX_ENCODED => {
                Err(no_descriptor("its body is too long for one"))
            }
            _ => Ok(()),
        }
    }

    /// The keys that it names as raw bytes. (A descriptor's host is text, and checked as such.)
    pub(super) fn keys(&self) -> Vec<NodeId> {
        let mut keys = self.nodes();
        if let Self::InviteWithdrawn {
            members: Some(members),
            ..
        } = self
        {
            keys.extend(members);
        }
        keys
    }

    /// Those of them that it is about.
    pub(super) fn nodes(&self) -> Vec<NodeId> {
        match self {
            Self::CommunityCreated { founder: node, .. }
            | Self::Invited { invite: node, .. }
            | Self::InviteWithdrawn { invite: node, .. }
            | Self::LevelChanged { node, .. }
            | Self::Revoked { node, .. }
            | Self::GrantRevoked { issuer: node, .. } => vec![*node],
            Self::Admitted { request, .. } => vec![request.node, request.invite],
            Self::PolicyChanged(_)
            | Self::Left {}
            | Self::Named { .. }
            | Self::ShardAdvertised(_)
            | Self::ShardWithdrawn { .. }
            | Self::NodeSeen { .. }
            | Self::Unknown { .. } => vec![],
        }
    }
}

/// Why bytes are not an event of this format. The same bytes are refused everywhere and at
/// any time: nothing here depends on what a node knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// Not the canonical bytes of an event, or a field holds an impossible value.
    #[error("this is not an event: {what}")]
    Malformed {
        /// What is wrong.
        what: &'static str,
    },
    /// The body of an advertised shard is not a valid descriptor.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The signature, or the proof that an admission carries, was not made by that key over
    /// these bytes.
    #[error("the event's signature is not valid")]
    Signature,
}

/// For `map_err` and the like.
pub(super) fn malformed(what: &'static str) -> EventError {
    EventError::Malformed { what }
}

fn no_descriptor(what: &str) -> EventError {
    DescriptorError::Malformed(what.to_owned()).into()
}

impl EventError {
    /// The stable code of the refusal.
    pub fn code(&self) -> Code {
        match self {
            Self::Malformed { .. } => Code::new("log_malformed"),
            Self::Descriptor(why) => why.code(),
            Self::Signature => Code::INVALID_SIGNATURE,
        }
    }
}

/// One line of text for people: bounded, and nothing that moves a cursor.
fn is_line(text: &str, max: usize) -> bool {
    text.len() <= max && !text.chars().any(char::is_control)
}

/// Levels of a record: a map that holds a map or a list, and one to spare.
const DEPTH: usize = 4;

/// What serde writes before the record of a kind: `{kind:`, a map of one.
fn tag(kind: &str) -> Result<Vec<u8>, EventError> {
    let name = cbor::encode(&kind).map_err(|_| malformed("its kind cannot be encoded"))?;
    Ok([&[0xa1], name.as_slice()].concat())
}

/// A body as serde writes an enum, `{kind: record}`. An event has the two in fields of their own.
#[derive(Serialize, Deserialize)]
struct Tagged(#[serde(with = "Record")] Body);

/// What stands in the event for each variant of [`Body`]. The order of the fields is that of their
/// encoded keys.
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

/// The record of [`Body::Admitted`].
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
