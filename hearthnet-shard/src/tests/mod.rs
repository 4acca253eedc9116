//! Hosts on an engine of plain arithmetic: over sockets, in a community, and on one thread in
//! virtual time.

use hearthnet_bus::{Grant, NodeKey};
use hearthnet_transport::Message;

pub(crate) use crate::fake;
use fake::step_of;

mod community;
mod net;
mod protocol;
#[cfg(feature = "shuttle")]
mod schedules;

fn step(stream: u32, position: u32, rows: &[[f32; 4]]) -> Message {
    Message::Step(step_of(stream, position, rows))
}

fn rows(count: u32) -> Vec<[f32; 4]> {
    (0..count)
        .map(|i| [(i % 50) as f32, 1.0, -2.0, 0.5])
        .collect()
}

fn host_key() -> NodeKey {
    NodeKey::from_secret(&[1; 32])
}

fn caller_key() -> NodeKey {
    NodeKey::from_secret(&[2; 32])
}

/// A fresh session token for the host, modified by `change`.
fn token(issuer: &NodeKey, subject: &NodeKey, change: impl FnOnce(&mut Grant)) -> Vec<u8> {
    let host = host_key().id();
    let mut grant = Grant::of_session(issuer.id(), subject.id(), host, 60).unwrap();
    change(&mut grant);
    grant.sign(issuer).unwrap()
}
