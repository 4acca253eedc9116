//! Addresses of this machine, distances to other addresses, and which addresses may be dialled.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use crate::community::log::Community;

/// An address of an interface of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LocalAddress {
    /// Name, such as `eth0`.
    pub interface: String,
    /// Interface number, the scope of IPv6 link-local addresses.
    pub index: u32,
    pub ip: IpAddr,
    /// Length of the network prefix in bits, 0 to 128.
    pub prefix: u8,
}

/// Addresses of this machine at one time. Empty by default: then no address counts as near.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local(Vec<LocalAddress>);

/// Distance of an address, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    Machine,
    /// A network in which this machine has an address.
    Subnet,
    /// An IPv6 link-local address with its interface: as near, but valid only on this link.
    Link,
    /// Another private network (RFC 1918, RFC 4193, RFC 3927).
    Private,
    /// Any other address.
    World,
}

impl Local {
    pub fn new(addresses: Vec<LocalAddress>) -> Self {
        Self(addresses)
    }

    /// Reads the addresses from the system; empty on failure. Interfaces that are down are left
    /// out. `only` names the interfaces to use; empty: all.
    pub fn read(only: &[String]) -> Self {
        let found = if_addrs::get_if_addrs().unwrap_or_default();
        let mut addresses: Vec<_> = found
            .into_iter()
            .filter(|one| one.is_oper_up() && (only.is_empty() || only.contains(&one.name)))
            .map(|one| LocalAddress {
                ip: one.ip(),
                index: one.index.unwrap_or(0),
                prefix: match &one.addr {
                    if_addrs::IfAddr::V4(v4) => v4.prefixlen,
                    if_addrs::IfAddr::V6(v6) => v6.prefixlen,
                },
                interface: one.name,
            })
            .collect();
        addresses.sort_by_key(|one| (one.index, one.ip));
        Self(addresses)
    }

    /// Endpoints of a listener on `port` for other machines, as in invite codes and `node.seen`
    /// events: all addresses except loopback and IPv6 link-local ones, or loopback if there is no
    /// other.
    pub fn endpoints(&self, port: u16) -> Vec<SocketAddr> {
        let outward = |ip: IpAddr| !ip.is_loopback() && !needs_scope(ip);
        let mut ips: Vec<_> = self.0.iter().map(|one| one.ip).collect();
        if ips.iter().any(|ip| outward(*ip)) {
            ips.retain(|ip| outward(*ip));
        }
        ips.retain(|ip| !needs_scope(*ip));
        ips.sort_by_key(|ip| (ip.is_ipv6(), *ip));
        ips.dedup();
        ips.into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .collect()
    }

    /// Number of an interface given by name or number.
    pub(super) fn scope(&self, scope: &str) -> Option<u32> {
        let by_name = || {
            self.0
                .iter()
                .find(|one| one.interface == scope)
                .map(|one| one.index)
        };
        scope.parse().ok().or_else(by_name)
    }

    /// Distance of an endpoint from this machine.
    pub fn distance(&self, endpoint: &SocketAddr) -> Distance {
        let ip = endpoint.ip();
        if ip.is_loopback() || self.0.iter().any(|one| one.ip == ip && !needs_scope(ip)) {
            Distance::Machine
        } else if needs_scope(ip) {
            Distance::Link
        } else if self.0.iter().any(|one| same_network(one, ip)) {
            Distance::Subnet
        } else if is_private(ip) {
            Distance::Private
        } else {
            Distance::World
        }
    }

    /// The endpoint of an address announced over mDNS on interface `index`, or `None` if it cannot
    /// belong to this network.
    ///
    /// Any device on the LAN can announce any address, and every node dials it. An announcement
    /// must not be able to direct all nodes of a network to a server on the internet. So loopback
    /// is accepted only from the loopback interface, IPv6 link-local addresses get the receiving
    /// interface, and public addresses are accepted only within a network of this machine.
    pub fn admit(&self, ip: IpAddr, port: u16, index: u32) -> Option<SocketAddr> {
        let heard_on_loopback = || {
            self.0
                .iter()
                .any(|one| one.index == index && one.ip.is_loopback())
        };
        if port == 0 || !is_of_a_host(ip) {
            return None;
        }
        match ip {
            ip if ip.is_loopback() => heard_on_loopback().then(|| SocketAddr::new(ip, port)),
            IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                (index != 0).then(|| SocketAddrV6::new(v6, port, 0, index).into())
            }
            ip => {
                let endpoint = SocketAddr::new(ip, port);
                (self.distance(&endpoint) < Distance::World).then_some(endpoint)
            }
        }
    }
}

