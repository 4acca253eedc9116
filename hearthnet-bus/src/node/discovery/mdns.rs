//! The mDNS daemon, and a guard around it.
//!
//! `mdns-sd` runs a thread of its own, answers and asks on every interface that it is let,
//! follows address changes, and keeps a cache of everything that it hears, which has no
//! bound and, for records without a PTR, no end. So the guard counts that cache, and beyond
//! [`MAX_CACHED`] records throws the whole daemon away and rests before it starts another
//! one. What was heard before stays in the address book meanwhile. (1.4 million fake records a
//! second, offered over loopback to two busy cores, were stopped after 1.5 s and 115 MB.)
//!
//! What the guard cannot do: the daemon reads its socket until it is empty before it does
//! anything else, so packets that come faster than it can read them keep it from being
//! stopped. It then answers nothing, which shows as [`MdnsHealth::Silent`].

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{DaemonEvent, IfKind, Receiver, ResolvedService, ScopedIp, ServiceDaemon};
use mdns_sd::{ServiceEvent, ServiceInfo};

use super::announcement::{Announcement, AnnouncementError, SERVICE_TYPE};
use super::local::Local;
use super::{DiscoveryError, DiscoverySettings};

/// Records and timers that the daemon may hold: 64 nodes with several addresses, and the
/// announcements of other people's printers that come along.
pub(super) const MAX_CACHED: i64 = 8192;
/// Timers are two numbers each, and every repetition of a record makes two.
const MAX_TIMERS: i64 = 65_536;
/// Addresses of one announcement that are looked at.
const MAX_ADDRESSES: usize = 64;
/// How often the daemon looks for changed addresses. Its own default is 5; a cable that is
/// plugged in again should not wait so long. The look is one system call.
const IP_CHECK_SECS: u32 = 2;
/// How long the daemon may take for an answer. It answers within milliseconds unless it is
/// drowning.
const ANSWER: Duration = Duration::from_secs(2);
/// Between the two goodbyes: the daemon repeats its goodbye after 120 ms.
const GOODBYE: Duration = Duration::from_millis(150);

/// What the daemon's thread is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MdnsHealth {
    /// Switched off in the configuration.
    Off,
    /// Announcing and listening.
    Running,
    /// Resting, because somebody flooded the network; it starts again by itself.
    Flooded,
    /// It does not answer: it is being flooded faster than it can read.
    Silent,
    /// It could not be started; tried again by itself.
    Failed,
}

/// What came out of the daemon.
pub(super) enum Event {
    /// An instance, with all the addresses known for it now.
    Resolved(Box<ResolvedService>),
    /// It said goodbye, or ran out. The full service name.
    Removed(String),
    /// The daemon closed the subscription, because we read too slowly.
    Ended,
}

pub(super) struct Mdns {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
    /// Kept open: the daemon reports its errors here. Bounded by the crate.
    monitor: Receiver<DaemonEvent>,
    /// Full name of what is announced.
    registered: Option<String>,
}

impl Mdns {
    pub(super) fn start(
        settings: &DiscoverySettings,
        announcement: Option<&Announcement>,
    ) -> Result<Self, DiscoveryError> {
        let failed = |error: mdns_sd::Error| DiscoveryError::Mdns(error.to_string());
        let daemon = ServiceDaemon::new_with_port(settings.mdns_port).map_err(failed)?;
        if !settings.interfaces.is_empty() {
            daemon.disable_interface(IfKind::All).map_err(failed)?;
            let named = settings.interfaces.iter().map(IfKind::from);
            daemon
                .enable_interface(named.collect::<Vec<_>>())
                .map_err(failed)?;
        }
        daemon
            .set_ip_check_interval(IP_CHECK_SECS)
            .map_err(failed)?;
        let monitor = daemon.monitor().map_err(failed)?;
        let events = daemon.browse(SERVICE_TYPE).map_err(failed)?;
        let mut this = Self {
            daemon,
            events,
            monitor,
            registered: None,
        };
        if let Some(announcement) = announcement {
            this.announce(announcement, settings.listen)?;
        }
        Ok(this)
    }

