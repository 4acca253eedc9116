//! One event: its fields, its canonical bytes, its signature.
//!
//! `specs/event-log.md` is the normative text. An event is stored, sent and hashed as the
//! bytes that its author signed; nothing here ever signs or hashes a re-encoding.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::{ByteArray, ByteBuf};
use sha2::{Digest as _, Sha256};
use ulid::Ulid;

use super::body::{Body, EventError, MAX_BODY_BYTES, MAX_KIND_BYTES, MAX_SLOT_BYTES, malformed};
use crate::identity::cbor;
use crate::{CommunityId, Domain, NodeId, NodeKey, SIGNATURE_BYTES};

/// Longest event, in bytes: the longest body, kind and slot, 64 bytes of signature, and some
/// 250 of fixed fields.
pub const MAX_EVENT_BYTES: usize = MAX_BODY_BYTES + MAX_KIND_BYTES + MAX_SLOT_BYTES + 512;

/// How far ahead of this machine's clock an event may claim to be, in milliseconds.
pub const MAX_AHEAD_MS: u64 = 10 * 60 * 1000;

/// How far from the clocks of other members this machine's may be for a durable event to be written,
/// in milliseconds: what others accept, less a minute for how their clocks differ and for the age of
/// what they said of them.
pub(super) const MAX_OFF_MS: u64 = MAX_AHEAD_MS - 60_000;

/// Longest life of an ephemeral event, in milliseconds: an hour, which is the longest life of
/// a session token, and a quarter for the difference of clocks.
pub const MAX_LIFE_MS: u64 = 75 * 60 * 1000;

/// Largest time, sequence number and Lamport time: 2^53 - 1, which SQLite and JSON hold
/// exactly; as a time it is the year 287396.
pub const MAX_NUMBER: u64 = (1 << 53) - 1;

/// The version of the fields, their field `v`.
const VERSION: u8 = 1;

/// Identity of an event: the SHA-256 of the bytes that its author signed, without the
/// signature. Its order is that of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventHash(pub [u8; 32]);

impl EventHash {
    /// The predecessor of an author's first durable event.
    pub const ZERO: Self = Self([0; 32]);

    /// The hash of an event as it is stored. `None` for fewer bytes than a signature has.
    pub fn of(raw: &[u8]) -> Option<Self> {
        let (signed, _) = raw.split_last_chunk::<SIGNATURE_BYTES>()?;
        Some(Self(Sha256::digest(signed).into()))
    }

    /// What ids of later events name it by.
    pub(super) fn name(&self) -> u128 {
        name(&self.0)
    }

    /// Its first eight bytes as a number: enough to notice that two sides differ.
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

impl Serialize for EventHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            ByteArray::new(self.0).serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for EventHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Only what the log stores for itself is read again.
        Ok(Self(*ByteArray::deserialize(deserializer)?))
    }
}

/// The name of an event for people: a ULID, 26 characters, which begin with its time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct EventId(Ulid);

impl EventId {
    /// The id of an event made at `time_ms` with 80 bits of `random`.
    pub fn new(time_ms: u64, random: u128) -> Self {
        Self(Ulid::from_parts(time_ms, random))
    }

    /// The id of an event whose author had seen `last` as the last one in the order: in the place of
    /// randomness it names that one. The author is in it as well, so that the ids of two who write at
    /// one moment differ.
    pub(super) fn after(time_ms: u64, author: &NodeId, last: EventHash) -> Self {
        Self::new(time_ms, last.name() ^ name(author.as_bytes()))
    }

    /// Which event it names, if it names one: [`EventHash::name`].
    pub(super) fn names(&self, author: &NodeId) -> u128 {
        self.0.random() ^ name(author.as_bytes())
    }
}

/// As much of a hash or key as an id has room for: its first ten bytes.
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

/// Which of an author's two histories an event belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Kept for ever: a chain without holes.
    Durable {
        /// The author's durable event before this one; zeros for the first.
        prev: EventHash,
    },
    /// Kept until it expires or a newer one of the same slot comes.
    Ephemeral {
        /// What it is about.
        slot: String,
        /// First Unix millisecond in which it no longer holds, at most [`MAX_LIFE_MS`] after
        /// the event's time.
        expires_ms: u64,
    },
}

/// One signed statement of one author.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    /// The community that it belongs to.
    pub community: CommunityId,
    /// Who signed it.
    pub author: NodeId,
    /// From 1, per author and lane. In the durable lane without holes.
    pub seq: u64,
    /// Greater than that of every durable event that had taken effect for the author; at most
    /// `time_ms`. The event takes effect when this moment has come.
    pub lamport: u64,
    /// When it was made, in Unix milliseconds by the author's clock.
    pub time_ms: u64,
    /// Its name for people.
    pub id: EventId,
    /// Durable or ephemeral.
    pub lane: Lane,
    /// What it says.
    pub body: Body,
}

