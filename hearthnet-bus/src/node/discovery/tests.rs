//! Tests of discovery over real multicast on the loopback interface, on a separate port, so that no
//! packet leaves this machine and no other mDNS program takes part.
//!
//! `tests/discovery_lab.rs` tests discovery between machines, in network namespaces.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::sync::watch;

use super::*;
use crate::NodeKey;
use crate::testing::id as node;

/// Time limit of each wait. An announcement takes a second, a goodbye another.
const TIMEOUT: Duration = Duration::from_secs(30);

fn tag(n: u8) -> CommunityTag {
    CommunityTag::of(&[n; 32])
}

/// A UDP port that is free now, shared by all daemons of the test.
fn mdns_port() -> u16 {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.local_addr().unwrap().port()
}

fn settings(own: u8, mdns_port: u16) -> DiscoverySettings {
    DiscoverySettings {
        own: Some(node(own)),
        community: Some(tag(1)),
        mdns_port,
        interfaces: vec!["lo".into()],
        ..DiscoverySettings::default()
    }
}

fn announcement(n: u8, port: u16) -> Announcement {
    Announcement {
        node: node(n),
        community: tag(1),
        port,
        caps: vec!["chat@1.0".into()],
    }
}

/// Discovery of node 1, which announces nothing.
fn listen(port: u16) -> (Discovery, watch::Receiver<u64>) {
    Discovery::start(settings(1, port), None).unwrap()
}

/// Discovery of node `n`, which announces itself.
fn announce(n: u8, port: u16) -> Discovery {
    let said = announcement(n, 7000 + u16::from(n));
    Discovery::start(settings(n, port), Some(said)).unwrap().0
}

/// Waits until `is` holds for the results.
async fn until(
    discovery: &Discovery,
    changes: &mut watch::Receiver<u64>,
    is: impl Fn(&[Hint]) -> bool,
) {
    let found = tokio::time::timeout(TIMEOUT, async {
        while !is(&discovery.found()) {
            changes.changed().await.unwrap();
        }
    });
    if found.await.is_err() {
        panic!("found {:?}, {:?}", discovery.found(), discovery.counts());
    }
}

fn lists(found: &[Hint], n: u8) -> bool {
    found.iter().any(|hint| hint.node == Some(node(n)))
}

