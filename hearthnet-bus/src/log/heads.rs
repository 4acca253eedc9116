//! How far a log has come: what two nodes exchange to find out what the other lacks.

use std::collections::BTreeMap;

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::event::{Event, EventHash, Lane};
use super::fold::MAX_MEMBERS;
use crate::cbor;
use crate::{CommunityId, NodeId};

/// Most slots that one author may hold; of more, those with the newest events are kept.
pub const MAX_SLOTS: usize = 64;

/// Longest encoding of [`Heads`], in bytes. A community of a hundred nodes with three slots
/// each needs about 15 KiB; this is room for every member that a community may have.
pub const MAX_HEADS_BYTES: usize = 4 * 1024 * 1024;

/// What a node has of each author that its log has a place for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    /// The authors, by node id.
    #[serde(with = "checked::map")]
    pub authors: BTreeMap<NodeId, Head>,
    /// Which community.
    #[serde(with = "checked::community")]
    pub community: CommunityId,
}

/// What a node has of one author.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Durable events without a hole, from 1. Of a frozen author those before the fork.
    pub seq: u64,
    /// The tag ([`EventHash::tag`]) of the last of them; 0 when there is none. As each event
    /// names its predecessor, it stands for the whole history.
    pub tip: u64,
    /// The proof of a fork.
    pub fork: Option<ForkHead>,
    /// By slot key, the newest ephemeral event.
    pub slots: BTreeMap<u64, SlotHead>,
}

/// Which proof of a fork a node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkHead {
    /// Where the history parts.
    pub seq: u64,
    /// The first eight bytes of the SHA-256 of the hashes of the proof, as a number.
    pub proof: u64,
}

/// Which event a slot holds. The order is that in which events replace each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotHead {
    /// Its sequence number.
    pub seq: u64,
    /// Its tag.
    pub tag: u64,
}

/// The bytes are not the heads of this community's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("these are not the heads of an event log")]
pub struct HeadsError;

impl HeadsError {
    /// The stable code of the refusal.
    pub fn code(&self) -> Code {
        Code::new("log_malformed")
    }
}

/// The key of a slot in [`Head::slots`]: the first eight bytes of the SHA-256 of its name.
pub(super) fn slot_key(slot: &str) -> u64 {
    EventHash(Sha256::digest(slot.as_bytes()).into()).tag()
}

/// [`ForkHead::proof`] of a proof's hashes, which are sorted.
pub(super) fn proof_tag(proof: &[EventHash]) -> u64 {
    let mut sha = Sha256::new();
    for hash in proof {
        sha.update(hash.0);
    }
    EventHash(sha.finalize().into()).tag()
}

impl Heads {
    /// The heads of a node that has nothing.
    pub fn empty(community: CommunityId) -> Self {
        Self {
            authors: BTreeMap::new(),
            community,
        }
    }

    /// Encodes as canonical CBOR.
    pub fn to_cbor(&self) -> Vec<u8> {
        // Maps, numbers and strings of bytes: an encoder that fails on them is defective, and
        // the empty string is refused by every reader.
        cbor::encode(self).unwrap_or_default()
    }

    /// Decodes what a peer sent.
    ///
    /// # Errors
    /// [`HeadsError`] if the bytes are longer than [`MAX_HEADS_BYTES`], not canonical, name an
    /// unusable key, or more authors or slots than a log has.
    pub fn from_cbor(bytes: &[u8]) -> Result<Self, HeadsError> {
        if bytes.len() > MAX_HEADS_BYTES {
            return Err(HeadsError);
        }
        let heads: Self = cbor::decode(bytes, 6).map_err(|_| HeadsError)?;
        let slots_fit = heads.authors.values().all(|h| h.slots.len() <= MAX_SLOTS);
        if heads.authors.len() > MAX_MEMBERS + 1 || !slots_fit {
            return Err(HeadsError);
        }
        Ok(heads)
    }

    /// Notes that the peer with these heads sent an event, so that it is not sent back. The log
    /// has looked at the event before; what is no event is not noted.
    pub(crate) fn note_received(&mut self, raw: &[u8]) {
        if let (Ok(event), Some(hash)) = (Event::decode_stored(raw), EventHash::of(raw)) {
            self.note(&event, hash);
        }
    }

    /// Notes that a peer with these heads was sent an event: what it has if it takes it. So
    /// the next batch can follow without waiting for the peer's new heads.
    pub(super) fn note(&mut self, event: &Event, hash: EventHash) {
        let head = self.authors.entry(event.author).or_default();
        match &event.lane {
            Lane::Durable { .. } => {
                if event.seq == head.seq.saturating_add(1) {
                    head.seq = event.seq;
                    head.tip = hash.tag();
                }
            }
            Lane::Ephemeral { slot, .. } => {
                let new = SlotHead {
                    seq: event.seq,
                    tag: hash.tag(),
                };
                let slot = head.slots.entry(slot_key(slot)).or_insert(new);
                *slot = new.max(*slot);
            }
        }
    }
}

/// Node ids in what a peer sent: raw keys, checked here.
mod checked {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::cbor::Bytes;
    use crate::{CommunityId, NodeId};

    pub(super) mod community {
        use super::{Bytes, CommunityId, Deserialize, Deserializer, Serializer};
        use serde::Serialize as _;

        pub(in crate::log) fn serialize<S: Serializer>(
            id: &CommunityId,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            Bytes(*id.as_bytes()).serialize(serializer)
        }

        pub(in crate::log) fn deserialize<'de, D: Deserializer<'de>>(
            deserializer: D,
        ) -> Result<CommunityId, D::Error> {
            let key = Bytes::deserialize(deserializer)?;
            CommunityId::from_bytes(&key.0).map_err(serde::de::Error::custom)
        }
    }

    pub(super) mod map {
        use std::collections::BTreeMap;

        use super::super::{Head, MAX_MEMBERS};
        use super::{Deserializer, NodeId, Serializer};
        use crate::log::community::stored;

        pub(in crate::log) fn serialize<S: Serializer>(
            map: &BTreeMap<NodeId, Head>,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            stored::map::serialize(map, serializer)
        }

        pub(in crate::log) fn deserialize<'de, D: Deserializer<'de>>(
            deserializer: D,
        ) -> Result<BTreeMap<NodeId, Head>, D::Error> {
            let map: BTreeMap<NodeId, Head> = stored::map::deserialize(deserializer)?;
            // A key costs a scalar multiplication to check: first the number of them.
            if map.len() > MAX_MEMBERS + 1 {
                return Err(serde::de::Error::custom("too many authors"));
            }
            for node in map.keys() {
                NodeId::from_bytes(node.as_bytes()).map_err(serde::de::Error::custom)?;
            }
            Ok(map)
        }
    }
}
