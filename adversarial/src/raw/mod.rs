//! Peer under the attacker's control, byte by byte.
//!
//! It is authenticated like any other member, and shares no code with the program's own encoders.
//! TLS, WebSocket and frames come from the test kit, which the transport's tests use too; events
//! and gossip are written here. All of it is written from the specifications, so that every field
//! can be wrong on purpose.

pub(crate) mod event;
mod gossip;
mod impostor;
mod tap;

pub(crate) use gossip::{Gossip, Pushed};
pub(crate) use hearthnet_testkit::raw::*;
pub(crate) use impostor::Impostor;
pub(crate) use tap::Tap;