/// Polls a condition that sends no change notification.
async fn poll(mut is: impl FnMut() -> bool, what: impl Fn() -> String) {
    let held = tokio::time::timeout(TIMEOUT, async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(held.await.is_ok(), "{}", what());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_find_each_other_and_a_goodbye_parts_them() {
    let port = mdns_port();
    let (a, mut a_changes) =
        Discovery::start(settings(1, port), Some(announcement(1, 7001))).unwrap();
    let (b, mut b_changes) =
        Discovery::start(settings(2, port), Some(announcement(2, 7002))).unwrap();
    until(&a, &mut a_changes, |found| lists(found, 2)).await;
    until(&b, &mut b_changes, |found| lists(found, 1)).await;
    let [hint] = a.found().try_into().unwrap();
    assert_eq!(hint.community, Some(tag(1)));
    assert_eq!(hint.caps, ["chat@1.0"]);
    assert_eq!(hint.source, Source::Mdns);
    let there = "127.0.0.1:7002".parse().unwrap();
    assert!(hint.endpoints.contains(&there), "{hint:?}");

    b.shutdown().await;
    until(&a, &mut a_changes, |found| found.is_empty()).await;
    assert_eq!(b.health(), MdnsHealth::Off);
    assert!(lists(&b.found(), 1), "what was found stays readable");
    a.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_without_an_announcement_sees_what_others_change() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    let announce = |said| Discovery::start(settings(2, port), Some(said)).map(|(b, _)| b);
    let b = announce(announcement(2, 7002)).unwrap();
    until(&a, &mut changes, |found| lists(found, 2)).await;
    b.shutdown().await;

    let more = Announcement {
        caps: vec!["chat@1.0".into(), "shard.serve@1.0".into()],
        ..announcement(2, 7002)
    };
    let b = announce(more.clone()).unwrap();
    until(&a, &mut changes, |found| {
        found.iter().any(|hint| hint.caps == more.caps)
    })
    .await;
    b.shutdown().await;

    let b = announce(Announcement { port: 7003, ..more }).unwrap();
    until(&a, &mut changes, |found| {
        found.iter().any(|hint| {
            !hint.endpoints.is_empty() && hint.endpoints.iter().all(|at| at.port() == 7003)
        })
    })
    .await;

    b.shutdown().await;
    until(&a, &mut changes, |found| found.is_empty()).await;
    let unsound = announce(Announcement {
        port: 0,
        ..announcement(2, 1)
    });
    assert!(matches!(unsound, Err(DiscoveryError::Announcement(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_community_is_counted_and_not_listed() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    let other = Announcement {
        community: tag(9),
        ..announcement(3, 7003)
    };
    let (b, _) = Discovery::start(settings(3, port), Some(other)).unwrap();
    let not_heard = || format!("not heard: {:?}", a.counts());
    poll(|| a.counts().foreign > 0, not_heard).await;
    let c = announce(2, port);
    until(&a, &mut changes, |found| lists(found, 2)).await;
    assert!(!lists(&a.found(), 3));
    drop((b, c));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handle_that_is_dropped_says_goodbye_too() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    let b = announce(2, port);
    until(&a, &mut changes, |found| lists(found, 2)).await;
    drop(b);
    until(&a, &mut changes, |found| found.is_empty()).await;
}

#[tokio::test]
async fn static_peers_are_listed_without_mdns() {
    let peers = ["127.0.0.1:7071", "[::1]:7072", "localhost:7073"];
    let mut static_peers: Vec<StaticPeer> = peers.iter().map(|p| p.parse().unwrap()).collect();
    static_peers.push(format!("10.0.0.9:7074#{}", node(4)).parse().unwrap());
    let settings = DiscoverySettings {
        mdns: false,
        static_peers,
        ..settings(1, 1)
    };
    let (discovery, mut changes) = Discovery::start(settings, None).unwrap();
    until(&discovery, &mut changes, |found| {
        let has = |text: &str| {
            found
                .iter()
                .any(|hint| hint.endpoints.contains(&text.parse().unwrap()))
        };
        has("127.0.0.1:7071")
            && has("[::1]:7072")
            && lists(found, 4)
            && found.iter().any(|hint| hint.endpoints[0].port() == 7073)
    })
    .await;
    assert_eq!(discovery.health(), MdnsHealth::Off);
    let named: SocketAddr = "10.0.0.9:7074".parse().unwrap();
    assert_eq!(discovery.endpoints(&node(4)), [named]);
    let first = "127.0.0.1:7071".parse().unwrap();
    discovery.proved(node(5), first);
    assert_eq!(discovery.endpoints(&node(5)), [first]);
}

/// A device on the same network that sends forged announcements.
struct Stranger {
    socket: UdpSocket,
    group: SocketAddr,
    /// Time to live of its records, in seconds.
    ttl: u32,
}

impl Stranger {
    fn new(port: u16) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        Self {
            socket,
            group: (Ipv4Addr::new(224, 0, 0, 251), port).into(),
            ttl: 4500,
        }
    }

    /// Sends an announcement: PTR, SRV, TXT and A in one response.
    fn announce(&self, instance: &str, ip: Ipv4Addr, port: u16, txt: &[Vec<u8>]) {
        let name = format!("{instance}.{SERVICE_TYPE}");
        let host = format!("{instance}.local.");
        let mut packet = vec![0, 0, 0x84, 0, 0, 0, 0, 4, 0, 0, 0, 0];
        record(&mut packet, self.ttl, SERVICE_TYPE, 12, &labels(&name));
        let mut srv = vec![0, 0, 0, 0];
        srv.extend(port.to_be_bytes());
        srv.extend(labels(&host));
        record(&mut packet, self.ttl, &name, 33, &srv);
        let txt: Vec<u8> = txt
            .iter()
            .flat_map(|one| [&[one.len() as u8], one.as_slice()].concat())
            .collect();
        record(&mut packet, self.ttl, &name, 16, &txt);
        record(&mut packet, self.ttl, &host, 1, &ip.octets());
        self.send(&packet);
    }

    fn send(&self, packet: &[u8]) {
        // A full socket does not matter here.
        let _ = self.socket.send_to(packet, self.group);
    }
}

fn labels(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in name.trim_end_matches('.').split('.') {
        out.push(label.len() as u8);
        out.extend(label.as_bytes());
    }
    out.push(0);
    out
}

fn record(packet: &mut Vec<u8>, ttl: u32, name: &str, kind: u16, data: &[u8]) {
    packet.extend(labels(name));
    packet.extend(kind.to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(ttl.to_be_bytes());
    packet.extend((data.len() as u16).to_be_bytes());
    packet.extend(data);
}

fn txt_of(announcement: &Announcement) -> Vec<Vec<u8>> {
    let txt = announcement.to_txt().unwrap().into_iter();
    txt.map(|(key, value)| format!("{key}={value}").into_bytes())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_announcements_are_refused_each_for_its_fault() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    let stranger = Stranger::new(port);
    let good = announcement(2, 7002);
    let here = Ipv4Addr::LOCALHOST;
    let with = |key: &str, value: &[u8]| -> Vec<Vec<u8>> {
        let prefix = format!("{key}=").into_bytes();
        let mut txt = txt_of(&good);
        let mut all = txt.iter_mut();
        let changed = all.find(|one| one.starts_with(&prefix)).unwrap();
        *changed = [prefix.as_slice(), value].concat();
        txt
    };
    let name = |n: u8| Instance::of(&node(n), 7000).to_string();
    let wanted = [
        AnnouncementError::Version,
        AnnouncementError::Node,
        AnnouncementError::Community,
        AnnouncementError::Caps,
        AnnouncementError::Name,
        AnnouncementError::Port,
        AnnouncementError::Properties,
        AnnouncementError::Addresses,
    ];
    let missing = || -> Vec<_> {
        let refused = a.counts().refused;
        let missing = wanted.iter().filter(|fault| !refused.contains_key(fault));
        missing.copied().collect()
    };
    // Multicast packets may get lost: repeat until all are received.
    let mut round = 0;
    poll(
        || {
            if round % 25 == 0 {
                stranger.announce("version", here, 1, &with("v", b"9"));
                stranger.announce("node", here, 1, &with("node", b"\xff\xfe\x1b[2J"));
                stranger.announce(&good.instance(), here, 7002, &with("community", b"none"));
                let other = announcement(3, 7003);
                let mut txt = txt_of(&other);
                *txt.last_mut().unwrap() = b"caps=a,,B".to_vec();
                stranger.announce(&other.instance(), here, 7003, &txt);
                stranger.announce("Living \u{202e}Room", here, 7002, &txt_of(&good));
                let fourth = with("node", node(4).to_string().as_bytes());
                stranger.announce(&name(4), here, 0, &fourth);
                let many: Vec<_> = (0..60).map(|n| format!("x{n}=y").into_bytes()).collect();
                stranger.announce("many", here, 1, &many);
                let (world, far) = (announcement(5, 7005), Ipv4Addr::new(8, 8, 8, 8));
                stranger.announce(&world.instance(), far, 7005, &txt_of(&world));
                // A packet that is not DNS, and truncated DNS.
                stranger.send(&[0xFF; 900]);
                stranger.send(&[
                    0, 0, 0x84, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0xC0, 0x0C,
                ]);
            }
            round += 1;
            missing().is_empty()
        },
        || format!("not counted: {:?}", missing()),
    )
    .await;
    assert_eq!(a.found(), []);
    let b = announce(6, port);
    until(&a, &mut changes, |found| lists(found, 6)).await;
    drop(b);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_goodbye_expires() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    let mut stranger = Stranger::new(port);
    stranger.ttl = 3;
    let (brief, here) = (announcement(2, 7002), Ipv4Addr::LOCALHOST);
    poll(
        || {
            stranger.announce(&brief.instance(), here, 7002, &txt_of(&brief));
            lists(&a.found(), 2)
        },
        || format!("not heard: {:?}", a.counts()),
    )
    .await;
    until(&a, &mut changes, |found| found.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_stays_bounded_leaves_members_alone_and_passes() {
    let port = mdns_port();
    let (a, mut changes) = listen(port);
    a.set_members([node(2), node(3)]);
    let b = announce(2, port);
    until(&a, &mut changes, |found| lists(found, 2)).await;
    let before = a.endpoints(&node(2));

    let stranger = Stranger::new(port);
    let mut sent = 0_u32;
    // At least 6,000 announcements of different nodes, until the guard acts.
    poll(
        || {
            for _ in 0..500 {
                let mut secret = [0xEE; 32];
                secret[..4].copy_from_slice(&sent.to_be_bytes());
                let fake = Announcement {
                    node: NodeKey::from_secret(&secret).id(),
                    ..announcement(2, 7002)
                };
                stranger.announce(&fake.instance(), Ipv4Addr::LOCALHOST, 7002, &txt_of(&fake));
                sent += 1;
                assert!(a.found().len() <= MAX_STRANGERS + 1);
            }
            // `poll` waits between rounds: packets that the socket drops test nothing.
            sent >= 6000 && a.counts().floods > 0
        },
        || format!("the guard did not step in: {:?}", a.counts()),
    )
    .await;
    // The member is still known.
    assert!(before.iter().all(|at| a.endpoints(&node(2)).contains(at)));

    // After the flood, a new member is found.
    let c = announce(3, port);
    until(&a, &mut changes, |found| lists(found, 3)).await;
    assert_eq!(a.health(), MdnsHealth::Running);
    drop((b, c));
}
