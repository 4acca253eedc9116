//! Tests of the address book's guarantees, by examples and for random sequences of events.

use proptest::prelude::*;

use super::super::announcement::CommunityTag;
use super::super::entry::MAX_PROVED;
use super::super::local::LocalAddress;
use super::*;
use crate::NodeKey;
use crate::testing::id as node;

const T0: u64 = 1_800_000_000_000;
const MINUTE: u64 = 60_000;

/// `count` node ids, each a valid key.
fn many_nodes(count: u32) -> impl Iterator<Item = NodeId> {
    (0..count).map(|n| {
        let mut secret = [0xEE; 32];
        secret[..4].copy_from_slice(&n.to_be_bytes());
        NodeKey::from_secret(&secret).id()
    })
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn lan(host: u32, port: u16) -> SocketAddr {
    SocketAddr::new(
        std::net::Ipv4Addr::from_bits(0x0A00_0000 + host).into(),
        port,
    )
}

/// A book of a machine with one address, in a network of 256.
fn book_at(ip: &str) -> AddressBook {
    let mut book = AddressBook::new(None);
    book.set_local(Local::new(vec![LocalAddress {
        interface: "eth0".into(),
        index: 2,
        ip: ip.parse().unwrap(),
        prefix: 24,
    }]));
    book
}

/// A book in which node 1 is a member.
fn book_of_a_member() -> AddressBook {
    let mut book = AddressBook::new(None);
    book.set_members([node(1)], T0);
    book
}

fn hear(book: &mut AddressBook, node: NodeId, endpoints: &[SocketAddr], now: u64) -> bool {
    let said = Announcement {
        node,
        community: CommunityTag::of(&[1; 32]),
        port: endpoints[0].port(),
        caps: vec!["chat".to_owned()],
    };
    book.heard(&said, endpoints, now)
}

#[test]
fn an_endpoint_of_several_sources_is_listed_once_under_the_best() {
    let mut book = AddressBook::new(None);
    let a = at("10.0.0.5:7071");
    assert!(hear(&mut book, node(1), &[a], T0));
    assert!(
        !book.told(Source::Log, node(1), &[a], T0 + 1),
        "nothing new"
    );
    book.told(Source::Static, node(1), &[a], T0 + 2);
    let [hint] = book.hints(T0 + 2).try_into().unwrap();
    assert_eq!(
        (hint.endpoints.as_slice(), hint.source),
        ([a].as_slice(), Source::Static)
    );
    assert_eq!(hint.last_seen_ms, T0 + 2);
    assert_eq!(hint.caps, ["chat"]);
    book.proved(node(1), a, T0 + 3);
    assert_eq!(book.hints(T0 + 3)[0].source, Source::Proved);
}

#[test]
fn the_nearest_that_worked_comes_first_and_the_failed_last() {
    let mut book = book_at("10.1.0.1");
    let (far, near, link) = (at("10.9.0.5:7"), at("10.1.0.5:7"), at("[fe80::5%2]:7"));
    book.told(Source::Log, node(1), &[far], T0);
    hear(&mut book, node(1), &[link, near], T0);
    // Signed endpoints come before mDNS ones.
    assert_eq!(book.endpoints(&node(1), T0), [far, near, link]);
    book.failed(Some(&node(1)), near);
    assert_eq!(book.endpoints(&node(1), T0), [far, link, near]);
    book.proved(node(1), near, T0);
    assert_eq!(book.endpoints(&node(1), T0), [near, far, link]);
    book.proved(node(1), far, T0);
    assert_eq!(book.endpoints(&node(1), T0), [near, far, link]);
    book.failed(Some(&node(1)), near);
    assert_eq!(book.endpoints(&node(1), T0), [far, near, link]);
}

#[test]
fn announcements_never_displace_vouched_endpoints() {
    let mut book = book_at("10.0.0.250");
    book.set_members([node(1)], T0);
    // The announcements are near, the vouched endpoints are far.
    let (proved, signed, written) = (at("10.9.0.1:7"), at("10.9.0.2:7"), at("10.9.0.3:7"));
    for n in 0..40 {
        hear(&mut book, node(1), &[lan(1 + n, 100 + n as u16)], T0);
    }
    book.proved(node(1), proved, T0);
    book.told(Source::Log, node(1), &[signed], T0);
    book.told(Source::Static, node(1), &[written], T0);
    // A host that is restarting has failed once.
    book.failed(Some(&node(1)), proved);
    let dialled = book.dialable(&node(1), T0);
    let vouched = [proved, signed, written];
    assert!(
        dialled[..3].iter().all(|at| vouched.contains(at)),
        "{dialled:?}"
    );
    assert!(dialled.len() > 3, "a node that has moved is heard only");
    assert!(dialled.len() <= 2 * MAX_DIALLED);
}

#[test]
fn a_signed_endpoint_is_kept_among_any_number_of_announcements() {
    // In both orders of signature and announcement.
    for signed_first in [true, false] {
        let mut book = book_of_a_member();
        let there = lan(200, 7);
        if signed_first {
            book.signed(&node(1), &[there], T0);
        } else {
            hear(&mut book, node(1), &[there], T0);
        }
        for n in 0..40 {
            hear(&mut book, node(1), &[lan(1 + n, 100 + n as u16)], T0);
        }
        if signed_first {
            hear(&mut book, node(1), &[there], T0 + 1);
        } else {
            book.signed(&node(1), &[there], T0 + 1);
        }
        let first = book.dialable(&node(1), T0 + 1).first().copied();
        assert_eq!(first, Some(there), "signed first: {signed_first}");
    }
    // An endpoint that is signed but not announced needs `told`.
    let mut book = book_of_a_member();
    book.signed(&node(1), &[lan(200, 7)], T0);
    assert_eq!(book.endpoints(&node(1), T0), []);
}

#[test]
fn a_goodbye_takes_back_what_mdns_said_and_nothing_else() {
    let mut book = AddressBook::new(None);
    let (mdns, log, proved) = (lan(1, 7), lan(2, 7), lan(3, 7));
    let other_program = lan(1, 8);
    hear(&mut book, node(1), &[mdns, proved], T0);
    hear(&mut book, node(1), &[other_program], T0);
    hear(&mut book, node(2), &[mdns], T0);
    book.told(Source::Log, node(1), &[log], T0);
    book.proved(node(1), proved, T0);
    assert!(book.gone(&Instance::of(&node(1), 7)));
    assert!(!book.gone(&Instance::of(&node(1), 7)), "said twice");
    assert_eq!(book.endpoints(&node(1), T0), [proved, log, other_program]);
    assert_eq!(book.endpoints(&node(2), T0), [mdns]);
}

#[test]
fn unconfirmed_endpoints_expire_by_class() {
    let mut book = AddressBook::new(None);
    let (mdns, log, written) = (lan(1, 7), lan(2, 7), lan(3, 7));
    hear(&mut book, node(1), &[mdns], T0);
    book.told(Source::Log, node(1), &[log], T0);
    book.told(Source::Static, node(1), &[written], T0);
    assert_eq!(book.endpoints(&node(1), T0 + 9 * MINUTE).len(), 3);
    assert!(book.expire(T0 + 10 * MINUTE));
    assert_eq!(book.endpoints(&node(1), T0 + 10 * MINUTE), [written, log]);
    let week = 7 * 24 * 60 * MINUTE;
    assert_eq!(book.endpoints(&node(1), T0 + week), [written, log]);
    assert_eq!(book.endpoints(&node(1), T0 + 2 * week), [written]);
}

#[test]
fn a_changed_address_replaces_the_old_one_after_its_time() {
    let mut book = AddressBook::new(None);
    let (old, new) = (lan(1, 7), lan(2, 7));
    hear(&mut book, node(1), &[old], T0);
    assert!(hear(&mut book, node(1), &[new], T0 + MINUTE));
    assert_eq!(
        book.endpoints(&node(1), T0 + MINUTE),
        [new, old],
        "the newest first"
    );
    assert_eq!(book.endpoints(&node(1), T0 + 4 * MINUTE), [new]);
    // Failures before an endpoint expired no longer count when it returns.
    book.failed(Some(&node(1)), new);
    book.expire(T0 + 20 * MINUTE);
    hear(&mut book, node(1), &[old, new], T0 + 20 * MINUTE);
    assert_eq!(book.endpoints(&node(1), T0 + 20 * MINUTE), [old, new]);
}

#[test]
fn a_new_address_replaces_old_ones_in_a_full_table() {
    let mut book = AddressBook::new(None);
    let before: Vec<_> = (0..MAX_PER_CLASS as u32).map(|n| lan(n, 7)).collect();
    hear(&mut book, node(1), &before, T0);
    // An announcement of another port is refused while no endpoint has failed.
    assert!(!hear(&mut book, node(1), &[lan(100, 8)], T0));
    assert!(hear(&mut book, node(1), &[lan(200, 7)], T0 + 1));
    assert!(book.endpoints(&node(1), T0 + 1).contains(&lan(200, 7)));
    assert_eq!(book.endpoints(&node(1), T0 + 1).len(), MAX_PER_CLASS);
}

#[test]
fn a_clock_that_jumps_back_harms_nothing() {
    let mut book = AddressBook::new(None);
    hear(&mut book, node(1), &[lan(1, 7)], T0);
    book.proved(node(1), lan(1, 7), T0);
    hear(&mut book, node(1), &[lan(2, 7)], 0);
    book.expire(0);
    assert_eq!(book.endpoints(&node(1), 0).len(), 2);
    assert_eq!(book.endpoints(&node(1), u64::MAX), []);
}

#[test]
fn ten_thousand_strangers_push_no_member_out() {
    let mut book = AddressBook::new(Some(node(9)));
    let members: Vec<_> = (1..=3).map(node).collect();
    book.set_members(members.iter().copied(), T0);
    for (n, member) in members.iter().enumerate() {
        hear(&mut book, *member, &[lan(n as u32, 7)], T0);
    }
    let before: Vec<_> = members.iter().map(|m| book.endpoints(m, T0 + 10)).collect();
    for (n, stranger) in many_nodes(10_000).enumerate() {
        hear(&mut book, stranger, &[lan(1000 + n as u32, 7)], T0 + 5);
    }
    let after: Vec<_> = members.iter().map(|m| book.endpoints(m, T0 + 10)).collect();
    assert_eq!(before, after);
    assert_eq!(book.hints(T0 + 10).len(), members.len() + MAX_STRANGERS);
    // A new member still gets an entry.
    book.set_members((1..=4).map(node), T0 + 6);
    hear(&mut book, node(4), &[lan(4, 7)], T0 + 7);
    assert_eq!(book.endpoints(&node(4), T0 + 10), [lan(4, 7)]);
}

#[test]
fn ten_thousand_claims_to_be_one_member_leave_its_known_addresses() {
    let mut book = book_of_a_member();
    let (first, log, written, proved) = (lan(1, 7), lan(2, 7), lan(3, 7), lan(4, 7));
    hear(&mut book, node(1), &[first], T0);
    book.told(Source::Log, node(1), &[log], T0);
    book.told(Source::Static, node(1), &[written], T0);
    book.proved(node(1), proved, T0);
    for n in 0..10_000 {
        hear(
            &mut book,
            node(1),
            &[lan(1000 + n, 100 + (n % 60_000) as u16)],
            T0 + 1,
        );
    }
    let endpoints = book.endpoints(&node(1), T0 + 2);
    assert!(endpoints.len() <= MAX_PROVED + 3 * MAX_PER_CLASS);
    for kept in [first, log, written, proved] {
        assert!(endpoints.contains(&kept), "{kept}");
    }
    assert_eq!(endpoints[0], proved);
}

#[test]
fn a_stranger_that_fails_makes_place_for_the_next() {
    let mut book = AddressBook::new(None);
    let crowd: Vec<_> = many_nodes(MAX_STRANGERS as u32).collect();
    for stranger in &crowd {
        hear(&mut book, *stranger, &[lan(1, 7)], T0);
    }
    assert!(!hear(&mut book, node(1), &[lan(2, 7)], T0));
    book.failed(Some(&crowd[17]), lan(1, 7));
    assert!(hear(&mut book, node(1), &[lan(2, 7)], T0));
    assert_eq!(book.endpoints(&crowd[17], T0), []);
    // A configured endpoint displaces one known only from mDNS.
    assert!(book.told(Source::Static, node(2), &[lan(3, 7)], T0));
    assert_eq!(book.hints(T0).len(), MAX_STRANGERS);
}

#[test]
fn a_static_peer_without_a_name_gets_the_one_it_proves() {
    let mut book = AddressBook::new(None);
    let place = at("10.0.0.5:7071");
    assert!(book.set_unnamed([place, place], T0));
    assert!(!book.set_unnamed([place], T0 + 5));
    let hints = book.hints(T0);
    assert_eq!(hints.len(), 1);
    assert_eq!((hints[0].node, hints[0].endpoints[0]), (None, place));
    assert_eq!(hints[0].last_seen_ms, T0, "looking it up again is no news");
    book.proved(node(1), place, T0);
    let hints = book.hints(T0);
    assert_eq!((hints.len(), hints[0].node), (1, Some(node(1))));
    // Another machine has taken the address.
    book.proved(node(2), place, T0 + 1);
    assert_eq!(book.endpoints(&node(1), T0 + 1), []);
    book.failed(None, place);
    assert!(book.hints(T0).iter().any(|hint| hint.node.is_none()));
}

#[test]
fn a_node_never_lists_itself() {
    let mut book = AddressBook::new(Some(node(1)));
    book.set_members([node(1)], T0);
    assert!(!hear(&mut book, node(1), &[lan(1, 7)], T0));
    book.proved(node(1), lan(1, 7), T0);
    assert!(book.hints(T0).is_empty());
}

#[derive(Debug, Clone)]
enum Event {
    Hear(u8, u8, u16),
    Gone(u8, u16),
    Log(u8, u8, u16),
    Proved(u8, u8, u16),
    Failed(u8, u8, u16),
    Members(u8),
    Expire,
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let place = || (0..12u8, any::<u8>(), 1..4u16);
    prop_oneof![
        4 => place().prop_map(|(n, h, p)| Event::Hear(n, h, p)),
        1 => (0..12u8, 1..4u16).prop_map(|(n, p)| Event::Gone(n, p)),
        1 => place().prop_map(|(n, h, p)| Event::Log(n, h, p)),
        1 => place().prop_map(|(n, h, p)| Event::Proved(n, h, p)),
        1 => place().prop_map(|(n, h, p)| Event::Failed(n, h, p)),
        1 => (0..12u8).prop_map(Event::Members),
        1 => Just(Event::Expire),
        1 => (0..40 * MINUTE).prop_map(Event::Wait),
    ]
}

/// Runs events, and checks the invariants after each.
fn run(events: &[Event], only_mdns: bool, book: &mut AddressBook, now: &mut u64) {
    // Making keys is the slowest part, so do it once.
    let nodes: Vec<_> = (0..12).map(node).collect();
    let place = |h: &u8, p: &u16| lan(u32::from(*h), *p);
    for event in events {
        match event {
            Event::Hear(n, h, p) => {
                hear(book, nodes[*n as usize], &[place(h, p)], *now);
            }
            Event::Gone(n, p) => {
                book.gone(&Instance::of(&nodes[*n as usize], *p));
            }
            Event::Failed(n, h, p) => book.failed(Some(&nodes[*n as usize]), place(h, p)),
            Event::Expire => {
                book.expire(*now);
            }
            Event::Wait(ms) => *now += ms,
            _ if only_mdns => {}
            Event::Log(n, h, p) => {
                book.told(Source::Log, nodes[*n as usize], &[place(h, p)], *now);
            }
            Event::Proved(n, h, p) => book.proved(nodes[*n as usize], place(h, p), *now),
            Event::Members(n) => book.set_members(nodes.iter().copied().take(*n as usize), *now),
        }
        for entry in book.members.values().chain(book.strangers.values()) {
            assert!(entry.records.len() <= MAX_PROVED + 3 * MAX_PER_CLASS);
        }
        assert!(book.strangers.len() <= MAX_STRANGERS);
        for hint in book.hints(*now) {
            let mut endpoints = hint.endpoints.clone();
            assert_eq!(endpoints, book.endpoints(&hint.node.unwrap(), *now));
            endpoints.sort();
            endpoints.dedup();
            assert_eq!(endpoints.len(), hint.endpoints.len(), "each endpoint once");
            assert!(!endpoints.is_empty());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_sequence_of_events_breaks_a_bound(events in prop::collection::vec(event(), 0..300)) {
        run(&events, false, &mut AddressBook::new(None), &mut T0.clone());
    }

    #[test]
    fn mdns_never_displaces_better_endpoints(
        events in prop::collection::vec(event(), 0..300),
    ) {
        let mut book = AddressBook::new(None);
        let mut now = T0;
        book.set_members([node(1)], T0);
        let (log, written, proved) = (at("10.7.0.1:2"), at("10.7.0.2:2"), at("10.7.0.3:2"));
        book.told(Source::Log, node(1), &[log], T0);
        book.told(Source::Static, node(1), &[written], T0);
        book.proved(node(1), proved, T0);
        let events: Vec<_> = events.into_iter().filter(|e| !matches!(e, Event::Wait(_))).collect();
        run(&events, true, &mut book, &mut now);
        let endpoints = book.endpoints(&node(1), now);
        for kept in [log, written, proved] {
            prop_assert!(endpoints.contains(&kept));
        }
    }

    #[test]
    fn a_repeated_announcement_changes_nothing(events in prop::collection::vec(event(), 0..60), n in 0..12u8, h: u8, p in 1..4u16) {
        let mut book = AddressBook::new(None);
        let mut now = T0;
        run(&events, false, &mut book, &mut now);
        let (who, place) = (node(n), lan(u32::from(h), p));
        hear(&mut book, who, &[place], now);
        let once = book.hints(now);
        prop_assert!(!hear(&mut book, who, &[place], now));
        prop_assert_eq!(once, book.hints(now));
    }
}

#[test]
fn only_unproved_claims_back_off_longer_each_time() {
    let mut book = AddressBook::new(None);
    let (claimed, proved, heard) = (lan(1, 7600), lan(2, 7600), lan(3, 7600));
    book.set_members([node(1)], T0);
    book.told(Source::Log, node(1), &[claimed, proved], T0);
    hear(&mut book, node(1), &[heard], T0);
    book.proved(node(1), proved, T0);
    let (mut now, mut tries) = (T0, Vec::new());
    // Dialled every second, and signed again every 40 s, for two hours.
    while now < T0 + 120 * MINUTE {
        let dialled = book.dialable(&node(1), now);
        assert!(dialled.contains(&proved) && (dialled.contains(&heard) || now >= T0 + 10 * MINUTE));
        if dialled.contains(&claimed) {
            tries.push((now - T0) / 1000);
        }
        for at in dialled {
            book.failed(Some(&node(1)), at);
        }
        if now % 40_000 == 0 {
            book.told(Source::Log, node(1), &[claimed], now);
        }
        now += 1000;
    }
    assert_eq!(tries[..5], [0, 2, 6, 14, 30]);
    assert!(tries.len() < 18, "{tries:?}");
    // An endpoint that answers once has no back-off afterwards.
    book.proved(node(1), claimed, now);
    book.failed(Some(&node(1)), claimed);
    assert!(book.dialable(&node(1), now).contains(&claimed));
}

#[test]
fn claims_cannot_make_others_scan_ports() {
    let mut book = AddressBook::new(None);
    book.set_members([node(1), node(2)], T0);
    let mut tried = std::collections::BTreeSet::new();
    for n in 0..3600u64 {
        let at = lan(1, 2000 + n as u16);
        book.told(Source::Log, node(1), &[at], T0 + 1000 * n);
        tried.extend(book.dialable(&node(1), T0 + 1000 * n));
    }
    assert_eq!(tried.len(), 32 + 29);
    // Other members' claims are not affected.
    assert!(book.told(Source::Log, node(2), &[lan(2, 7600)], T0));
    assert_eq!(book.endpoints(&node(2), T0), [lan(2, 7600)]);
}
