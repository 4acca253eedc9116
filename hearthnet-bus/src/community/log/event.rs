//! Events: fields, canonical bytes and signature.
//!
//! `specs/event-log.md` is the normative text. An event is stored, sent and hashed as the bytes
//! that its author signed, never as a re-encoding.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_bytes::{ByteArray, ByteBuf};
use sha2::{Digest as _, Sha256};
use ulid::Ulid;

use super::body::{Body, EventError, MAX_BODY_BYTES, MAX_KIND_BYTES, MAX_SLOT_BYTES, malformed};
use crate::identity::cbor::{self, MAX_NUMBER};
use crate::identity::{by_format, raw_keys};
use crate::{CommunityId, Domain, NodeId, NodeKey, SIGNATURE_BYTES};

/// Maximum length of an event in bytes: the longest body, kind and slot, 64 bytes of signature, and
/// some 250 of fixed fields.
pub const MAX_EVENT_BYTES: usize = MAX_BODY_BYTES + MAX_KIND_BYTES + MAX_SLOT_BYTES + 512;

/// Maximum time of an event ahead of this machine's clock, in ms.
pub const MAX_AHEAD_MS: u64 = 10 * 60 * 1000;

/// Maximum difference from the clocks of other members at which this node writes durable events, in
/// ms. It is the limit that others accept, less a minute for the differences between their clocks
/// and for the age of their announcements.
pub(super) const MAX_OFF_MS: u64 = MAX_AHEAD_MS - 60_000;

/// Maximum life of an ephemeral event in ms: an hour, which is the longest life of a session token,
/// and a quarter for clock differences.
pub const MAX_LIFE_MS: u64 = 75 * 60 * 1000;

/// Value of the fields' `v`.
const VERSION: u8 = 1;

/// Identity of an event: SHA-256 of the bytes that its author signed, without the signature.
/// Ordered bytewise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventHash(#[serde(with = "by_format::hash")] pub [u8; 32]);

impl EventHash {
    /// Predecessor hash of an author's first durable event.
    pub const ZERO: Self = Self([0; 32]);

    /// Hash of an event as stored. `None` if `raw` is shorter than a signature.
    pub fn of(raw: &[u8]) -> Option<Self> {
        let (signed, _) = raw.split_last_chunk::<SIGNATURE_BYTES>()?;
        Some(Self(Sha256::digest(signed).into()))
    }

    /// Name by which ids of later events refer to this event.
    pub(super) fn name(&self) -> u128 {
        name(&self.0)
    }

    /// First eight bytes as a number: enough to detect that two sides differ.
    pub fn tag(&self) -> u64 {
        self.0
            .first_chunk::<8>()
            .map_or(0, |head| u64::from_be_bytes(*head))
    }
}

impl fmt::Display for EventHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for EventHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Display id of an event: a ULID of 26 characters, which begins with the event's time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct EventId(Ulid);

impl EventId {
    /// Id of an event made at `time_ms`, with 80 bits of `random`.
    pub fn new(time_ms: u64, random: u128) -> Self {
        Self(Ulid::from_parts(time_ms, random))
    }

    /// Id of an event whose author had seen `last` as the last event in the order. The random part
    /// names `last`, combined with the author, so that two authors who write at one moment get
    /// different ids.
    pub(super) fn after(time_ms: u64, author: &NodeId, last: EventHash) -> Self {
        Self::new(time_ms, last.name() ^ name(author.as_bytes()))
    }

    /// Name ([`EventHash::name`]) of the last event that the author had seen. Random, and without
    /// meaning, in older events.
    pub(super) fn names(&self, author: &NodeId) -> u128 {
        self.0.random() ^ name(author.as_bytes())
    }
}

/// First ten bytes of a hash or key: as much as an id has room for.
fn name(bytes: &[u8; 32]) -> u128 {
    let ten = bytes.iter().take(10);
    ten.fold(0, |name, byte| name << 8 | u128::from(*byte))
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

impl fmt::Debug for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The two histories of an author.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Kept for ever, as a chain without holes.
    Durable {
        /// Hash of the author's previous durable event; zeros for the first.
        prev: EventHash,
    },
    /// Kept until it expires or a newer event of the same slot arrives.
    Ephemeral {
        /// Subject of the event.
        slot: String,
        /// First Unix millisecond in which the event is no longer valid; at most [`MAX_LIFE_MS`]
        /// after its time.
        expires_ms: u64,
    },
}

