//! `hearthnet page`: address of the running node's page; its link and QR code for phones.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::handover::Handover;
use crate::answering::http::read_key;
use crate::cli::args::Global;
use crate::cli::qr::Qr;
use crate::cli::{Failure, block_on, failure, no_thread, note, print, print_bytes};
use crate::home::Lock;
use crate::node::Running;
use crate::node::addresses::reachable;

/// Time limit of `--wait`: loading a model may take as long.
const STARTING: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time in which a browser must ask for the page.
const BROWSER_STARTS: Duration = Duration::from_secs(60);
const BROWSER_POLL: Duration = Duration::from_millis(20);

pub(crate) fn run(open: bool, wait: bool, global: &Global) -> Result<(), Failure> {
    let (listener, running) = block_on(find(global, wait))?;
    let here = listener.on_this_machine();
    let key = running.key_file.as_deref().map(Path::new);
    let key = key.map(read_key).transpose();
    if open {
        let without = here.link(None);
        return match key {
            Ok(Some((_, key))) => open_with_key(&here.link(Some(key.as_str())), &without),
            // Without a key that can be read, the page asks for it.
            _ => open_browser(&without),
        };
    }
    let key = key?;
    let key = key.as_ref().map(|(_, key)| key.as_str());
    print(format!("{}\n", here.link(key)))?;
    match key {
        Some(key) if !listener.at.ip().is_loopback() => show_to_phones(listener, key),
        _ => Ok(()),
    }
}

/// Address of the page of the node that runs on this home, and its status.
async fn find(global: &Global, wait: bool) -> Result<(Listener, Running), Failure> {
    let dir = global.dir()?;
    let until = Instant::now() + if wait { STARTING } else { Duration::ZERO };
    loop {
        if Lock::is_held(&dir) {
            let running = Running::ask(&dir, &json!({})).await;
            let found = running.and_then(|running| Some((Listener::of(&running)?, running)));
            if let Some(found) = found {
                return Ok(found);
            }
        }
        if Instant::now() >= until {
            return Err(
                failure!(Host, "no node with a page runs here").hint("`hearthnet up` starts it")
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Listener of a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listener {
    /// True if the address speaks HTTPS.
    pub(super) has_tls: bool,
    pub(super) at: SocketAddr,
}

impl Listener {
    fn of(running: &Running) -> Option<Self> {
        let (scheme, at) = running.url.as_deref()?.split_once("://")?;
        Some(Self {
            has_tls: scheme == "https",
            at: at.strip_suffix("/v1")?.parse().ok()?,
        })
    }
}

/// Prints the link for phones in this network, on a terminal with its QR code.
pub(super) fn show_to_phones(listener: Listener, key: &str) -> Result<(), Failure> {
    // The first address is an IPv4 address if there is one.
    let at = reachable(listener.at)
        .into_iter()
        .find(|at| !at.ip().is_loopback());
    let Some(at) = at else {
        note("this machine has no address in a network, so no phone can reach the page");
        return Ok(());
    };
    let link = Listener { at, ..listener }.link(Some(key));
    note("for a phone in this network; anyone with this link can chat, invite and pause:");
    print(format!("{link}\n"))?;
    match Qr::of(&link) {
        // Its escape sequences would be removed from text.
        Some(qr) if io::stdout().is_terminal() => print_bytes(qr.terminal()),
        _ => Ok(()),
    }
}

impl Listener {
    /// The listener, at the address at which programs of this machine reach it.
    fn on_this_machine(self) -> Self {
        let ip = match self.at.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let at = SocketAddr::new(ip, self.at.port());
        Self { at, ..self }
    }

    /// Link to the page, with the key in its fragment, which browsers send nowhere.
    fn link(self, key: Option<&str>) -> String {
        let scheme = if self.has_tls { "https" } else { "http" };
        let mut link = format!("{scheme}://{}/", self.at);
        let Some(key) = key else {
            return link;
        };
        link.push_str("#key=");
        for byte in key.bytes() {
            match byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte) {
                true => link.push(byte.into()),
                false => {
                    let _ = write!(link, "%{byte:02X}");
                }
            }
        }
        link
    }
}

/// Whether there is a desktop on which a browser could open.
pub(super) fn can_open() -> bool {
    ["DISPLAY", "WAYLAND_DISPLAY"]
        .into_iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

fn open_browser(url: &str) -> Result<(), Failure> {
    let opener = Command::new("xdg-open")
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match opener {
        Ok(status) if status.success() => Ok(()),
        _ => Err(no_browser(url)),
    }
}

fn no_browser(url: &str) -> Failure {
    failure!(Host, "no browser could be opened").hint(format!("open {url} yourself"))
}

/// Opens `link`, without its key in a command line. `without` is the link without the key.
fn open_with_key(link: &str, without: &str) -> Result<(), Failure> {
    let handover = Handover::new()?;
    let (url, (failed, fails)) = (handover.url(), mpsc::channel());
    // The opener may run for as long as the browser.
    let open = move || {
        if open_browser(&url).is_err() {
            let _ = failed.send(());
        }
    };
    let opening = thread::Builder::new().name("browser".into()).spawn(open);
    opening.map_err(|error| no_thread(&error))?;
    let until = Instant::now() + BROWSER_STARTS;
    while Instant::now() < until {
        if handover.answer(link, without) {
            return Ok(());
        }
        if fails.try_recv().is_ok() {
            break;
        }
        thread::sleep(BROWSER_POLL);
    }
    Err(no_browser(without))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listener(url: &str) -> Option<Listener> {
        Listener::of(&Running {
            url: Some(url.to_owned()),
            ..Running::default()
        })
    }

    #[test]
    fn a_link_carries_any_key_in_its_fragment() {
        let plain = listener("http://192.168.1.5:7602/v1").unwrap();
        assert_eq!(plain.link(None), "http://192.168.1.5:7602/");
        assert_eq!(
            plain.link(Some("abc+/=_-.~#%\"<")),
            "http://192.168.1.5:7602/#key=abc+/=_-.~%23%25%22%3C"
        );
        let tls = listener("https://192.168.1.5:7602/v1").unwrap();
        assert_eq!(tls.link(Some("k")), "https://192.168.1.5:7602/#key=k");
    }

    #[test]
    fn a_listener_on_all_interfaces_is_at_loopback_for_this_machine() {
        for (listen, here) in [
            ("0.0.0.0:7602", "127.0.0.1:7602"),
            ("[::]:7602", "[::1]:7602"),
            ("192.168.1.5:7602", "192.168.1.5:7602"),
        ] {
            let listener = listener(&format!("http://{listen}/v1")).unwrap();
            assert_eq!(listener.on_this_machine().at.to_string(), here);
        }
    }

    #[test]
    fn the_listener_is_read_from_the_status() {
        let read = listener("http://[::1]:7602/v1").unwrap();
        assert_eq!(read.at.to_string(), "[::1]:7602");
        assert!(listener("nonsense").is_none());
        assert!(Listener::of(&Running::default()).is_none());
    }
}
