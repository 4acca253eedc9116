//! The step loop of all running chats, and what they compute together.
//!
//! | concept | where |
//! |---|---|
//! | event loop of all running chats | `chat_loop.rs` |
//! | formation of batches | `batcher.rs` |
//! | logits of several chats in one matrix product | `logits_batcher.rs` |

pub(crate) mod batcher;
pub(crate) mod chat_loop;
pub(crate) mod logits_batcher;