/// Signed event of one author.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    pub community: CommunityId,
    pub author: NodeId,
    /// Sequence number, from 1, per author and lane. Without holes in the durable lane.
    pub seq: u64,
    /// Greater than that of every durable event that had taken effect for the author; at most
    /// `time_ms`. The event takes effect at this Unix millisecond.
    pub lamport: u64,
    /// Time of making, in Unix milliseconds by the author's clock.
    pub time_ms: u64,
    /// Display id.
    pub id: EventId,
    pub lane: Lane,
    pub body: Body,
}

/// Position of an event in the total order: by Lamport time, then author, then sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    pub lamport: u64,
    #[serde(with = "raw_keys")]
    pub author: NodeId,
    pub seq: u64,
}

/// Cache of valid keys. It saves a scalar multiplication for each further occurrence of a key in a
/// batch.
#[derive(Debug, Default)]
pub(super) struct Checked(HashSet<NodeId>);

impl Checked {
    /// More keys than a community has members. Beyond this, the cache is cleared.
    const MAX: usize = 8192;

    fn check(&mut self, node: &NodeId) -> Result<(), EventError> {
        if !self.0.contains(node) {
            // A key that is not a valid identity cannot have signed anything either.
            NodeId::from_bytes(node.as_bytes()).map_err(|_| EventError::Signature)?;
            if self.0.len() >= Self::MAX {
                self.0.clear();
            }
            self.0.insert(*node);
        }
        Ok(())
    }
}

impl Event {
    /// Position in the total order.
    pub fn position(&self) -> Position {
        Position {
            lamport: self.lamport,
            author: self.author,
            seq: self.seq,
        }
    }

    /// Encodes and signs the event. Returns the bytes that are stored and sent.
    ///
    /// # Errors
    /// [`EventError::Malformed`] if a field is out of its range; [`EventError::Signature`] if `key`
    /// is not the author's, or the proof of an admission does not verify.
    pub fn sign(&self, key: &NodeKey) -> Result<Vec<u8>, EventError> {
        if key.id() != self.author {
            return Err(EventError::Signature);
        }
        self.check()?;
        self.check_proof()?;
        let mut raw = Fields::of(self)?.encode()?;
        let signature = key.sign(Domain::Event, &raw);
        raw.extend_from_slice(&signature);
        if raw.len() > MAX_EVENT_BYTES {
            return Err(malformed("it is too long"));
        }
        Ok(raw)
    }

    /// Decodes and verifies an event of a peer: form, keys, signature, and the proof of an
    /// admission.
    ///
    /// # Errors
    /// Any [`EventError`].
    pub fn verify(raw: &[u8]) -> Result<Self, EventError> {
        Self::verify_with(raw, &mut Checked::default())
    }

    pub(super) fn verify_with(raw: &[u8], checked: &mut Checked) -> Result<Self, EventError> {
        let event = Self::decode_stored(raw)?;
        let signers = [event.community.root(), event.author];
        let mut nodes = signers.into_iter().chain(event.body.keys());
        nodes.try_for_each(|node| checked.check(&node))?;
        let (signed, signature) = split(raw)?;
        Domain::Event
            .verify(&event.author, signed, signature)
            .map_err(|_| EventError::Signature)?;
        event.check_proof()?;
        Ok(event)
    }

