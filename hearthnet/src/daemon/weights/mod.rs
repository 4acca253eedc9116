//! Weights of adopted models: parts on this machine, fetched from neighbours and the hub, and served
//! to neighbours.
//!
//! | part | file |
//! |---|---|
//! | parts that neighbours may read | `store.rs` |
//! | a neighbour as a source of pieces | `neighbour.rs` |
//! | fetching pieces of one model | `fetcher.rs` |
//! | following what the community adopts and drops | `follow.rs` |

mod fetcher;
mod follow;
mod neighbour;
mod store;

pub(crate) use self::fetcher::Fetcher;
pub(super) use self::follow::Follower;
pub(super) use self::store::Parts;
