//! Heads: a summary of a log. Two nodes exchange heads to find the events that the other lacks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::community::Fork;
use super::event::{Event, EventHash, Lane};
use super::fold::MAX_MEMBERS;
use crate::identity::cbor;
use crate::identity::raw_keys;
use crate::{CommunityId, NodeId};

/// Maximum number of slots per author. Of more, those with the newest events are kept.
pub const MAX_SLOTS: usize = 64;

/// Maximum length of encoded [`Heads`] in bytes. A community of a hundred nodes with three slots
/// each needs about 15 KiB; this has room for the maximum number of members.
pub const MAX_HEADS_BYTES: usize = 4 * 1024 * 1024;

/// Progress of a log, for each author that it has a place for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    #[serde(with = "raw_keys::map")]
    pub authors: BTreeMap<NodeId, Head>,
    #[serde(with = "raw_keys")]
    pub community: CommunityId,
}

/// Progress of a log for one author.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Number of durable events without a hole, from 1. For a frozen author, those before the fork.
    pub seq: u64,
    /// Tag ([`EventHash::tag`]) of the last of them; 0 if there is none. Each event names its
    /// predecessor, so the tag stands for the whole history.
    pub tip: u64,
    /// Proof of a fork.
    pub fork: Option<ForkHead>,
    /// Newest ephemeral event by slot key.
    pub slots: BTreeMap<u64, SlotHead>,
}

/// Summary of the proof of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkHead {
    /// Sequence number at which the history forks.
    pub seq: u64,
    /// First eight bytes of the SHA-256 over the hashes of the proof, as a number.
    pub proof: u64,
}

/// Summary of the event in a slot. A greater one replaces a smaller one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotHead {
    pub seq: u64,
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

/// Key of a slot in [`Head::slots`]: the first eight bytes of the SHA-256 of its name.
pub(super) fn slot_key(slot: &str) -> u64 {
    EventHash(Sha256::digest(slot.as_bytes()).into()).tag()
}

impl Heads {
    /// Heads of a node without events.
    pub fn empty(community: CommunityId) -> Self {
        Self {
            authors: BTreeMap::new(),
            community,
        }
    }

    pub fn to_cbor(&self) -> Vec<u8> {
        let encoded = cbor::encode(self);
        // Maps, numbers and byte strings always encode, so a failure is a bug of the encoder. Every
        // reader refuses the empty string.
        debug_assert!(
            encoded.as_ref().is_ok_and(|bytes| cbor::is_in_order(bytes)),
            "heads cannot be encoded, or their fields are out of order"
        );
        encoded.unwrap_or_default()
    }

    /// Decodes the heads of a peer. Returns `None` if they are longer than [`MAX_HEADS_BYTES`], not
    /// canonical, or name more authors or slots than a log can have. Keys are not checked, because
    /// that is slow and they are only compared with known ones.
    pub fn from_cbor(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > MAX_HEADS_BYTES {
            return None;
        }
        let heads: Self = cbor::decode(bytes, 6).ok()?;
        let slots_fit = heads.authors.values().all(|h| h.slots.len() <= MAX_SLOTS);
        (heads.authors.len() <= MAX_MEMBERS + 1 && slots_fit).then_some(heads)
    }

    /// Records that the peer with these heads sent an event, so that it is not sent back. The log
    /// has checked the event before; malformed events are skipped.
    pub(crate) fn note_received(&mut self, raw: &[u8]) {
        if let (Ok(event), Some(hash)) = (Event::decode_stored(raw), EventHash::of(raw)) {
            self.note(&event, hash);
        }
    }

    /// Records that an event was sent to the peer with these heads, assuming that the peer accepts
    /// it. The next batch can then follow without waiting for the peer's new heads.
    pub(super) fn note(&mut self, event: &Event, hash: EventHash) {
        let head = self.authors.entry(event.author).or_default();
        match &event.lane {
            Lane::Durable { .. } => {
                // No event can follow a fork.
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
