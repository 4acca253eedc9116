//! Events of a community's log, written from `specs/event-log.md`. All fields are valid unless the
//! attack changes them.

use ciborium::Value;
use ed25519_dalek::{Signer, SigningKey};
use hearthnet_bus::NodeKey;
use hearthnet_bus::invite::Invite;
pub(crate) use hearthnet_bus::now_ms;
use sha2::{Digest, Sha256};

use super::cbor;
use crate::Result;

/// Domain separator in front of the signed fields.
pub(crate) const DOMAIN: &[u8] = b"hearthnet/event/v1\0";

/// Maximum size of an event's body, in bytes.
pub(crate) const MAX_BODY: usize = 6144;

/// CBOR byte string.
pub(crate) fn bytes(bytes: &[u8]) -> Value {
    Value::Bytes(bytes.to_vec())
}

/// Body of an event that admits a node by an invite.
pub(crate) fn admission(invite: &Invite, node: &NodeKey, level: &str) -> Result<Vec<u8>> {
    let request = invite.request(node.id(), "kim")?;
    Ok(cbor(&[
        ("name", "kim".into()),
        ("node", bytes(node.id().as_bytes())),
        ("level", level.into()),
        ("proof", bytes(&request.proof.0)),
        ("invite", bytes(invite.key().id().as_bytes())),
    ]))
}

/// Body of an event that publishes an invite.
pub(crate) fn invitation(invite: &Invite, uses: u32, level: &str, until: u64) -> Vec<u8> {
    cbor(&[
        ("key", bytes(invite.key().id().as_bytes())),
        ("uses", uses.into()),
        ("level", level.into()),
        ("until", until.into()),
    ])
}

/// Lane of an event.
#[derive(Clone, Debug)]
pub(crate) enum Lane {
    /// Kept for ever; follows the author's event with this hash.
    Durable([u8; 32]),
    /// Kept in a slot until a time (Unix ms).
    Ephemeral(String, u64),
}

/// Fields of an event.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub(crate) struct Event {
    pub(crate) community: [u8; 32],
    pub(crate) author: [u8; 32],
    pub(crate) seq: u64,
    pub(crate) lamport: u64,
    pub(crate) time: u64,
    pub(crate) kind: String,
    pub(crate) body: Vec<u8>,
    pub(crate) lane: Lane,
}

impl Event {
    /// The signed bytes.
    pub(crate) fn fields(&self) -> Vec<u8> {
        let mut id = self.time.to_be_bytes()[2..].to_vec();
        let noise = Sha256::digest(self.body.as_slice());
        id.extend_from_slice(noise.get(..10).unwrap_or_default());
        let (lane, prev, slot, until) = match &self.lane {
            Lane::Durable(prev) => (0, Some(("prev", bytes(prev))), None, None),
            Lane::Ephemeral(slot, until) => {
                let slot = ("slot", slot.as_str().into());
                (1, None, Some(slot), Some(("until", (*until).into())))
            }
        };
        let fields = [
            Some(("v", 1.into())),
            Some(("id", bytes(&id))),
            Some(("seq", self.seq.into())),
            Some(("body", bytes(&self.body))),
            Some(("kind", self.kind.as_str().into())),
            Some(("lane", lane.into())),
            prev,
            slot,
            Some(("time", self.time.into())),
            until,
            Some(("author", bytes(&self.author))),
            Some(("lamport", self.lamport.into())),
            Some(("community", bytes(&self.community))),
        ];
        cbor(&fields.into_iter().flatten().collect::<Vec<_>>())
    }

    /// The event with this key's signature. Valid only if the key is the author's.
    pub(crate) fn signed(&self, key: &NodeKey) -> Vec<u8> {
        self.signed_for(key, DOMAIN)
    }

    /// The event with a signature over another domain.
    pub(crate) fn signed_for(&self, key: &NodeKey, domain: &[u8]) -> Vec<u8> {
        let mut event = self.fields();
        let signing = SigningKey::from_bytes(&key.secret());
        let signature = signing.sign(&[domain, &event].concat());
        event.extend_from_slice(&signature.to_bytes());
        event
    }

    /// Hash to which the next event of the chain refers.
    pub(crate) fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.fields()).into()
    }
}

/// Member that writes into the log, with its position in it.
#[derive(Debug)]
pub(crate) struct Author {
    community: [u8; 32],
    key: NodeKey,
    last: Option<Event>,
}

impl Author {
    /// Author without events.
    pub(crate) fn new(community: [u8; 32], key: &NodeKey) -> Author {
        Author {
            community,
            key: NodeKey::from_secret(&key.secret()),
            last: None,
        }
    }

    pub(crate) fn key(&self) -> &NodeKey {
        &self.key
    }

    /// Unsigned next durable event.
    pub(crate) fn draft(&self, kind: &str, body: Vec<u8>) -> Event {
        let (seq, lamport, prev) = match &self.last {
            None => (1, 1000, [0; 32]),
            Some(last) => (last.seq + 1, last.lamport + 1, last.hash()),
        };
        Event {
            community: self.community,
            author: *self.key.id().as_bytes(),
            seq,
            lamport,
            time: now_ms(),
            kind: kind.to_owned(),
            body,
            lane: Lane::Durable(prev),
        }
    }

    /// Signs the event and makes it the last one of the chain.
    pub(crate) fn go_on(&mut self, event: &Event) -> Vec<u8> {
        self.last = Some(event.clone());
        event.signed(&self.key)
    }

    /// Writes an event with changes to its fields.
    pub(crate) fn write(
        &mut self,
        kind: &str,
        body: Vec<u8>,
        change: impl FnOnce(&mut Event),
    ) -> Vec<u8> {
        let mut event = self.draft(kind, body);
        change(&mut event);
        self.go_on(&event)
    }

    /// Writes a note: an event of a kind that no node interprets, but every node stores and passes
    /// on.
    pub(crate) fn note(&mut self, bytes: usize, fill: u8) -> Vec<u8> {
        self.write("notes.written", vec![fill; bytes], |_| {})
    }

    /// Unsigned ephemeral event that expires after `life_ms`.
    pub(crate) fn say(
        &self,
        kind: &str,
        slot: &str,
        seq: u64,
        life_ms: u64,
        body: Vec<u8>,
    ) -> Event {
        let draft = self.draft(kind, body);
        let until = draft.time + life_ms;
        Event {
            seq,
            lane: Lane::Ephemeral(slot.to_owned(), until),
            ..draft
        }
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::log::Event as Real;

    use super::*;

    #[test]
    fn the_library_reads_the_events_written_here() {
        let key = NodeKey::from_secret(&[3; 32]);
        let community = *NodeKey::from_secret(&[4; 32]).id().as_bytes();
        let mut author = Author::new(community, &key);
        let first = author.note(10, 7);
        let second = author.note(MAX_BODY, 8);
        let said = author.say("notes.said", "notes", 5, 60_000, vec![0xa0]);
        for raw in [first, second, said.signed(&key)] {
            let event = Real::verify(&raw).unwrap();
            assert_eq!(event.author, key.id());
        }
        let forged = author.draft("notes.written", vec![1]);
        let forged = forged.signed(&NodeKey::from_secret(&[5; 32]));
        assert_eq!(
            Real::verify(&forged).unwrap_err().code(),
            "invalid_signature"
        );
    }
}
