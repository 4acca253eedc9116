//! How far a log has come: what two nodes exchange to find out what the other lacks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::community::Fork;
use super::event::{Event, EventHash, Lane};
use super::fold::MAX_MEMBERS;
use crate::identity::cbor;
use crate::identity::raw_keys;
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
    #[serde(with = "raw_keys::map")]
    pub authors: BTreeMap<NodeId, Head>,
    /// Which community.
    #[serde(with = "raw_keys::community")]
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

impl SlotHead {
    pub(super) fn new(seq: u64, hash: EventHash) -> Self {
        let tag = hash.tag();
        Self { seq, tag }
    }
}

impl From<&Fork> for ForkHead {
    fn from(fork: &Fork) -> Self {
        let mut sha = Sha256::new();
        for hash in &fork.proof {
            sha.update(hash.0);
        }
        Self {
            seq: fork.seq,
            proof: EventHash(sha.finalize().into()).tag(),
        }
    }
}

/// The key of a slot in [`Head::slots`]: the first eight bytes of the SHA-256 of its name.
pub(super) fn slot_key(slot: &str) -> u64 {
    EventHash(Sha256::digest(slot.as_bytes()).into()).tag()
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
        let encoded = cbor::encode(self);
        // Maps, numbers and strings of bytes: an encoder that fails on them is defective. The
        // empty string is refused by every reader.
        debug_assert!(
            encoded.as_ref().is_ok_and(|bytes| cbor::is_in_order(bytes)),
            "heads cannot be encoded, or their fields are out of order"
        );
        encoded.unwrap_or_default()
    }

    /// Decodes what a peer sent. `None` if the bytes are longer than [`MAX_HEADS_BYTES`], not
    /// canonical, or name more authors or slots than a log has. Keys are not checked, which takes
    /// long: they are only looked up among those that this log knows.
    pub fn from_cbor(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > MAX_HEADS_BYTES {
            return None;
        }
        let heads: Self = cbor::decode(bytes, 6).ok()?;
        let slots_fit = heads.authors.values().all(|h| h.slots.len() <= MAX_SLOTS);
        (heads.authors.len() <= MAX_MEMBERS + 1 && slots_fit).then_some(heads)
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
                // Beyond a fork nothing follows.
                if head.fork.is_none() && event.seq == head.seq.saturating_add(1) {
                    head.seq = event.seq;
                    head.tip = hash.tag();
                }
            }
            Lane::Ephemeral { slot, .. } => {
                let new = SlotHead::new(event.seq, hash);
                let slot = head.slots.entry(slot_key(slot)).or_insert(new);
                *slot = new.max(*slot);
            }
        }
    }
}