/// First port above those of system services (RFC 6335). Claimed lower ports are not dialled.
const FIRST_PORT: u16 = 1024;

/// Filter for the endpoints that members sign for themselves. The signature only proves who wants
/// to be dialled: a member must not be able to make others connect to services on or near their own
/// machines.
#[derive(Debug, Clone)]
pub struct Claims {
    local: Local,
    /// Every known endpoint is on this machine, so the whole community is.
    on_one_machine: bool,
}

impl Claims {
    /// Filter for a node with the endpoints `own`, by the current state of the community.
    pub fn new(state: &Community, own: &[String], local: Local, now_ms: u64) -> Self {
        let heard = state.nodes(now_ms).flat_map(|seen| &seen.endpoints);
        let mut heard = heard.chain(own).filter_map(|text| text.parse().ok());
        Self {
            on_one_machine: heard.all(|at| local.distance(&at) == Distance::Machine),
            local,
        }
    }

    /// The endpoint if it may be dialled. Refused are:
    /// - unspecified, multicast, broadcast and IPv4-mapped addresses, and ports below 1024;
    /// - addresses of this machine, unless the whole community is on it;
    /// - IPv4 link-local addresses outside this machine's networks, and all IPv6 link-local ones,
    ///   which lack an interface;
    /// - public addresses outside this machine's networks, as over mDNS.
    pub fn admit(&self, text: &str) -> Option<SocketAddr> {
        let at: SocketAddr = text.parse().ok()?;
        let ip = at.ip();
        let far = self.local.distance(&at);
        let may = match ip {
            _ if at.port() < FIRST_PORT || !is_of_a_host(ip) || needs_scope(ip) => false,
            _ if far == Distance::Machine => self.on_one_machine,
            IpAddr::V4(v4) if v4.is_link_local() => far <= Distance::Subnet,
            _ => far < Distance::World,
        };
        may.then_some(at)
    }
}

/// True if it can be the address of a single host.
fn is_of_a_host(ip: IpAddr) -> bool {
    let odd = match ip {
        IpAddr::V4(v4) => v4.is_broadcast(),
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some(),
    };
    !(odd || ip.is_unspecified() || ip.is_multicast())
}

fn same_network(local: &LocalAddress, ip: IpAddr) -> bool {
    match (local.ip, ip) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let shift = 32 - u32::from(local.prefix.min(32));
            shift < 32 && a.to_bits() >> shift == b.to_bits() >> shift
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let shift = 128 - u32::from(local.prefix.min(128));
            shift < 128 && a.to_bits() >> shift == b.to_bits() >> shift
        }
        _ => false,
    }
}

/// True for addresses that are not routed on the internet. Overlay networks use 100.64.0.0/10 (RFC
/// 6598).
fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            v4.is_private() || v4.is_link_local() || (a == 100 && (64..128).contains(&b))
        }
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

