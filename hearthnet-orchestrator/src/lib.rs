//! Covers a model's layers with shards, drives the pipeline, samples, and checks
//! what comes back.
//!
//! | concept | where |
//! |---|---|
//! | which hosts run which layers | [`router`] (pure) |
//! | what is in flight where | [`pipeline`] (pure) |
//! | is what a host returned possible | [`checks`] (pure) |
//! | a session with a host | [`link`] |
//! | the layers here, the layers there | [`local`], [`sharded`], behind [`Backend`] |
//! | text in, tokens out | [`chat`] |
//! | codes, hints, blame | [`error`] |

pub mod backend;
pub mod cancel;
pub mod chat;
pub mod checks;
pub mod error;
pub mod link;
pub mod local;
pub mod pipeline;
pub mod router;
pub mod sharded;

pub use backend::Backend;
pub use cancel::Cancel;
pub use error::ChatError;
