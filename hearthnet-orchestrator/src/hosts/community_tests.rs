use hearthnet_bus::discovery::LocalAddress;
use hearthnet_bus::log::{Body, Finding, Level};
use hearthnet_bus::testing::{Home, descriptor, id, key};
use hearthnet_files::spec::RowShape;
use hearthnet_files::{BoundaryDtype, WeightsId};

use super::*;
use crate::hosts::ModelOnWire;

#[test]
fn announced_addresses_never_displace_vouched_for_ones() {
    let local = Local::new(vec![LocalAddress {
        interface: "eth0".into(),
        index: 2,
        ip: "10.0.0.250".parse().unwrap(),
        prefix: 24,
    }]);
    let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
    let (proved, signed, moved) = (at("10.9.0.1:7"), at("10.9.0.2:7"), at("10.9.0.3:7"));
    // The announced addresses are in this network, the vouched-for ones are not.
    let heard = (1..41).map(|n| (Source::Mdns, at(&format!("10.0.0.{n}:7"))));
    let mut all: Vec<_> = heard.collect();
    all.extend([(Source::Mdns, moved), (Source::Mdns, signed)]);
    all.extend([(Source::Log, signed), (Source::Proved, proved)]);
    let tried = best_first(all, &local);
    assert_eq!(tried[..2], [proved, signed]);
    assert_eq!(tried.len(), 2 + MAX_ADDRESSES, "{tried:?}");
}

fn hosts_of(home: &Home, caller: u8, runtime: &Handle) -> CommunityHosts {
    let model = ModelOnWire {
        model_id: "m".into(),
        weights: WeightsId([10; 32]),
        rows: RowShape::plain(4),
        layers: 16,
        together: 16..16,
        hosted: 0..16,
        recurrent: false,
        context: 64,
        boundary: BoundaryDtype::F16,
        bands: None,
    };
    let choice = Choice {
        model,
        max_shards: 4,
        own_id: id(caller),
        allow_self: false,
        exact: Exact::Any,
        policy: PolicyName::default(),
        speeds: Speeds::new(),
        health: SharedHealth::default(),
    };
    let _inside = runtime.enter();
    let connections = Connections::watched(home.log.clone());
    let links = Links::new(connections, choice.health.clone());
    let (runtime, log, config) = (runtime.clone(), home.log.clone(), Config::default());
    CommunityHosts::new(runtime, Arc::new(key(caller)), log, config, choice, links)
}

#[test]
fn convicted_hosts_are_in_no_route_and_false_accusers_are_marked() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let home = Home::founded(key(1), true);
    let write = |author: u8, body| {
        home.log.append(&key(author), body, now_ms()).unwrap();
    };
    for host in [2, 3, 4] {
        let request = home.invite(Level::Trusted, 1).request(id(host), "host");
        let request = request.unwrap();
        let level = Level::Trusted;
        write(1, Body::Admitted { request, level });
        let advertised = Box::new(descriptor(id(host)));
        write(host, Body::ShardAdvertised(advertised));
    }
    let offered = || -> BTreeMap<NodeId, bool> {
        let offered = hosts_of(&home, 4, runtime.handle()).offered();
        assert_eq!(offered.adverts.len(), offered.candidates.len());
        let all = offered.candidates.into_iter();
        all.map(|one| (one.descriptor.host, one.is_false_accuser))
            .collect()
    };
    let all = [2, 3, 4].map(|host| (id(host), false));
    assert_eq!(offered(), BTreeMap::from(all));
    // 4 is right about 2, and 3 is wrong about 4.
    for (accuser, accused, finding) in [(4, 2, Finding::Accused), (3, 4, Finding::None)] {
        home.judge(&key(accuser), id(accused), finding);
    }
    assert_eq!(offered(), BTreeMap::from([(id(3), true), (id(4), false)]));
    let source = hosts_of(&home, 4, runtime.handle());
    assert!(source.is_convicted(&id(2)) && !source.is_convicted(&id(3)));
}

#[test]
fn a_host_that_gave_a_sign_of_life_is_not_offline() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let begin = |heard: &SignOfLife| {
        let attempt = std::future::pending();
        Opening::begin(runtime.handle(), heard.clone(), attempt)
    };
    let key = |n| (hearthnet_bus::testing::id(n), "all".to_owned());
    let mut awaited = Awaited::default();
    assert_eq!(awaited.dark_at(), None, "nobody is waited for");
    let (first, second) = (SignOfLife::default(), SignOfLife::default());
    awaited.0.insert(key(1), begin(&first));
    awaited.0.insert(key(2), begin(&second));
    let last = awaited.0[&key(2)].since() + SIGN_OF_LIFE_TIMEOUT;
    assert_eq!(awaited.dark_at(), Some(last), "each has its time");
    first.note();
    assert_eq!(awaited.dark_at(), None, "it is slow");
}
