//! Gossip client of the attacker, written from `specs/gossip.md`.

use std::net::SocketAddr;

use ciborium::Value;
use hearthnet_bus::NodeKey;
use hearthnet_bus::log::Heads;

use super::{Came, Credentials, Message, Peer};
use crate::{HarnessError, Result};

/// Maximum events and bytes of a batch.
const BATCH: (usize, usize) = (1024, 512 * 1024);

/// Host's reaction to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The host acknowledged the batch.
    Stored {
        /// New events.
        accepted: u64,
        /// Events that were neither accepted nor known already.
        refused: u64,
    },
    /// The session was closed, with this close code if there was one.
    Closed(Option<u16>),
}

#[derive(Debug)]
pub(crate) struct Gossip {
    peer: Peer,
    number: u64,
}

fn message(fields: Vec<Value>) -> Message {
    let mut bytes = Vec::new();
    // Writing integers and strings to memory cannot fail.
    let _ = ciborium::into_writer(&Value::Array(fields), &mut bytes);
    Message::binary(bytes)
}

impl Gossip {
    /// Connects as a member and sends HELLO.
    ///
    /// # Errors
    /// If the host refuses the connection.
    pub(crate) async fn open(
        addr: SocketAddr,
        key: &NodeKey,
        community: &[u8; 32],
    ) -> Result<Gossip> {
        let peer = Peer::secured(addr, &Credentials::of(&key.secret())).await?;
        let mut peer = peer.upgraded_at("/sync/v1").await?;
        let community = Value::Bytes(community.to_vec());
        peer.send(message(vec![0.into(), 1.into(), community]))
            .await;
        Ok(Gossip { peer, number: 0 })
    }

    /// Sends events batch by batch. Returns the sum of the acknowledgements, or the end of the
    /// session.
    pub(crate) async fn push(&mut self, events: &[Vec<u8>]) -> Pushed {
        let (mut all, mut events) = ((0, 0), events);
        while !events.is_empty() {
            let mut bytes = 0;
            let fits = events.iter().take(BATCH.0).take_while(|event| {
                bytes += event.len();
                bytes <= BATCH.1
            });
            let (batch, rest) = events.split_at(fits.count().max(1));
            events = rest;
            self.number += 1;
            let listed = batch.iter().map(|event| Value::Bytes(event.clone()));
            let fields = vec![2.into(), self.number.into(), Value::Array(listed.collect())];
            self.peer.send(message(fields)).await;
            match self.acknowledged().await {
                Pushed::Stored { accepted, refused } => {
                    all = (all.0 + accepted, all.1 + refused);
                }
                closed @ Pushed::Closed(_) => return closed,
            }
        }
        let (accepted, refused) = all;
        Pushed::Stored { accepted, refused }
    }

    /// Sends empty heads; returns the heads of the host and all events that it sends.
    ///
    /// # Errors
    /// If the session ends before the host has sent everything.
    pub(crate) async fn ask(&mut self, none: &Heads) -> Result<(Heads, Vec<Vec<u8>>)> {
        let heads = vec![1.into(), 1.into(), Value::Bytes(none.to_cbor())];
        self.peer.send(message(heads)).await;
        let (mut theirs, mut events) = (None, Vec::new());
        loop {
            let Came::Message(bytes) = self.peer.message().await else {
                return Err(HarnessError::attacker("the host ends the session"));
            };
            let value: Option<Value> = ciborium::from_reader(bytes.as_slice()).ok();
            let fields = value
                .and_then(|value| value.into_array().ok())
                .unwrap_or_default();
            match fields.as_slice() {
                [kind, _, Value::Bytes(heads)] if *kind == 1.into() => {
                    theirs = Heads::from_cbor(heads);
                }
                [kind, number, Value::Array(batch)] if *kind == 2.into() => {
                    events.extend(batch.iter().filter_map(|event| event.as_bytes().cloned()));
                    let ack = vec![3.into(), number.clone(), 0.into(), 0.into()];
                    self.peer.send(message(ack)).await;
                }
                [kind, _] if *kind == 4.into() => break,
                _ => {}
            }
        }
        let theirs = theirs.ok_or_else(|| HarnessError::attacker("the host says no heads"))?;
        Ok((theirs, events))
    }

    /// Waits for the end of the session.
    pub(crate) async fn ending(&mut self) -> Pushed {
        loop {
            if let closed @ Pushed::Closed(_) = self.acknowledged().await {
                return closed;
            }
        }
    }

    async fn acknowledged(&mut self) -> Pushed {
        loop {
            let came = match self.peer.message().await {
                Came::Message(bytes) => bytes,
                Came::Close(code) => return Pushed::Closed(code),
                Came::End | Came::Nothing => return Pushed::Closed(None),
            };
            let value: Option<Value> = ciborium::from_reader(came.as_slice()).ok();
            let fields = value.and_then(|value| value.into_array().ok());
            let number = |at: usize| {
                let field = fields.as_ref()?.get(at)?.as_integer()?;
                u64::try_from(field).ok()
            };
            match (number(0), number(1)) {
                // Events which the host sends although this side does not ask for them.
                (Some(2), Some(batch)) => {
                    let ack = vec![3.into(), batch.into(), 0.into(), 0.into()];
                    self.peer.send(message(ack)).await;
                }
                (Some(3), Some(batch)) if batch == self.number => {
                    return Pushed::Stored {
                        accepted: number(2).unwrap_or(0),
                        refused: number(3).unwrap_or(0),
                    };
                }
                _ => {}
            }
        }
    }
}
