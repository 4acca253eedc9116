//! This node at work, as the program sets it up.

use hearthnet_bus::NodeId;
use hearthnet_bus::discovery::{CommunityTag, DiscoverySettings, StaticPeer};

use crate::config::Config;
use crate::failure::{Failure, Kind};

/// How the configuration says to look for others of one community.
pub(crate) fn discovery_settings(
    config: &Config,
    own: NodeId,
    community: CommunityTag,
) -> Result<DiscoverySettings, Failure> {
    let peers = config.discovery.static_peers.iter();
    let static_peers = peers
        .map(|text| text.parse())
        .collect::<Result<Vec<StaticPeer>, _>>()
        .map_err(|e| {
            Failure::new(
                Kind::Config,
                format!("the setting discovery.static_peers: {e}"),
            )
            .hint("for example: static_peers = [\"192.168.1.20:7600\"]")
        })?;
    Ok(DiscoverySettings {
        own: Some(own),
        community: Some(community),
        mdns: config.discovery.mdns,
        static_peers,
        ..DiscoverySettings::default()
    })
}
