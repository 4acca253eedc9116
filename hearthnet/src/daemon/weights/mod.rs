//! Weights of adopted models: parts on this machine, fetched from a drive, neighbours and the hub, and
//! served to neighbours.
//!
//! | part | file |
//! |---|---|
//! | open parts, their pieces in use; what neighbours may read | `store.rs` |
//! | room on the disk | `room.rs` |
//! | a neighbour as a source of pieces | `neighbour.rs` |
//! | fetching pieces of one model | `fetcher.rs` |
//! | following what the community adopts and drops; pauses after failures | `follow.rs`, `retry.rs` |
//! | number of models that share the memory | `shares.rs` |
//! | parts of dropped models; pauses of models that are dropped again and again | `dropped.rs` |
//! | the whole file of a daemon with `--model`, offered to neighbours | `offer.rs` |

mod dropped;
mod fetcher;
mod follow;
mod neighbour;
mod offer;
mod retry;
mod room;
mod shares;
mod store;

pub(super) use self::dropped::remove_dropped;
pub(crate) use self::fetcher::Fetcher;
pub(super) use self::follow::Follower;
pub(super) use self::offer::offer_file;
pub(super) use self::store::Parts;