/// Where an event stands in the order in which the log is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// First by Lamport time,
    pub lamport: u64,
    /// then by author,
    pub author: NodeId,
    /// then by sequence number.
    pub seq: u64,
}

/// Keys that were found to be usable, so that a batch by a few authors does not pay a scalar
/// multiplication for every mention of them.
#[derive(Debug, Default)]
pub(super) struct Checked(HashSet<NodeId>);

impl Checked {
    /// More keys than a community has members; then it begins anew.
    const MAX: usize = 8192;

    fn check(&mut self, node: &NodeId) -> Result<(), EventError> {
        if !self.0.contains(node) {
            // A key that cannot be an identity cannot have signed anything either.
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
    /// Where it stands in the total order.
    pub fn position(&self) -> Position {
        Position {
            lamport: self.lamport,
            author: self.author,
            seq: self.seq,
        }
    }

    /// Encodes and signs: the bytes that are stored and sent.
    ///
    /// # Errors
    /// [`EventError::Malformed`] if a field is out of its range; [`EventError::Signature`] if
    /// `key` is not the author's, or an admission's proof does not hold.
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

    /// Decodes and verifies what a peer sent: form, signature, the proof of an admission.
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

    /// The bytes that the author signed, made again from what was read of them.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn encode_again(raw: &[u8]) -> Option<Vec<u8>> {
        Fields::of(&Self::decode_stored(raw).ok()?)
            .ok()?
            .encode()
            .ok()
    }

    /// Whether bytes that may be an event say that somebody has made it.
    pub(crate) fn is_by(raw: &[u8], author: &NodeId) -> bool {
        Self::decode_stored(raw).is_ok_and(|event| event.author == *author)
    }

    /// Decodes what this program stored after it had verified it: keys are taken as they are.
    pub(super) fn decode_stored(raw: &[u8]) -> Result<Self, EventError> {
        if raw.len() > MAX_EVENT_BYTES {
            return Err(malformed("it is too long"));
        }
        let (signed, _) = split(raw)?;
        let event = Fields::decode(signed)?.into_event()?;
        event.check()?;
        Ok(event)
    }

    /// What holds for the fields of every event, whoever reads it and when.
    fn check(&self) -> Result<(), EventError> {
        let malformed = |what| Err(malformed(what));
        if self.seq == 0 || self.lamport == 0 {
            return malformed("its sequence number or Lamport time is zero");
        }
        if self.seq > MAX_NUMBER || self.lamport > MAX_NUMBER || self.time_ms > MAX_NUMBER {
            return malformed("a number is above 2^53 - 1");
        }
        // A Lamport time counts events. No community makes one in every millisecond since
        // 1970, so this hinders nobody, and it keeps one member from using up the numbers:
        // together with the bound on times it can only run ahead by minutes.
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

/// The signed map. The order of the fields is that of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    v: u8,
    id: ByteArray<16>,
    seq: u64,
    // A byte string, so that a kind that nobody here knows can be kept unread.
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
    author: ByteArray<32>,
    lamport: u64,
    community: ByteArray<32>,
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
            author: ByteArray::new(*event.author.as_bytes()),
            lamport: event.lamport,
            community: ByteArray::new(*event.community.as_bytes()),
        })
    }

    fn encode(&self) -> Result<Vec<u8>, EventError> {
        cbor::encode(self).map_err(|_| malformed("it cannot be encoded"))
    }

    fn decode(signed: &[u8]) -> Result<Self, EventError> {
        // The map is flat; two levels of recursion are one more than it needs.
        let fields: Self = cbor::decode(signed, 2)
            .map_err(|_| malformed("it is not the canonical map of an event"))?;
        if fields.v != VERSION {
            return Err(malformed("its version is unknown"));
        }
        Ok(fields)
    }

    fn into_event(self) -> Result<Event, EventError> {
        let node = |key: ByteArray<32>| NodeId::from_checked(*key);
        let community = CommunityId::from(node(self.community));
        let author = node(self.author);
        let body = Body::decode(&self.kind, self.slot.as_deref(), &self.body, community)?;
        let lane = match (self.lane, self.prev, self.slot, self.until) {
            (0, Some(prev), None, None) => Lane::Durable {
                prev: EventHash(*prev),
            },
            (1, None, Some(slot), Some(expires_ms)) => Lane::Ephemeral { slot, expires_ms },
            _ => {
                return Err(malformed("its fields are not those of its lane"));
            }
        };
        Ok(Event {
            community,
            author,
            seq: self.seq,
            lamport: self.lamport,
            time_ms: self.time,
            id: EventId(Ulid::from_bytes(*self.id)),
            lane,
            body,
        })
    }
}
