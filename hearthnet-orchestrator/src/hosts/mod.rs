//! Where spans come from: a source of hosts, asked at the start and after a failure.
//!
//! | hosts | where |
//! |---|---|
//! | what is looked for ([`Search`]), how hosts are chosen ([`Choice`]) | `source.rs` |
//! | known by address ([`HostPool`]) | `pool.rs` |
//! | found in a community's log ([`CommunityHosts`]) | `community.rs` |
//! | one attempt at a session, and how often | `attempt.rs` |
//! | a session on its way | `opening.rs` |

mod attempt;
mod community;
mod opening;
mod pool;
mod source;

pub use self::community::{CommunityHosts, Expelled, InSync, KnownAddresses, Links};
pub use self::pool::{HostPool, PooledHosts, Reached};
pub use self::source::{
    Choice, GRACE, HostSource, ModelOnWire, PATIENCE, Patience, RoutedSpan, SHORT_PATIENCE, Search,
};
