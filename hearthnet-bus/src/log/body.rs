//! What events say: the kinds, and the canonical form of each.
//!
//! A kind is added here (its variant, its record, its line in `encode` and `decode`), in
//! `fold.rs` (what it does, and who may), and in `specs/event-log.md`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::event::{EventError, Keys};
use crate::cbor::{self, Bytes};
use crate::invite::{JoinProof, JoinRequest, MAX_NAME_BYTES};
use crate::{CommunityId, Descriptor, NodeId};

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

/// The text is not a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a level is member, trusted or anchor")]
pub struct LevelError;

impl FromStr for Level {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<Self, LevelError> {
        match text {
            "member" => Ok(Self::Member),
            "trusted" => Ok(Self::Trusted),
            "anchor" => Ok(Self::Anchor),
            _ => Err(LevelError),
        }
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
        let malformed = |what| Err(EventError::Malformed { what });
        match self {
            Self::CommunityCreated { name, .. } => {
                if name.is_empty() || !is_line(name, MAX_NAME_BYTES) {
                    return malformed("the community's name is not a line of 1 to 64 bytes");
                }
            }
            Self::Invited { uses, .. } => {
                if *uses == 0 || *uses > MAX_USES {
                    return malformed("an invite has 1 to 1000 uses");
                }
            }
            Self::Admitted { request, .. } => {
                if request.community != community {
                    return malformed("the request to join is for another community");
                }
                if request.name.is_empty() || !is_line(&request.name, MAX_NAME_BYTES) {
                    return malformed("the node's name is not a line of 1 to 64 bytes");
                }
            }
            Self::Named { name } => {
                if name.is_empty() || !is_line(name, MAX_NAME_BYTES) {
                    return malformed("the node's name is not a line of 1 to 64 bytes");
                }
            }
            Self::ShardAdvertised(descriptor) => {
                if descriptor.validate().is_err() {
                    return malformed("the descriptor makes no sense");
                }
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
            | Self::InviteWithdrawn { .. }
            | Self::LevelChanged { .. }
            | Self::Revoked { .. }
            | Self::Left {}
            | Self::GrantRevoked { .. } => {}
        }
        Ok(())
    }

    /// The canonical bytes.
    pub(super) fn encode(&self) -> Result<Vec<u8>, EventError> {
        let bytes = match self {
            Self::CommunityCreated {
                name,
                policy,
                founder,
            } => cbor::encode(&Created {
                name: name.clone(),
                policy: *policy,
                founder: Bytes(*founder.as_bytes()),
            }),
            Self::PolicyChanged(policy) => cbor::encode(policy),
            Self::Invited {
                invite,
                level,
                uses,
                expires_ms,
            } => cbor::encode(&Invited {
                key: Bytes(*invite.as_bytes()),
                uses: *uses,
                level: *level,
                until: *expires_ms,
            }),
            Self::InviteWithdrawn { invite } => cbor::encode(&Withdrawn {
                key: Bytes(*invite.as_bytes()),
            }),
            Self::Admitted { request, level } => cbor::encode(&Admitted {
                name: request.name.clone(),
                node: Bytes(*request.node.as_bytes()),
                level: *level,
                proof: Bytes(request.proof.0),
                invite: Bytes(*request.invite.as_bytes()),
            }),
            Self::LevelChanged { node, level } => cbor::encode(&Changed {
                node: Bytes(*node.as_bytes()),
                level: *level,
            }),
            Self::Revoked { node, last_seq } => cbor::encode(&Revoked {
                seq: *last_seq,
                node: Bytes(*node.as_bytes()),
            }),
            Self::Left {} => cbor::encode(&Left {}),
            Self::Named { name } => cbor::encode(&Named { name: name.clone() }),
            Self::ShardAdvertised(descriptor) => {
                // The descriptor's own encoding, as hosts and routers exchange it.
                return descriptor.to_cbor().map_err(|_| EventError::Malformed {
                    what: "the descriptor is too long",
                });
            }
            Self::ShardWithdrawn { shard_id } => cbor::encode(&ShardWithdrawn {
                shard: shard_id.clone(),
            }),
            Self::NodeSeen {
                endpoints,
                name,
                software,
            } => cbor::encode(&Seen {
                name: name.clone(),
                software: software.clone(),
                endpoints: endpoints.clone(),
            }),
            Self::GrantRevoked { issuer, id } => cbor::encode(&GrantRevoked {
                id: Bytes(*id),
                issuer: Bytes(*issuer.as_bytes()),
            }),
            Self::Unknown { bytes, .. } => return Ok(bytes.clone()),
        };
        bytes.map_err(|_| EventError::Malformed {
            what: "its body cannot be encoded",
        })
    }