    /// Encodes the signed fields again after decoding them.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn encode_again(raw: &[u8]) -> Option<Vec<u8>> {
        Fields::of(&Self::decode_stored(raw).ok()?)
            .ok()?
            .encode()
            .ok()
    }

    /// Returns whether bytes decode to an event of this author. The signature is not checked.
    pub(crate) fn is_by(raw: &[u8], author: &NodeId) -> bool {
        Self::decode_stored(raw).is_ok_and(|event| event.author == *author)
    }

    /// Decodes an event that was verified before it was stored. Does not check its keys.
    pub(super) fn decode_stored(raw: &[u8]) -> Result<Self, EventError> {
        if raw.len() > MAX_EVENT_BYTES {
            return Err(malformed("it is too long"));
        }
        let (signed, _) = split(raw)?;
        let event = Fields::decode(signed)?;
        event.check()?;
        Ok(event)
    }

    /// Checks the conditions on the fields that hold for every reader at any time.
    fn check(&self) -> Result<(), EventError> {
        let malformed = |what| Err(malformed(what));
        if self.seq == 0 || self.lamport == 0 {
            return malformed("its sequence number or Lamport time is zero");
        }
        if self.seq > MAX_NUMBER || self.lamport > MAX_NUMBER || self.time_ms > MAX_NUMBER {
            return malformed("a number is above 2^53 - 1");
        }
        // A Lamport time counts events. No community makes one in every millisecond since 1970, so
        // this limits no honest author. Together with the bound on times, it lets a member run
        // ahead by minutes only, so that no member can use up the numbers.
        if self.lamport > self.time_ms {
            return malformed("its Lamport time is beyond its time");
        }
        let root = self.community.root();
        let created = matches!(self.body, Body::CommunityCreated { .. });
        let first_of_root =
            self.author == root && self.seq == 1 && matches!(self.lane, Lane::Durable { .. });
        if created != first_of_root {
            return malformed("the root's first event, and only that, creates the community");
        }
        match &self.lane {
            Lane::Durable { prev } => {
                if (self.seq == 1) != (*prev == EventHash::ZERO) {
                    return malformed("only an author's first event has no predecessor");
                }
                if self.body.slot().is_some() {
                    return malformed("its kind is ephemeral");
                }
            }
            Lane::Ephemeral { slot, expires_ms } => {
                if self.body.slot().as_ref() != Some(slot) {
                    return malformed("its slot is not that of its body");
                }
                let life = expires_ms.checked_sub(self.time_ms);
                if !life.is_some_and(|life| (1..=MAX_LIFE_MS).contains(&life)) {
                    return malformed("it lives longer than an ephemeral event may, or not at all");
                }
            }
        }
        if let Body::ShardAdvertised(descriptor) = &self.body
            && descriptor.host != self.author
        {
            return malformed("it advertises another node's shard");
        }
        self.body.check(self.community)
    }

    fn check_proof(&self) -> Result<(), EventError> {
        match &self.body {
            Body::Admitted { request, .. } => request.verify().map_err(|_| EventError::Signature),
            _ => Ok(()),
        }
    }
}

fn split(raw: &[u8]) -> Result<(&[u8], &[u8; SIGNATURE_BYTES]), EventError> {
    raw.split_last_chunk::<SIGNATURE_BYTES>()
        .ok_or(malformed("it is too short"))
}

/// Signed map. The fields stand in the order of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    v: u8,
    id: ByteArray<16>,
    seq: u64,
    // A byte string, so that the body of an unknown kind can be stored unread.
    body: ByteBuf,
    kind: String,
    lane: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prev: Option<ByteArray<32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slot: Option<String>,
    time: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until: Option<u64>,
    #[serde(with = "raw_keys")]
    author: NodeId,
    lamport: u64,
    #[serde(with = "raw_keys")]
    community: CommunityId,
}

impl Fields {
    fn of(event: &Event) -> Result<Self, EventError> {
        let (lane, prev, slot, until) = match &event.lane {
            Lane::Durable { prev } => (0, Some(ByteArray::new(prev.0)), None, None),
            Lane::Ephemeral { slot, expires_ms } => {
                (1, None, Some(slot.clone()), Some(*expires_ms))
            }
        };
        Ok(Self {
            v: VERSION,
            id: ByteArray::new(event.id.0.to_bytes()),
            seq: event.seq,
            body: ByteBuf::from(event.body.encode()?),
            kind: event.body.kind().to_owned(),
            lane,
            prev,
            slot,
            time: event.time_ms,
            until,
            author: event.author,
            lamport: event.lamport,
            community: event.community,
        })
    }

    fn encode(&self) -> Result<Vec<u8>, EventError> {
        cbor::encode(self).map_err(|_| malformed("it cannot be encoded"))
    }

    fn decode(signed: &[u8]) -> Result<Event, EventError> {
        // The map is flat; a recursion limit of 2 is one more than it needs.
        let it: Self = cbor::decode(signed, 2)
            .map_err(|_| malformed("it is not the canonical map of an event"))?;
        if it.v != VERSION {
            return Err(malformed("its version is unknown"));
        }
        let body = Body::decode(&it.kind, it.slot.as_deref(), &it.body, it.community)?;
        let lane = match (it.lane, it.prev, it.slot, it.until) {
            (0, Some(prev), None, None) => Lane::Durable {
                prev: EventHash(*prev),
            },
            (1, None, Some(slot), Some(expires_ms)) => Lane::Ephemeral { slot, expires_ms },
            _ => return Err(malformed("its fields are not those of its lane")),
        };
        Ok(Event {
            community: it.community,
            author: it.author,
            seq: it.seq,
            lamport: it.lamport,
            time_ms: it.time,
            id: EventId(Ulid::from_bytes(*it.id)),
            lane,
            body,
        })
    }
}
