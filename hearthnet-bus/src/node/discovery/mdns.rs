//! The mDNS daemon, and a guard against floods.
//!
//! `mdns-sd` runs its own thread, sends and answers queries on every allowed interface, and follows
//! address changes. Its cache of received records has no bound and, for records without a PTR, no
//! expiry. So the guard counts the cache. Above [`MAX_CACHED`] records it drops the whole daemon
//! and pauses before it starts another. The address book keeps what was received before. (1.4
//! million fake records a second, offered over loopback to two busy cores, were stopped after 1.5 s
//! and 115 MB.)
//!
//! The guard has a limit: the daemon empties its socket before it does anything else, so packets
//! that arrive faster than it reads them keep it from being stopped. It then answers no request,
//! which shows as [`MdnsHealth::Silent`].

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{DaemonEvent, IfKind, Receiver, ResolvedService, ScopedIp, ServiceDaemon};
use mdns_sd::{ServiceEvent, ServiceInfo};

use super::announcement::{Announcement, AnnouncementError, SERVICE_TYPE};
use super::local::Local;
use super::settings::{DiscoveryError, DiscoverySettings};

/// Upper bound of cached records: enough for 64 nodes with several addresses, and for other
/// devices' announcements.
pub(super) const MAX_CACHED: i64 = 8192;
/// Upper bound of timers. A timer is two numbers, and each repetition of a record makes two timers.
const MAX_TIMERS: i64 = 65_536;
/// Upper bound of addresses read per announcement.
const MAX_ADDRESSES: usize = 64;
/// Interval at which the daemon looks for changed addresses, by one system call. Its default of 5 s
/// is too slow for a cable that is plugged in again.
const IP_CHECK_SECS: u32 = 2;
/// Time limit for an answer of the daemon. It takes milliseconds unless it is flooded.
const ANSWER: Duration = Duration::from_secs(2);
/// Wait between the two goodbyes: the daemon repeats its goodbye after 120 ms.
const GOODBYE: Duration = Duration::from_millis(150);

/// State of the mDNS daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MdnsHealth {
    Off,
    Running,
    /// Paused because the network was flooded; restarts by itself.
    Flooded,
    /// Does not answer: it is flooded faster than it can read.
    Silent,
    /// Could not be started; retried automatically.
    Failed,
}

/// Event of the daemon.
pub(super) enum Event {
    /// An instance, with all of its currently known addresses.
    Resolved(Box<ResolvedService>),
    /// The instance with this full service name said goodbye or expired.
    Removed(String),
    /// The daemon closed the subscription because it was read too slowly.
    Ended,
}

pub(super) struct Mdns {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
    /// Kept open, since the daemon reports its errors here. Bounded by the crate.
    monitor: Receiver<DaemonEvent>,
    /// Full service name of the announcement.
    registered: Option<String>,
}

impl Mdns {
    pub(super) fn start(
        settings: &DiscoverySettings,
        announcement: Option<&Announcement>,
    ) -> Result<Self, DiscoveryError> {
        let daemon = ServiceDaemon::new_with_port(settings.mdns_port)?;
        if !settings.interfaces.is_empty() {
            daemon.disable_interface(IfKind::All)?;
            let named = settings.interfaces.iter().map(IfKind::from);
            daemon.enable_interface(named.collect::<Vec<_>>())?;
        }
        daemon.set_ip_check_interval(IP_CHECK_SECS)?;
        let monitor = daemon.monitor()?;
        let events = daemon.browse(SERVICE_TYPE)?;
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

    /// Announces a listener bound to `listen`, also repeatedly.
    pub(super) fn announce(
        &mut self,
        announcement: &Announcement,
        listen: Option<IpAddr>,
    ) -> Result<(), DiscoveryError> {
        let instance = announcement.instance();
        // Names derive from the node's key, so no other node shares one. Probing can be left out:
        // it would take 750 ms, and would let another device take the name first. The host name is
        // the instance's own as well: a goodbye also removes its addresses, which other programs on
        // this machine must not lose.
        let host = format!("{instance}.local.");
        let txt = announcement.to_txt()?;
        let port = announcement.port;
        // Announces the address of the listener; if that is unspecified, all present and future
        // addresses of the machine.
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
        )?;
        if only.is_empty() {
            info = info.enable_addr_auto();
        }
        if listen.is_some_and(|ip| ip.is_ipv4()) {
            info.set_interfaces(vec![IfKind::IPv4]);
        }
        info.set_requires_probe(false);
        let name = info.get_fullname().to_owned();
        self.daemon.register(info)?;
        self.registered = Some(name);
        Ok(())
    }

    /// Sends a new query. The daemon resolves its whole cache again, which confirms current
    /// entries.
    pub(super) fn ask_again(&mut self) -> Result<(), DiscoveryError> {
        self.events = self.daemon.browse(SERVICE_TYPE)?;
        Ok(())
    }

    /// The next event. Cancel-safe.
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

    /// Checks that the daemon answers and that its records and timers are within bounds.
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

    /// Sends two goodbyes and ends the daemon's thread.
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
    /// Ends the daemon's thread, which would outlive its handles. The daemon says goodbye.
    fn drop(&mut self) {
        let _ = self.daemon.shutdown();
    }
}

/// Decodes a resolved service into the announcement and its endpoints, nearest first.
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

/// Interfaces on which an address was received.
fn interfaces(address: &ScopedIp) -> Vec<u32> {
    match address {
        ScopedIp::V4(v4) => v4.interface_ids().iter().map(|id| id.index).collect(),
        ScopedIp::V6(v6) => vec![v6.scope_id().index],
        _ => Vec::new(),
    }
}