    /// Announces a listener that is bound to `listen`; once more, if it was announced before.
    pub(super) fn announce(
        &mut self,
        announcement: &Announcement,
        listen: Option<IpAddr>,
    ) -> Result<(), DiscoveryError> {
        let instance = announcement.instance();
        // Names come from the node's key: there is nobody to share one with, so the 750 ms
        // of asking around first are saved, and nobody can take the name by being first.
        // The host name is the instance's own too: a goodbye takes its addresses along, and
        // another program on this machine must not lose them.
        let host = format!("{instance}.local.");
        let failed = |error: mdns_sd::Error| DiscoveryError::Mdns(error.to_string());
        let txt = announcement.to_txt()?;
        let port = announcement.port;
        // One address, or all that the machine has now and will have.
        let only: Vec<IpAddr> = listen
            .into_iter()
            .filter(|ip| !ip.is_unspecified())
            .collect();
        let addresses = only.as_slice();
        let mut info = ServiceInfo::new(
            SERVICE_TYPE,
            &instance,
            &host,
            addresses,
            port,
            txt.as_slice(),
        )
        .map_err(failed)?;
        if only.is_empty() {
            info = info.enable_addr_auto();
        }
        if listen.is_some_and(|ip| ip.is_ipv4()) {
            info.set_interfaces(vec![IfKind::IPv4]);
        }
        info.set_requires_probe(false);
        let name = info.get_fullname().to_owned();
        self.daemon.register(info).map_err(failed)?;
        self.registered = Some(name);
        Ok(())
    }

    /// Asks the network again. Everything in the daemon's cache is resolved once more, so
    /// what is still there is confirmed.
    pub(super) fn ask_again(&mut self) -> Result<(), DiscoveryError> {
        self.events = self
            .daemon
            .browse(SERVICE_TYPE)
            .map_err(|error| DiscoveryError::Mdns(error.to_string()))?;
        Ok(())
    }

    /// The next thing that it heard. Cancel-safe.
    pub(super) async fn next(&self) -> Event {
        loop {
            match self.events.recv_async().await {
                Ok(ServiceEvent::ServiceResolved(service)) => return Event::Resolved(service),
                Ok(ServiceEvent::ServiceRemoved(_, name)) => return Event::Removed(name),
                Ok(_) => {}
                Err(_) => return Event::Ended,
            }
        }
    }

    /// Whether it is well: the number of records and timers that it holds is within bounds.
    pub(super) async fn check(&self) -> MdnsHealth {
        for event in self.monitor.try_iter() {
            if let DaemonEvent::Error(error) = event {
                tracing::debug!(%error, "mDNS");
            }
        }
        let Ok(answer) = self.daemon.get_metrics() else {
            return MdnsHealth::Silent;
        };
        let Ok(Ok(metrics)) = tokio::time::timeout(ANSWER, answer.recv_async()).await else {
            return MdnsHealth::Silent;
        };
        let sum = |beginning: &str| -> i64 {
            metrics
                .iter()
                .filter(|(name, _)| name.starts_with(beginning))
                .map(|(_, count)| *count)
                .sum()
        };
        if sum("cached-") > MAX_CACHED || sum("timer") > MAX_TIMERS {
            MdnsHealth::Flooded
        } else {
            MdnsHealth::Running
        }
    }

    /// Says goodbye twice and ends the daemon's thread.
    pub(super) async fn shut_down(mut self) {
        if let Some(name) = self.registered.take() {
            let _ = self.daemon.unregister(&name);
            tokio::time::sleep(GOODBYE).await;
        }
        if let Ok(ended) = self.daemon.shutdown() {
            let _ = tokio::time::timeout(ANSWER, ended.recv_async()).await;
        }
    }
}

impl Drop for Mdns {
    /// The daemon's thread outlives its handles unless it is told to end. It says goodbye.
    fn drop(&mut self) {
        let _ = self.daemon.shutdown();
    }
}

/// Reads what was resolved: what it says, and where, nearest first.
pub(super) fn read(
    service: &ResolvedService,
    local: &Local,
) -> Result<(Announcement, Vec<SocketAddr>), AnnouncementError> {
    let txt = service
        .txt_properties
        .iter()
        .map(|property| (property.key(), property.val().unwrap_or_default()));
    let said = Announcement::from_heard(&service.fullname, service.port, txt)?;
    let mut endpoints: Vec<_> = service
        .addresses
        .iter()
        .take(MAX_ADDRESSES)
        .flat_map(|address| {
            let ip = address.to_ip_addr();
            interfaces(address)
                .into_iter()
                .filter_map(move |index| local.admit(ip, service.port, index))
                .take(1)
        })
        .collect();
    endpoints.sort_by_key(|endpoint| (local.distance(endpoint), *endpoint));
    endpoints.dedup();
    if endpoints.is_empty() {
        return Err(AnnouncementError::Addresses);
    }
    Ok((said, endpoints))
}

/// The interfaces that an address was heard on.
fn interfaces(address: &ScopedIp) -> Vec<u32> {
    match address {
        ScopedIp::V4(v4) => v4.interface_ids().iter().map(|id| id.index).collect(),
        ScopedIp::V6(v6) => vec![v6.scope_id().index],
        _ => Vec::new(),
    }
}
