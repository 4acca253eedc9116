//! Machines on one network find each other by real multicast, and follow changes of cables,
//! addresses and programs.
//!
//! The machines are network namespaces on a bridge that the test creates and removes. Where the
//! machine forbids that, the reason is printed and the test is skipped.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hearthnet_bus::discovery::{
    Announcement, CommunityTag, Discovery, DiscoverySettings, Hint, MDNS_PORT, Source,
};
use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_testkit::lab::{Host, Lab};

/// Long enough for a loaded machine; reaching it is a failure, never a wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Port of the listener that every node announces.
const PORT: u16 = 7071;

fn node(n: usize) -> NodeId {
    NodeKey::from_secret(&[n as u8 + 1; 32]).id()
}

fn announcement(n: usize) -> Announcement {
    Announcement {
        node: node(n),
        community: CommunityTag::of(&[7; 32]),
        port: PORT,
        caps: vec!["experimental.distributed_llm.shard.serve@1.0".into()],
    }
}

/// Running discovery on a host of the lab, with a runtime of its own there.
struct Node {
    discovery: Discovery,
    /// Ends the runtime.
    _end: tokio::sync::oneshot::Sender<()>,
}

impl Node {
    fn start(host: &Host, n: usize, announce: bool) -> Self {
        Self::listening(host, n, announce, None)
    }

    fn listening(host: &Host, n: usize, announce: bool, listen: Option<IpAddr>) -> Self {
        let settings = DiscoverySettings {
            own: Some(node(n)),
            community: Some(CommunityTag::of(&[7; 32])),
            listen,
            ..DiscoverySettings::default()
        };
        let (give, take) = mpsc::channel();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        host.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let announcement = announce.then(|| announcement(n));
                let (discovery, _) =
                    Discovery::start(settings, announcement).expect("a sound announcement");
                give.send(discovery).expect("the test waits");
                let _ = ended.await;
            });
        });
        let discovery = take.recv_timeout(TIMEOUT).expect("discovery starts");
        Self {
            discovery,
            _end: end,
        }
    }

    /// Waits until `is` holds for the found hints. Returns the time taken.
    fn until(&self, what: &str, is: impl Fn(&[Hint]) -> bool) -> Duration {
        let start = Instant::now();
        while !is(&self.discovery.found()) {
            let found = (self.discovery.found(), self.discovery.counts());
            let health = self.discovery.health();
            assert!(start.elapsed() < TIMEOUT, "{what}: {found:?}, {health:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }

    /// Withdraws the announcement.
    fn stop(self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(self.discovery.shutdown());
    }
}

fn endpoints(found: &[Hint], n: usize) -> &[SocketAddr] {
    let hint = found.iter().find(|hint| hint.node == Some(node(n)));
    hint.map_or(&[], |hint| &hint.endpoints)
}

fn knows(found: &[Hint], n: usize, ip: impl Into<IpAddr>) -> bool {
    let ip = ip.into();
    endpoints(found, n)
        .iter()
        .any(|at| at.ip() == ip && at.port() == PORT)
}

#[test]
fn three_machines_find_each_other_over_both_ip_versions_and_notice_a_leave() {
    let Some(lab) = Lab::or_skip(3, 1) else {
        return;
    };
    let started = Instant::now();
    let mut nodes: Vec<_> = (0..3).map(|n| Node::start(lab.host(n), n, true)).collect();
    for (n, one) in nodes.iter().enumerate() {
        for other in (0..3).filter(|other| *other != n) {
            one.until("the others", |found| {
                knows(found, other, lab.host(other).v4())
                    && knows(found, other, lab.host(other).v6_on(0))
            });
        }
        let found = one.discovery.found();
        assert!(found.iter().all(|hint| hint.source == Source::Mdns));
        assert!(endpoints(&found, n).is_empty(), "it does not list itself");
        // Link-local addresses are useless without their interface.
        for at in found.iter().flat_map(|hint| &hint.endpoints) {
            if let SocketAddr::V6(v6) = at {
                assert_eq!(v6.ip().is_unicast_link_local(), v6.scope_id() != 0, "{at}");
            }
        }
    }
    eprintln!(
        "three nodes that start together know each other after {:?}",
        started.elapsed()
    );

    // A node that only searches, such as a single chat.
    let looker = Node::start(lab.host(0), 9, false);
    let took = looker.until("both others", |found| {
        knows(found, 1, lab.host(1).v4()) && knows(found, 2, lab.host(2).v4())
    });
    eprintln!("a program that only looks finds those that are there after {took:?}");

    let started = Instant::now();
    nodes.pop().expect("three").stop();
    nodes[0].until("a goodbye", |found| endpoints(found, 2).is_empty());
    eprintln!(
        "a node that says goodbye is gone after {:?}",
        started.elapsed()
    );
    assert!(knows(&nodes[0].discovery.found(), 1, lab.host(1).v4()));
}

#[test]
fn a_machine_is_found_again_after_its_cable_was_pulled_and_its_address_changed() {
    let Some(lab) = Lab::or_skip(2, 1) else {
        return;
    };
    let a = Node::start(lab.host(0), 0, true);
    lab.host(1).unplug(0);
    let b = Node::start(lab.host(1), 1, true);
    // Starts unplugged, so that its first announcements are lost.
    assert!(endpoints(&a.discovery.found(), 1).is_empty());
    lab.host(1).plug(0);
    let took = a.until("the machine that was plugged in", |found| {
        knows(found, 1, lab.host(1).v4())
    });
    eprintln!("a node is found {took:?} after its cable was plugged in");
    b.until("the other one", |found| knows(found, 0, lab.host(0).v4()));

    let new: IpAddr = [10, 77, 0, 200].into();
    lab.host(1).address(0, "10.77.0.200/24", true);
    let took = a.until("the new address", |found| knows(found, 1, new));
    eprintln!("a new address is known after {took:?}");

    // Unplugged and plugged in again while both run.
    lab.host(1).unplug(0);
    b.until("its own network gone", |found| {
        !knows(found, 0, lab.host(0).v4())
    });
    lab.host(1).plug(0);
    let took = b.until("the network again", |found| {
        knows(found, 0, lab.host(0).v4())
    });
    eprintln!("the network is there again {took:?} after the cable");
    assert!(knows(&a.discovery.found(), 1, new));
}

#[test]
fn a_machine_behind_a_slow_switch_is_found_by_its_announcements() {
    let Some(lab) = Lab::or_skip(2, 1) else {
        return;
    };
    lab.host(1).forwarded(0, false);
    let _node = Node::start(lab.host(1), 1, true);
    // Its start-up announcements are lost; their end cannot be observed, so this waits.
    std::thread::sleep(Duration::from_secs(4));
    let (name, here) = (announcement(1).instance(), lab.host(0).v4());
    let listener = lab.host(0).run(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, MDNS_PORT)).expect("mDNS's port");
        socket
            .join_multicast_v4(&Ipv4Addr::new(224, 0, 0, 251), &here)
            .expect("its group");
        socket
            .set_read_timeout(Some(TIMEOUT))
            .expect("a time limit");
        let start = Instant::now();
        let mut packet = [0; 9000];
        loop {
            assert!(start.elapsed() < TIMEOUT, "it announces itself again");
            let length = socket.recv(&mut packet).expect("an announcement");
            let message = &packet[..length];
            let is_response = message[2] & 0x80 != 0;
            let names_it = message
                .windows(name.len())
                .any(|part| part.eq_ignore_ascii_case(name.as_bytes()));
            if is_response && names_it {
                return start.elapsed();
            }
        }
    });
    lab.host(1).forwarded(0, true);
    let took = listener.join().expect("it was heard");
    eprintln!("a node is heard {took:?} after the switch lets it");
}