/// True for addresses that need an interface. 169.254.0.0/16 does not, and may be the only network
/// without a router.
fn needs_scope(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn home() -> Local {
        let address = |interface: &str, index, ip: &str, prefix| LocalAddress {
            interface: interface.into(),
            index,
            ip: ip.parse().unwrap(),
            prefix,
        };
        Local::new(vec![
            address("lo", 1, "127.0.0.1", 8),
            address("lo", 1, "::1", 128),
            address("eth0", 2, "192.168.1.10", 24),
            address("eth0", 2, "fe80::10", 64),
            address("eth0", 2, "2001:db8:1::10", 64),
        ])
    }

    fn admit(ip: &str, index: u32) -> Option<String> {
        home()
            .admit(ip.parse().unwrap(), 7071, index)
            .map(|endpoint| endpoint.to_string())
    }

    #[test]
    fn an_announced_address_must_be_one_of_this_network() {
        assert_eq!(admit("192.168.1.20", 2).unwrap(), "192.168.1.20:7071");
        assert_eq!(admit("10.3.0.1", 2).unwrap(), "10.3.0.1:7071");
        assert_eq!(admit("2001:db8:1::20", 2).unwrap(), "[2001:db8:1::20]:7071");
        assert_eq!(admit("fd12::1", 2).unwrap(), "[fd12::1]:7071");
        for ip in [
            "8.8.8.8",
            "2001:db8:2::1",
            "0.0.0.0",
            "::",
            "224.0.0.251",
            "255.255.255.255",
            "ff02::fb",
            "::ffff:192.168.1.20",
        ] {
            assert_eq!(admit(ip, 2), None, "{ip}");
        }
    }

    #[test]
    fn loopback_counts_only_when_heard_on_loopback() {
        assert_eq!(admit("127.0.0.1", 1).unwrap(), "127.0.0.1:7071");
        assert_eq!(admit("127.0.0.1", 2), None);
        assert_eq!(admit("::1", 2), None);
        assert_eq!(admit("::1", 1).unwrap(), "[::1]:7071");
    }

    #[test]
    fn a_link_local_address_keeps_the_interface_it_was_heard_on() {
        assert_eq!(admit("fe80::20", 2).unwrap(), "[fe80::20%2]:7071");
        assert_eq!(admit("fe80::20", 0), None);
    }

    fn claims(on_one_machine: bool, text: &str) -> bool {
        let local = home();
        Claims {
            local,
            on_one_machine,
        }
        .admit(text)
        .is_some()
    }

    #[test]
    fn claimed_endpoints_never_point_at_local_services() {
        for good in [
            "192.168.1.20:7600",
            "10.3.0.1:1024",
            "100.64.0.9:7600",
            "[fd12::1]:7600",
            "[2001:db8:1::9]:7600",
        ] {
            assert!(claims(false, good), "{good}");
        }
        for bad in [
            "127.0.0.1:6379",
            // Its own address in the LAN is its own machine as well.
            "192.168.1.10:6379",
            "[2001:db8:1::10]:6379",
            // Public addresses outside this machine's networks.
            "8.8.8.8:7600",
            "[2001:db8:9::1]:7600",
            "[::1]:5432",
            "127.1.2.3:7600",
            "0.0.0.0:7600",
            "[::]:7600",
            "[::ffff:127.0.0.1]:7600",
            "255.255.255.255:7600",
            "224.0.0.1:7600",
            "[ff02::1]:7600",
            "192.168.1.1:80",
            "192.168.1.1:22",
            "192.168.1.1:0",
            "169.254.169.254:7600",
            "[fe80::1%2]:7600",
            "[fe80::1]:7600",
            "attic.local:7600",
        ] {
            assert!(!claims(false, bad), "{bad}");
        }
        assert!(claims(true, "127.0.0.1:7600"));
        assert!(claims(true, "192.168.1.10:7600"));
        assert!(!claims(true, "127.0.0.1:22"));
    }

    #[test]
    fn distances_follow_from_the_local_networks() {
        let far = |endpoint: &str| home().distance(&endpoint.parse().unwrap());
        assert_eq!(far("127.0.0.1:1"), Distance::Machine);
        assert_eq!(far("192.168.1.10:1"), Distance::Machine);
        assert_eq!(far("192.168.1.11:1"), Distance::Subnet);
        assert_eq!(far("[2001:db8:1::99]:1"), Distance::Subnet);
        assert_eq!(far("[fe80::10%2]:1"), Distance::Link);
        assert_eq!(far("192.168.2.1:1"), Distance::Private);
        assert_eq!(far("1.1.1.1:1"), Distance::World);
    }

    #[test]
    fn advertised_addresses_are_usable_by_others() {
        let texts = |local: &Local| -> Vec<_> {
            local
                .endpoints(7071)
                .iter()
                .map(SocketAddr::to_string)
                .collect()
        };
        assert_eq!(
            texts(&home()),
            ["192.168.1.10:7071", "[2001:db8:1::10]:7071"]
        );
        let alone = Local::new(home().0[..2].to_vec());
        assert_eq!(texts(&alone), ["127.0.0.1:7071", "[::1]:7071"]);
    }

    #[test]
    fn this_machine_has_a_loopback_address() {
        let all = Local::read(&[]);
        assert!(all.0.iter().any(|one| one.ip.is_loopback()));
        assert!(Local::read(&["no such interface".into()]).0.is_empty());
    }

    proptest! {
        #[test]
        fn no_prefix_and_no_address_overflow(prefix: u8, a: u128, b: u128, v4: bool) {
            let ip = |bits: u128| if v4 { IpAddr::V4((bits as u32).into()) } else { IpAddr::V6(bits.into()) };
            let local = Local::new(vec![LocalAddress { interface: "x".into(), index: 3, ip: ip(a), prefix }]);
            let _ = local.distance(&SocketAddr::new(ip(b), 1));
            if let Some(endpoint) = local.admit(ip(b), 1, 3) {
                prop_assert_eq!(endpoint.ip(), ip(b));
            }
        }
    }
}
