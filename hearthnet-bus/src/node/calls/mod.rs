//! The capability bus: calls between nodes, and from apps to their node.
//!
//! `specs/capability-bus.md` is the normative text.
//!
//! | concept | type | file |
//! |---|---|---|
//! | descriptors | [`CapabilityDescriptor`], [`CallLimits`] | `descriptor.rs` |
//! | parameters | [`Params`] | `params.rs` |
//! | table of capabilities | [`Registry`] | `registry.rs` |
//! | rate limits | [`Budgets`] | `budget.rs` |
//! | signed part of a call | [`Envelope`] | `envelope.rs` |
//! | messages of `/bus/v1` | [`Request`] | `frame.rs` |
//! | calls, events, acknowledgements, cancel | [`ServingSession`], [`CallingSession`] | `session/` |
//! | admission of a call | [`CallServer::admit`] | `server/` |
//! | execution of a call | [`Handler`], [`FrameSink`], [`CallServer`] | `registry.rs`, `frame_sink.rs`, `server/` |
//! | client | [`Client`], [`CallStream`] | `client.rs` |
//! | apps on this machine | [`LocalApi`] | `local_api/` |
//! | session grants | [`register_shards`] | `shard_serve/` |
//! | errors | [`Code`], [`CallError`] | `error.rs` |
//!
//! A node that answers calls:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use hearthnet_bus::{NodeId, calls::*, log::Level};
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
//! let mut echo = CapabilityDescriptor::new("test.echo@1.0".parse()?, "Repeats a text.", Some(Level::Member));
//! echo.params = Params::none().required("text", Kind::text(1000));
//! registry.register(echo, Arc::new(Echo))?;
//! let server = Arc::new(CallServer::new(own, registry, community));
//! let api = LocalApi::open(data_dir, server).await?; // for apps; peers come through the listener
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! - A handler runs only for a caller of at least its level, with parameters that its descriptor
//!   allows, within every limit. A node that is not a member can only call `community.join`.
//! - When a caller cancels or is lost, its handler is dropped, and everything that waits for it is
//!   freed at once.
//! - A peer's use of memory and time is bounded per call and per connection.

mod budget;
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
#[cfg(test)]
pub(crate) mod tests;
mod wire;

pub(crate) const MAX_CAPABILITIES: usize = 64;

pub use budget::{BudgetKey, Budgets, Rate};
pub use client::{CallStream, Client, Event};
pub use descriptor::{CallLimits, CapabilityDescriptor, EXPERIMENTAL, Stability};
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
pub use server::{Admitted, Authority, CallServer, OneLevel, Origin, Research};
pub use session::{CallingSession, ClientEvent, NotTaken, ServerEvent, ServingSession};
pub use shard_serve::{Served, ShardGrant, register_shards};
pub use wire::Wire;

pub use hearthnet_transport::{Code, MAX_NAME};
/// Cancellation of a call, shared by its caller and the threads that answer.
pub use tokio_util::sync::CancellationToken as Cancel;

pub use crate::identity::{CHAT, SHARD_SERVE};