    /// Reads the body of a kind. `bytes` are bounded by the size of an event.
    pub(super) fn decode(
        kind: &str,
        slot: Option<&str>,
        bytes: &[u8],
        community: CommunityId,
        keys: &mut Keys<'_>,
    ) -> Result<Self, EventError> {
        fn read<T: Serialize + serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, EventError> {
            // A map that holds a map or a list: three levels and one to spare.
            cbor::decode(bytes, 4).map_err(|_| EventError::Malformed {
                what: "its body is not the canonical map of its kind",
            })
        }
        let body = match kind {
            CREATED => {
                let it: Created = read(bytes)?;
                Self::CommunityCreated {
                    name: it.name,
                    policy: it.policy,
                    founder: keys.node(&it.founder)?,
                }
            }
            POLICY => Self::PolicyChanged(read(bytes)?),
            INVITED => {
                let it: Invited = read(bytes)?;
                Self::Invited {
                    invite: keys.node(&it.key)?,
                    level: it.level,
                    uses: it.uses,
                    expires_ms: it.until,
                }
            }
            WITHDRAWN => {
                let it: Withdrawn = read(bytes)?;
                Self::InviteWithdrawn {
                    invite: keys.node(&it.key)?,
                }
            }
            ADMITTED => {
                let it: Admitted = read(bytes)?;
                Self::Admitted {
                    request: JoinRequest {
                        community,
                        node: keys.node(&it.node)?,
                        name: it.name,
                        invite: keys.node(&it.invite)?,
                        proof: JoinProof(it.proof.0),
                    },
                    level: it.level,
                }
            }
            LEVEL => {
                let it: Changed = read(bytes)?;
                Self::LevelChanged {
                    node: keys.node(&it.node)?,
                    level: it.level,
                }
            }
            REVOKED => {
                let it: Revoked = read(bytes)?;
                Self::Revoked {
                    node: keys.node(&it.node)?,
                    last_seq: it.seq,
                }
            }
            LEFT => {
                let Left {} = read(bytes)?;
                Self::Left {}
            }
            NAMED => {
                let it: Named = read(bytes)?;
                Self::Named { name: it.name }
            }
            SHARD_ADVERTISED => {
                let malformed = EventError::Malformed {
                    what: "the descriptor makes no sense",
                };
                let descriptor = Descriptor::from_cbor(bytes).map_err(|_| malformed.clone())?;
                let again = descriptor.to_cbor().map_err(|_| malformed.clone())?;
                if again != bytes {
                    return Err(malformed);
                }
                Self::ShardAdvertised(Box::new(descriptor))
            }
            SHARD_WITHDRAWN => {
                let it: ShardWithdrawn = read(bytes)?;
                Self::ShardWithdrawn { shard_id: it.shard }
            }
            SEEN => {
                let it: Seen = read(bytes)?;
                Self::NodeSeen {
                    endpoints: it.endpoints,
                    name: it.name,
                    software: it.software,
                }
            }
            GRANT_REVOKED => {
                let it: GrantRevoked = read(bytes)?;
                Self::GrantRevoked {
                    issuer: keys.node(&it.issuer)?,
                    id: it.id.0,
                }
            }
            _ => Self::Unknown {
                kind: kind.to_owned(),
                slot: slot.map(str::to_owned),
                bytes: bytes.to_vec(),
            },
        };
        if body.slot().as_deref() != slot {
            return Err(EventError::Malformed {
                what: "its slot is not that of its body",
            });
        }
        body.check(community)?;
        Ok(body)
    }
}

/// One line of text for people: bounded, and nothing that moves a cursor.
fn is_line(text: &str, max: usize) -> bool {
    text.len() <= max && !text.chars().any(char::is_control)
}

// The maps. The order of the fields is that of their encoded keys.

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Created {
    name: String,
    policy: Policy,
    founder: Bytes<32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Invited {
    key: Bytes<32>,
    uses: u32,
    level: Level,
    until: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Withdrawn {
    key: Bytes<32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Admitted {
    name: String,
    node: Bytes<32>,
    level: Level,
    proof: Bytes<64>,
    invite: Bytes<32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Changed {
    node: Bytes<32>,
    level: Level,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Revoked {
    seq: u64,
    node: Bytes<32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Left {}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardWithdrawn {
    shard: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seen {
    name: String,
    software: String,
    endpoints: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GrantRevoked {
    id: Bytes<16>,
    issuer: Bytes<32>,
}
