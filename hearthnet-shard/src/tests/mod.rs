//! Hosts on an engine of plain arithmetic: over sockets, in a community, and on one thread in
//! virtual time.

use bytes::Bytes;
use hearthnet_bus::{Grant, NodeKey};
use hearthnet_files::BoundaryDtype;
use hearthnet_transport::{DType, Message, Step, StreamOpen, Want};

pub(crate) use crate::fake;
use fake::{WEIGHTS, WIDTH};

mod community;
mod net;
mod protocol;
#[cfg(feature = "shuttle")]
mod schedules;

/// Opens a stream through all layers of the host.
fn open_for(stream: u32, epoch: u32, max_positions: u32) -> StreamOpen {
    StreamOpen {
        stream,
        epoch,
        weights: WEIGHTS,
        lo: 2,
        hi: 5,
        max_positions,
        fork: None,
    }
}

fn step_of(stream: u32, position: u32, rows: &[[f32; 4]]) -> Step {
    Step {
        stream,
        epoch: 1,
        position,
        rows: rows.len() as u32,
        width: WIDTH,
        dtype: DType::F16,
        want: Want::All,
        data: encode(rows),
    }
}

fn step(stream: u32, position: u32, rows: &[[f32; 4]]) -> Message {
    Message::Step(step_of(stream, position, rows))
}

fn encode(rows: &[[f32; 4]]) -> Bytes {
    let mut data = Vec::new();
    BoundaryDtype::F16.encode(rows.as_flattened(), &mut data);
    data.into()
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
