//! Sources of hosts, searched at the start of a sequence and after a failure.
//!
//! | hosts | where |
//! |---|---|
//! | search parameters ([`Search`]), host selection ([`Choice`]) | `source.rs` |
//! | hosts known by address ([`HostPool`]) | `pool.rs` |
//! | hosts found in a community's log ([`CommunityHosts`]) | `community.rs` |
//! | one attempt to open a session, limits of dialling | `attempt.rs` |
//! | a session that is being opened | `opening.rs` |

mod attempt;
mod community;
mod opening;
mod pool;
mod source;

pub use self::community::{CommunityHosts, Expelled, InSync, KnownAddresses, Links};
pub use self::pool::{HostPool, PooledHosts, Reached};
pub use self::source::{
    Choice, DISCOVERY_TIMEOUT, GRACE, HostSource, ModelOnWire, Patience, RoutedSpan,
    SHORT_DISCOVERY_TIMEOUT, Search,
};
