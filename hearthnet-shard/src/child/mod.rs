//! Engine of a host in a process of its own.
//!
//! ```text
//!  host's process                                      child process
//!  compute thread --> RemoteEngine == connection == serve_engine --> exact engine (or a card)
//! ```
//!
//! When the engine is dropped its connection closes, the child ends, and the system has its memory
//! back. When the child dies, or breaks the protocol, the engine is lost: the host ends its streams,
//! so that their callers choose other hosts, and starts another child when the next stream is opened.
//!
//! | concept | file |
//! |---|---|
//! | messages and their encoding | `message.rs` |
//! | the host's side: engine and source | `remote.rs` |
//! | the child's side | `serve.rs` |

mod message;
mod remote;
mod serve;
#[cfg(test)]
mod tests;

pub(crate) use message::Load;
pub use remote::Connect;
pub(crate) use remote::RemoteSource;
pub use serve::{load_on_processor, serve_engine};
