//! Where others reach this node.

use std::net::{SocketAddr, TcpListener};

use hearthnet_bus::discovery::Local;

/// The port that nodes listen on if it is free: one that no well-known service has, so that
/// an invite code of yesterday still leads here.
pub(crate) const DEFAULT_PORT: u16 = 7600;

/// Where others may reach a listener on `listen`: that address, or every address of this
/// machine that means something elsewhere.
pub(crate) fn reachable(listen: SocketAddr) -> Vec<SocketAddr> {
    if !listen.ip().is_unspecified() {
        return vec![listen];
    }
    let mut all = Local::read(&[]).endpoints(listen.port());
    // A listener on 0.0.0.0 is not reached over IPv6.
    all.retain(|a| a.is_ipv4() || listen.is_ipv6());
    all
}

/// The address that `node.listen` means now: itself, or, for "auto", port 7600 of every
/// interface over both families, or of IPv4 alone, or the same with any free port.
pub(crate) fn listen_address(setting: &str) -> SocketAddr {
    if let Ok(address) = setting.parse() {
        return address;
    }
    let any = |port| {
        [
            SocketAddr::from(([0u16; 8], port)),
            SocketAddr::from(([0u8; 4], port)),
        ]
    };
    any(DEFAULT_PORT)
        .into_iter()
        .chain(any(0))
        .find(|address| TcpListener::bind(address).is_ok())
        .unwrap_or(SocketAddr::from(([0u8; 4], 0)))
}
