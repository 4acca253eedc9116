//! A peer under the attacker's control, byte by byte.
//!
//! It is authenticated like anybody else (that is what makes it dangerous), and shares nothing
//! with the program's own encoders: TLS, WebSocket and frames are the test kit's, which the transport's
//! tests use too; events and gossip are written here, all of it from the specifications, so that
//! every field can be wrong on purpose.

pub(crate) mod event;
mod gossip;
mod impostor;
mod tap;

pub(crate) use gossip::{Gossip, Pushed};
pub(crate) use hearthnet_testkit::raw::*;
pub(crate) use impostor::{Impostor, Trick};
pub(crate) use tap::Tap;
