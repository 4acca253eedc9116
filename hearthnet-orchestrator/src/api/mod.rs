//! Interfaces over the [`Service`](crate::Service).
//!
//! | interface | where |
//! |---|---|
//! | OpenAI's, over HTTP | [`http`] |
//! | chat as a capability of the bus | [`bus`] |

pub mod bus;
pub mod http;
