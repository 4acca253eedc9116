//! Interfaces over the [`Service`](crate::Service).
//!
//! | interface | where |
//! |---|---|
//! | OpenAI's, Anthropic's and Ollama's, over HTTP | [`http`] |
//! | chat as a capability of the bus | [`bus`] |
//! | fields of a request of either | `fields.rs` (pure) |
//! | grammar of an answer, in a request of either | `grammar.rs` (pure) |
//! | tools and reasoning, in a request of either | `turn.rs` (pure) |

pub mod bus;
mod fields;
mod grammar;
pub mod http;
mod turn;
