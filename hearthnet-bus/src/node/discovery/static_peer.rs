//! Static peers from the configuration, for networks without multicast.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use super::local::Local;
use crate::{NodeId, NodeIdError};

/// Longest host name, in bytes (RFC 1035 section 2.3.4).
const MAX_HOST: usize = 253;

/// Address of a peer as written in the configuration: `HOST:PORT` or `HOST:PORT#NODE`.
///
/// ```
/// # use hearthnet_bus::discovery::StaticPeer;
/// for text in ["192.168.1.20:7071", "[fd00::20]:7071", "[fe80::20%eth0]:7071", "attic.local:7071"] {
///     let peer: StaticPeer = text.parse().unwrap();
///     assert_eq!(peer.to_string(), text);
///     assert_eq!(peer.node(), None);
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticPeer {
    host: Host,
    port: u16,
    node: Option<NodeId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    /// A link-local address and its interface, by name or number.
    Scoped(Ipv6Addr, String),
    Name(String),
}

/// Why a text is not a static peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaticPeerError {
    /// No `:PORT` at the end, or the port is not 1 to 65535.
    #[error(
        "a peer is written HOST:PORT, with a port from 1 to 65535; an IPv6 address goes into brackets, as in [fd00::1]:7071"
    )]
    Port,
    /// The host is neither an address nor a name.
    #[error("{0:?} is neither an IP address nor a host name")]
    Host(String),
    /// The text after `#` is not a node id.
    #[error("after the # the peer's node id is expected: {0}")]
    Node(#[from] NodeIdError),
}

impl StaticPeer {
    pub fn new(endpoint: SocketAddr, node: Option<NodeId>) -> Self {
        let host = match endpoint {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => {
                Host::Scoped(*v6.ip(), v6.scope_id().to_string())
            }
            other => Host::Ip(other.ip()),
        };
        Self {
            host,
            port: endpoint.port(),
            node,
        }
    }

    /// Expected node id; `None` accepts any member at this address.
    pub fn node(&self) -> Option<NodeId> {
        self.node
    }

    /// The address; none if this machine has no such interface now. `Err`: a name and port to look
    /// up.
    pub(super) fn address(&self, local: &Local) -> Result<Option<SocketAddr>, (&str, u16)> {
        let port = self.port;
        match &self.host {
            Host::Ip(ip) => Ok(Some(SocketAddr::new(*ip, port))),
            Host::Scoped(ip, scope) => {
                let scope = local.scope(scope);
                Ok(scope.map(|scope| SocketAddrV6::new(*ip, port, 0, scope).into()))
            }
            Host::Name(name) => Err((name, port)),
        }
    }
}

impl FromStr for StaticPeer {
    type Err = StaticPeerError;

    fn from_str(text: &str) -> Result<Self, StaticPeerError> {
        let (place, node) = match text.split_once('#') {
            Some((place, node)) => (place, Some(node.parse()?)),
            None => (text, None),
        };
        let (host, port) = place.rsplit_once(':').ok_or(StaticPeerError::Port)?;
        let port = match port.parse() {
            Ok(port) if port != 0 && !port_is_odd(place, port) => port,
            _ => return Err(StaticPeerError::Port),
        };
        let wrong = || StaticPeerError::Host(host.chars().take(MAX_HOST).collect());
        let host = match host.strip_prefix('[') {
            Some(inner) => {
                let inner = inner.strip_suffix(']').ok_or_else(wrong)?;
                match inner.split_once('%') {
                    Some((ip, scope)) if is_scope(scope) => {
                        Host::Scoped(ip.parse().map_err(|_| wrong())?, scope.to_owned())
                    }
                    Some(_) => return Err(wrong()),
                    None => Host::Ip(IpAddr::V6(inner.parse().map_err(|_| wrong())?)),
                }
            }
            None => match host.parse::<IpAddr>() {
                Ok(IpAddr::V4(ip)) => Host::Ip(ip.into()),
                // An IPv6 address without brackets: its last group would be read as the port.
                Ok(IpAddr::V6(_)) => return Err(StaticPeerError::Port),
                Err(_) if is_name(host) => Host::Name(host.to_owned()),
                Err(_) => return Err(wrong()),
            },
        };
        Ok(Self { host, port, node })
    }
}

impl fmt::Display for StaticPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port))?,
            Host::Scoped(ip, scope) => write!(f, "[{ip}%{scope}]:{}", self.port)?,
            Host::Name(name) => write!(f, "{name}:{}", self.port)?,
        }
        match self.node {
            Some(node) => write!(f, "#{node}"),
            None => Ok(()),
        }
    }
}

/// True unless the port is in canonical form: digits only, no leading zero.
fn port_is_odd(place: &str, port: u16) -> bool {
    !place.ends_with(&format!(":{port}"))
}

/// True for an interface's name or number, as Linux allows them.
fn is_scope(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'[' | b']' | b'%'))
}

/// True for letters, digits, `-`, `_` and dots, as resolvers accept them, with at least one letter:
/// a mistyped IPv4 address is not a name.
fn is_name(host: &str) -> bool {
    (1..=MAX_HOST).contains(&host.len())
        && host
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && host.bytes().any(|b| b.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::id;

    #[test]
    fn a_peer_with_a_node_id_reads_back() {
        let node = id(1);
        let text = format!("[fd00::7]:7071#{node}");
        let peer: StaticPeer = text.parse().unwrap();
        assert_eq!((peer.node(), peer.to_string()), (Some(node), text));
        let endpoint = "[fd00::7]:7071".parse().unwrap();
        assert_eq!(peer, StaticPeer::new(endpoint, Some(node)));
    }

    #[test]
    fn an_invalid_peer_is_refused_with_its_reason() {
        let reason = |text: &str| text.parse::<StaticPeer>().unwrap_err();
        let ports = "attic attic: attic:0 attic:65536 attic:+7 attic:007 fd00::1:7071";
        for text in ports.split(' ').chain([""]) {
            assert_eq!(reason(text), StaticPeerError::Port, "{text:?}");
        }
        let hosts = ":7071 [fd00::1:7071 [attic]:7071 300.1.2.3:7071 [fe80::1%]:7071 \
                     [fe80::1%a/b]:7071 a\u{e9}:7071";
        for text in hosts.split(' ').chain(["at tic:7071"]) {
            let why = reason(text);
            assert!(matches!(why, StaticPeerError::Host(_)), "{text:?}: {why:?}");
        }
        let node = reason("attic:7071#someone");
        assert!(matches!(node, StaticPeerError::Node(_)), "{node:?}");
    }

    proptest! {
        #[test]
        fn a_parsed_peer_round_trips(text in "\\PC{0,40}") {
            if let Ok(peer) = text.parse::<StaticPeer>() {
                prop_assert_eq!(peer.to_string().parse::<StaticPeer>().unwrap(), peer);
            }
        }
    }
}
