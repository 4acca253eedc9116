//! Settings of discovery, and causes of a failed start.

use std::net::IpAddr;

use super::announcement::{AnnouncementError, CommunityTag};
use super::static_peer::StaticPeer;
use crate::NodeId;

/// The UDP port of mDNS (RFC 6762).
pub const MDNS_PORT: u16 = 5353;
/// Upper bound of static peers in a configuration.
pub const MAX_STATIC_PEERS: usize = 64;

/// Settings of discovery.
#[derive(Debug, Clone)]
pub struct DiscoverySettings {
    /// This node, which is left out of the results.
    pub own: Option<NodeId>,
    /// Community whose announcements are accepted; `None`: all.
    pub community: Option<CommunityTag>,
    /// True to use mDNS.
    pub mdns: bool,
    /// Bound address of the announced listener; only addresses that reach it are announced. `None`,
    /// like `::`: every address of this machine; `0.0.0.0`: every IPv4 address.
    pub listen: Option<IpAddr>,
    /// UDP port of mDNS; other than [`MDNS_PORT`] only in tests.
    pub mdns_port: u16,
    /// Names of the interfaces to use; empty: all.
    pub interfaces: Vec<String>,
    /// Peers from the configuration; those beyond [`MAX_STATIC_PEERS`] are ignored.
    pub static_peers: Vec<StaticPeer>,
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self {
            own: None,
            community: None,
            mdns: true,
            listen: None,
            mdns_port: MDNS_PORT,
            interfaces: Vec::new(),
            static_peers: Vec::new(),
        }
    }
}

/// Cause of a failed start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// The announcement is not valid.
    #[error("cannot announce this node: {0}")]
    Announcement(#[from] AnnouncementError),
    /// The mDNS daemon could not be started, or refuses commands.
    #[error("mDNS does not work on this machine ({0}); list the peers in the configuration")]
    Mdns(String),
}

impl From<mdns_sd::Error> for DiscoveryError {
    fn from(error: mdns_sd::Error) -> Self {
        Self::Mdns(error.to_string())
    }
}