#[test]
fn a_machine_on_two_networks_is_found_on_both() {
    let Some(lab) = Lab::or_skip(2, 2) else {
        return;
    };
    let a = Node::start(lab.host(0), 0, true);
    let b = Node::start(lab.host(1), 1, true);
    for (one, other) in [(&a, 1), (&b, 0)] {
        one.until("both networks", |found| {
            knows(found, other, lab.host(other).v4_on(0))
                && knows(found, other, lab.host(other).v4_on(1))
        });
    }
    // With one cable unplugged, the remaining path comes first.
    lab.host(1).unplug(0);
    b.until("the second network first", |found| {
        endpoints(found, 0).first().map(SocketAddr::ip) == Some(lab.host(0).v4_on(1).into())
    });
}

#[test]
fn only_addresses_that_reach_the_listener_are_announced() {
    let Some(lab) = Lab::or_skip(3, 2) else {
        return;
    };
    let looker = Node::start(lab.host(0), 0, false);
    let any_v4: IpAddr = [0, 0, 0, 0].into();
    let one: IpAddr = lab.host(2).v4_on(1).into();
    let _v4 = Node::listening(lab.host(1), 1, true, Some(any_v4));
    let _one = Node::listening(lab.host(2), 2, true, Some(one));
    looker.until("all of IPv4", |found| {
        knows(found, 1, lab.host(1).v4_on(0)) && knows(found, 1, lab.host(1).v4_on(1))
    });
    looker.until("one address", |found| knows(found, 2, one));
    let found = looker.discovery.found();
    assert!(
        endpoints(&found, 1).iter().all(SocketAddr::is_ipv4),
        "{found:?}"
    );
    assert_eq!(endpoints(&found, 2), [SocketAddr::new(one, PORT)]);
}

#[test]
fn another_programs_browser_sees_the_service_and_its_txt_record() {
    let Some(lab) = Lab::or_skip(2, 1) else {
        return;
    };
    let python = std::env::var_os("HEARTHNET_TEST_PYTHON").unwrap_or_else(|| {
        panic!("run tests/run, or set HEARTHNET_TEST_PYTHON to a Python with the package zeroconf")
    });
    let _node = Node::start(lab.host(0), 0, true);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/mdns_browse.py");
    let output = lab
        .host(1)
        .command(python)
        .arg("-B")
        .arg(script)
        .args([&TIMEOUT.as_secs().to_string(), &node(0).to_string()])
        .output()
        .expect("Python starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{why}");
    let last = said
        .lines()
        .last()
        .unwrap_or_else(|| panic!("it saw nothing: {why}"));
    let seen: serde_json::Value = serde_json::from_str(last).expect("a JSON line");
    let expected = announcement(0);
    assert_eq!(
        seen["name"],
        format!("{}._hearthnet._tcp.local.", expected.instance())
    );
    assert_eq!(seen["port"], PORT);
    assert_eq!(
        seen["txt"],
        serde_json::json!({
            "v": "1",
            "node": node(0).to_string(),
            "community": CommunityTag::of(&[7; 32]).to_string(),
            "caps": "experimental.distributed_llm.shard.serve@1.0",
        })
    );
    let addresses: Vec<IpAddr> = seen["addresses"]
        .as_array()
        .expect("addresses")
        .iter()
        .map(|one| {
            one.as_str()
                .expect("text")
                .split('%')
                .next()
                .unwrap_or_default()
        })
        .map(|one| one.parse().expect("an address"))
        .collect();
    assert!(addresses.contains(&lab.host(0).v4().into()), "{seen}");
    assert!(addresses.contains(&lab.host(0).v6_on(0).into()), "{seen}");
    assert!(!addresses.iter().any(IpAddr::is_loopback), "{seen}");
}
