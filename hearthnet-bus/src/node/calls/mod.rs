//! The capability bus: what a node can be asked to do, by whom, and how it is asked.
//!
//! `specs/capability-bus.md` is the normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | what is offered | [`CapabilityDescriptor`], [`Trust`], [`CallLimits`] | `descriptor.rs` |
//! | what it takes | [`Params`] | `params.rs` |
//! | which capabilities there are | [`Registry`] | `registry.rs` |
//! | how often a peer may ask | [`Budgets`] | `budget.rs` |
//! | the signed part of a call | [`Envelope`] | `envelope.rs` |
//! | messages of `/bus/v1` | [`Request`] | `frame.rs` |
//! | calls, events, acknowledgements, cancel | [`ServingSession`], [`CallingSession`] | `session/` |
//! | whether a call may run | [`CallServer::admit`] | `server/` |
//! | running it | [`Handler`], [`FrameSink`], [`CallServer`] | `registry.rs`, `frame_sink.rs`, `server/` |
//! | asking | [`Client`], [`CallStream`] | `client.rs` |
//! | apps on this machine | [`LocalApi`] | `local_api/` |
//! | granting sessions | [`register_shards`] | `shard_serve/` |
//! | giving up | [`Cancel`] | `cancel.rs` |
//! | codes and sentences | [`Code`], [`CallError`] | `error.rs` |
//!
//! A node that answers:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use hearthnet_bus::{NodeId, calls::*};
//! # use serde_json::{Value, json};
//! # async fn example(own: NodeId, community: Arc<dyn Authority>, data_dir: &std::path::Path)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! struct Echo;
//!
//! impl Handler for Echo {
//!     fn call(&self, _: CallContext, params: Value, out: FrameSink) -> Answering<'_> {
//!         Box::pin(async move {
//!             out.send("echo", &params["text"]).await?;
//!             Ok(json!({}))
//!         })
//!     }
//! }
//!
//! let registry = Arc::new(Registry::new());
//! let mut echo = CapabilityDescriptor::new("test.echo@1.0".parse()?, "Says it again.", Trust::Member);
//! echo.params = Params::none().required("text", Kind::text(1000));
//! registry.register(echo, Arc::new(Echo))?;
//! let server = Arc::new(CallServer::new(own, registry, community));
//! let api = LocalApi::open(data_dir, server).await?; // for apps; peers come through the listener
//! # Ok(())
//! # }
//! ```
//!
//! # What always holds
//!
//! - A handler runs only for a caller of at least its level, with parameters that its
//!   description allows, within every limit. Nobody but members gets further than
//!   `community.join`.
//! - When a caller gives up or is lost, its handler is dropped and all that waits for it
//!   is freed at once.
//! - What a peer can make this node keep is bounded per call, per connection and in time.

mod budget;
mod cancel;
mod client;
mod descriptor;
mod envelope;
mod error;
mod frame;
mod frame_sink;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod local_api;
mod local_client;
mod params;
mod registry;
mod server;
mod session;
mod shard_serve;
mod wire;

/// Capabilities that a node has at most.
pub(crate) const MAX_CAPABILITIES: usize = 64;

pub use budget::{Budgets, Payer, Rate};
pub use cancel::Cancel;
pub use client::{CallStream, Client, Event};
pub use descriptor::{CallLimits, CapabilityDescriptor, EXPERIMENTAL, Stability, Trust};
pub use envelope::{Envelope, EnvelopeError, MAX_CALL_SKEW_MS, MAX_ENVELOPE_BYTES};
pub use error::{CallError, MAX_ERROR_TEXT};
pub use frame::{
    ACK_BYTES, ACK_FRAMES, BUS_PATH, MAX_EVENT_BYTES, MAX_MESSAGE_BYTES, MAX_OPEN_CALLS, Request,
    WINDOW_BYTES, WINDOW_FRAMES,
};
pub use frame_sink::FrameSink;
pub use local_api::{ENDPOINT_FILE, LocalApi, LocalApiError, SOCKET_FILE, TOKEN_FILE};
pub use params::{Kind, Param, ParamError, Params};
pub use registry::{Answering, CallContext, Handler, RegisterError, Registry, Slot};
pub use server::{Admitted, Authority, CallServer, Origin, Research};
pub use session::{Asked, CallingSession, Heard, NotTaken, ServingSession};
pub use shard_serve::{Served, ShardGrant, register_shards};
pub use wire::Wire;

pub use hearthnet_transport::{Code, MAX_NAME};

pub use crate::identity::{CHAT, SHARD_SERVE};
