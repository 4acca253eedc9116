//! Hosts: sessions with them, their selection, and what is known of them. Sources of hosts are
//! searched at the start of a sequence and after a failure.
//!
//! | concept | where |
//! |---|---|
//! | a session with a host | [`link`] |
//! | which hosts run which layers | [`router`] (pure) |
//! | failures and speed of hosts over all calls | [`health`] (pure) |
//! | plausibility of returned rows | `checks/` (pure) |
//! | receipts of hosts, what audits found | `receipts.rs`, `audits.rs` (pure) |
//! | search parameters ([`Search`]), host selection ([`Choice`]) | `source.rs` |
//! | hosts known by address ([`HostPool`]) | `pool.rs` |
//! | hosts found in a community's log ([`CommunityHosts`]) | `community.rs` |
//! | one attempt to open a session, limits of dialling | `attempt.rs` |
//! | a session that is being opened | `opening.rs` |
//! | order of equal hosts | `tie_breaker.rs` (pure) |

mod attempt;
pub(crate) mod audits;
pub(crate) mod checks;
mod community;
pub mod health;
pub mod link;
mod opening;
mod pool;
pub(crate) mod receipts;
pub mod router;
mod source;
mod tie_breaker;

pub use self::community::{CommunityHosts, Expelled, InSync, Links};
pub use self::pool::HostPool;
pub use self::source::{
    Choice, DISCOVERY_TIMEOUT, GRACE, HostSource, ModelOnWire, Patience, RoutedSpan,
    SHORT_DISCOVERY_TIMEOUT, Search,
};
pub use self::tie_breaker::TieBreaker;
