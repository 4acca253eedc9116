//! Request for vectors of texts. `hearthnet_engine::pooling` has their arithmetic.

use crate::exact::Exact;

/// Request for the vectors of some texts.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs)] // Built by its callers.
pub struct EmbedRequest {
    /// Token ids of each text, from [`tokens_of`](super::tokens_of).
    pub inputs: Vec<Vec<u32>>,
    /// As in [`ChatRequest`](super::ChatRequest).
    pub exact: Option<Exact>,
}
