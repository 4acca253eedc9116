//! Addresses at which other nodes, and programs on this machine, reach this node.

use std::net::{SocketAddr, TcpListener};

use hearthnet_bus::calls::ENDPOINT_FILE;
use hearthnet_bus::discovery::Local;

use crate::home::Home;

/// Port that nodes listen on if it is free. No well-known service uses it, and a fixed port keeps
/// older invite codes valid.
pub(crate) const DEFAULT_PORT: u16 = 7600;

/// Addresses of a listener on `listen` for other nodes: that address, or every routable address of
/// this machine if it is unspecified.
pub(crate) fn reachable(listen: SocketAddr) -> Vec<SocketAddr> {
    if !listen.ip().is_unspecified() {
        return vec![listen];
    }
    let mut all = Local::read(&[]).endpoints(listen.port());
    // A listener on 0.0.0.0 is not reached over IPv6.
    all.retain(|a| a.is_ipv4() || listen.is_ipv6());
    all
}

/// Resolves `node.listen`. "auto" is port 7600 on every interface over both families, else over
/// IPv4 alone, else the same with any free port.
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

/// Addresses for local programs and browsers, as text. `url` is that of OpenAI's interface, at the
/// address of the page.
pub(crate) fn local_endpoints(home: &Home, url: Option<&str>) -> String {
    let url = url.map_or_else(String::new, |url| {
        let page = url.trim_end_matches("/v1");
        format!("\n  OpenAI    {url}\n  page      {page}")
    });
    format!(
        "  programs  {}{url}\n",
        home.dir.join(ENDPOINT_FILE).display()
    )
}
