//! Policies that use measurements, and rules that hold for every policy.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::tests::{Named, ask, card_between, named, other, overlapping, seen, shard, shard_of};
use super::*;
use crate::exact::Exact;
use crate::tests::node;

/// Measurements of a host.
fn speed(host: &str, layer_us: u64, hop_us: u64) -> (NodeId, HostSpeed) {
    (node(host), HostSpeed { layer_us, hop_us })
}

fn by<'a>(policy: PolicyName, speeds: &Speeds, all: &'a [Candidate]) -> Named<'a> {
    let ask = RouteRequest {
        allow_self: true,
        ..ask()
    };
    named(&pick_by(policy, speeds, &ask, all).unwrap(), all)
}

/// All policies by name.
const POLICIES: [(&str, PolicyName); 4] = [
    ("auto", PolicyName::Auto),
    ("greedy", PolicyName::Greedy),
    ("planned", PolicyName::Planned),
    ("petals_like", PolicyName::PetalsLike),
];

/// A host with another arithmetic is much faster than the exact ones.
fn card_is_fastest() -> Speeds {
    Speeds::from([
        speed("card", 1, 1),
        speed("a", 900, 10),
        speed("b", 900, 10),
    ])
}

#[test]
fn a_planned_route_takes_no_hop_for_nothing() {
    // The own host has 0-9; a hop to the neighbour's 2-5 would gain nothing.
    let mut own = shard("own", 0, 9, 0);
    own.is_self = true;
    let mut all = [own, shard("near", 2, 5, 0), shard("far", 10, 15, 0)];
    let speeds = Speeds::from([
        speed("own", 1_000, 0),
        speed("near", 900, 600),
        speed("far", 1_000, 600),
    ]);
    let expected = [("own", 0, 9), ("far", 10, 15)];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), expected);
    assert_eq!(by(PolicyName::PetalsLike, &speeds, &all), expected);
    // A neighbour that is fast enough is worth two spans more: 100 us per layer and the hop.
    (all[1].ms_per_layer, all[1].seen_layers) = (Some(0.25), 4);
    let expected = [
        ("own", 0, 1),
        ("near", 2, 5),
        ("own", 6, 9),
        ("far", 10, 15),
    ];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), expected);
}

#[test]
fn another_host_must_be_faster_by_more_than_the_noise() {
    let far = Candidate {
        hop_weight: 1,
        ..shard("far", 0, 15, 0)
    };
    let all = [shard("near", 0, 15, 0), far];
    for (far_us, expected) in [(1_000, "near"), (950, "near"), (850, "far")] {
        let speeds = Speeds::from([speed("near", 1_000, 10), speed("far", far_us, 10)]);
        let route = by(PolicyName::Planned, &speeds, &all);
        assert_eq!(route, [(expected, 0, 15)], "{far_us}");
    }
}

#[test]
fn an_absurd_announcement_is_bounded_by_the_median_before_anything_was_observed() {
    let speeds = Speeds::from([
        speed("liar", 1, 10),
        speed("a", 1_000, 10),
        speed("b", 1_000, 10),
    ]);
    // It counts as 500 us, twice because of its queue.
    let all = [shard("liar", 0, 15, 1), shard("a", 0, 15, 0)];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), [("a", 0, 15)]);
    // A host without measurements counts as four times the median, and not as the slowest one.
    let speeds = Speeds::from([
        speed("liar", u64::MAX, 10),
        speed("a", 1_000, 10),
        speed("b", 1_000, 10),
    ]);
    let all = [
        shard("liar", 0, 15, 0),
        shard("new", 0, 15, 0),
        shard("a", 0, 7, 0),
        shard("b", 0, 7, 1),
    ];
    let expected = [("a", 0, 7), ("new", 8, 15)];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), expected);
}

#[test]
fn load_and_standing_count_for_planned_routes_and_not_for_petals_like_ones() {
    let mut failing = shard("failing", 0, 15, 0);
    failing.standing = Standing::Failing;
    let all = [failing, shard("busy", 0, 15, 3), shard("idle", 0, 15, 0)];
    let speeds = Speeds::from([
        speed("failing", 10, 10),
        speed("busy", 100, 10),
        speed("idle", 200, 10),
    ]);
    // Exact hosts of good standing come first for every policy.
    assert_eq!(by(PolicyName::Planned, &speeds, &all), [("idle", 0, 15)]);
    assert_eq!(by(PolicyName::PetalsLike, &speeds, &all), [("busy", 0, 15)]);
}

#[test]
fn without_measurements_all_policies_route_greedily() {
    let (all, speeds) = (overlapping(), Speeds::new());
    for (name, policy) in POLICIES {
        assert_eq!(
            by(policy, &speeds, &all),
            [("a", 0, 7), ("c", 8, 15)],
            "{name}"
        );
        let spans = pick_by(policy, &speeds, &ask(), &all).unwrap();
        assert!(spans.iter().all(|span| span.policy == PolicyName::Greedy));
        assert_eq!(name.parse::<PolicyName>().unwrap().into_str(), name);
    }
    assert!("random".parse::<PolicyName>().is_err());
}

/// Host of a model of 30 layers.
fn of_thirty(host: &str, lo: u32, hi: u32, queue: u32) -> Candidate {
    Candidate {
        hop_weight: 1,
        ..shard_of(30, host, lo, hi, queue)
    }
}

/// Request for all layers behind two private ones.
fn ask_of_thirty() -> RouteRequest<'static> {
    RouteRequest {
        layers: 2..=29,
        total_layers: 30,
        allow_self: true,
        ..ask()
    }
}

#[test]
fn no_policy_leaves_the_own_machine_for_layers_that_it_holds_and_comes_back() {
    // A queue on the own machine made the neighbour's 2-9 look better.
    let mut own = of_thirty("own", 0, 14, 1);
    (own.is_self, own.hop_weight) = (true, 0);
    let all = [own, of_thirty("near", 2, 9, 0), of_thirty("far", 15, 29, 0)];
    let speeds = Speeds::from(["own", "near", "far"].map(|host| speed(host, 1_000, 600)));
    for (_, policy) in POLICIES {
        let spans = pick_by(policy, &speeds, &ask_of_thirty(), &all).unwrap();
        let route: Vec<_> = spans.iter().map(|s| (s.candidate, s.lo, s.hi)).collect();
        assert_eq!(
            route,
            [(0, 2, 14), (2, 15, 29)],
            "{}",
            spans[0].policy.into_str()
        );
    }
}

#[test]
fn a_greedy_hop_stays_where_the_next_host_is_slower_or_has_failed() {
    let first = |ms_per_layer| Candidate {
        ms_per_layer,
        ..shard("first", 0, 7, 0)
    };
    let next = |standing, ms_per_layer| Candidate {
        standing,
        ms_per_layer,
        ..shard("next", 0, 15, 3)
    };
    let two = [("first", 0, 7), ("next", 8, 15)];
    // A queue is no reason for a hop.
    let all = [first(None), next(Standing::Good, None)];
    assert_eq!(
        by(PolicyName::Greedy, &Speeds::new(), &all),
        [("next", 0, 15)]
    );
    let all = [first(None), next(Standing::Failing, None)];
    assert_eq!(by(PolicyName::Greedy, &Speeds::new(), &all), two);
    let all = [first(Some(1.0)), next(Standing::Good, Some(9.0))];
    assert_eq!(by(PolicyName::Greedy, &Speeds::new(), &all), two);
}

#[test]
fn the_trace_names_the_policy_that_chose() {
    let all = [
        shard("a", 0, 7, 0),
        shard("b", 8, 15, 0),
        shard("c", 8, 15, 9),
    ];
    let chose = |speeds: &Speeds| {
        let spans = pick_by(PolicyName::Auto, speeds, &ask(), &all).unwrap();
        spans.iter().map(|span| span.policy).collect::<Vec<_>>()
    };
    // All hosts that are needed have measurements.
    let measured = Speeds::from([speed("a", 100, 10), speed("b", 100, 10)]);
    assert_eq!(chose(&measured), [PolicyName::Planned; 2]);
    // The only host of 0-7 has none.
    let measured = Speeds::from([speed("b", 100, 10), speed("c", 100, 10)]);
    assert_eq!(chose(&measured), [PolicyName::Greedy; 2]);
}

#[test]
fn planned_routes_keep_the_demands_of_the_request() {
    let all = [
        other("card", 0, 15, 0),
        shard("a", 0, 15, 5),
        shard("b", 0, 15, 9),
    ];
    let speeds = card_is_fastest();
    let route = |ask: &RouteRequest<'_>| {
        let spans = pick_by(PolicyName::Planned, &speeds, ask, &all).unwrap();
        spans.iter().map(|span| span.candidate).collect::<Vec<_>>()
    };
    let exact = |exact: Exact, before| RouteRequest {
        arithmetic: exact.allows(before),
        ..ask()
    };
    assert_eq!(route(&exact(Exact::Require, None)), [1]);
    assert_eq!(route(&exact(Exact::Prefer, None)), [1]);
    assert_eq!(route(&exact(Exact::Any, None)), [0]);
    assert_eq!(route(&exact(Exact::Prefer, Some("torch-cuda-fp16"))), [0]);
    let exclude = BTreeSet::from([node("a")]);
    let spare = RouteRequest {
        exclude: &exclude,
        ..exact(Exact::Prefer, None)
    };
    assert_eq!(route(&spare), [2]);
}

#[test]
fn planned_routes_use_worse_hosts_only_for_layers_without_another() {
    let mut liar = shard("liar", 0, 15, 0);
    liar.standing = Standing::Quarantined;
    let speeds = Speeds::from([speed("liar", 1, 1), speed("half", 900, 10)]);
    let all = [liar, shard("half", 0, 7, 9)];
    let expected = [("half", 0, 7), ("liar", 8, 15)];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), expected);
    let (all, speeds) = (card_between(), card_is_fastest());
    let expected = [("a", 0, 3), ("card", 4, 11), ("b", 12, 15)];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), expected);
    // A failing host that is needed anyway is not left for layers in between.
    let mut failing = shard("failing", 0, 15, 0);
    failing.standing = Standing::Failing;
    let all = [failing, shard("middle", 4, 7, 0)];
    let speeds = Speeds::from([speed("failing", 900, 10), speed("middle", 1, 1)]);
    assert_eq!(by(PolicyName::Planned, &speeds, &all), [("failing", 0, 15)]);
}

#[test]
fn what_the_caller_observed_replaces_what_a_host_announced() {
    let good = Standing::Good;
    let speeds = Speeds::from([speed("liar", 1, 1), speed("honest", 1_000, 500)]);
    let honest = seen("honest", 0, good, Some(1.0));
    let all = [seen("liar", 0, good, Some(1.2)), honest.clone()];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), [("honest", 0, 15)]);
    assert_eq!(
        by(PolicyName::PetalsLike, &speeds, &all),
        [("honest", 0, 15)]
    );
    // An announcement alone counts at most twice as fast as that.
    let all = [shard("liar", 0, 15, 2), honest];
    assert_eq!(by(PolicyName::Planned, &speeds, &all), [("honest", 0, 15)]);
}

#[test]
fn no_announcement_draws_more_than_a_share_of_the_chats() {
    let speeds = Speeds::from([speed("liar", 1, 1), speed("honest", 1_000, 500)]);
    let request = ask();
    // With an observed host, and with announcements only.
    for seen_ms in [Some(1.0), None] {
        let honest = seen("honest", 0, Standing::Good, seen_ms);
        let mut hosts = [shard("liar", 0, 15, 0), honest];
        for _ in 0..40 {
            let route = pick_by(PolicyName::Planned, &speeds, &request, &hosts).unwrap();
            for span in route {
                hosts[span.candidate].streams += 1;
            }
        }
        let drawn = hosts[0].streams;
        assert!((2..=21).contains(&drawn), "{drawn} of 40, {seen_ms:?}");
    }
}

#[test]
fn speeds_come_from_the_log_and_from_both_ends_of_a_link() {
    use hearthnet_bus::log::{Body, Level, LinkSpeed, Measured, ModelSpeed};
    use hearthnet_bus::now_ms;
    use hearthnet_bus::testing::{Home, id, key};
    use hearthnet_files::WeightsId;

    let weights = WeightsId([7; 32]);
    let measured = |layer_us, peer: u8, delay_us, kbit_s| Measured {
        links: vec![LinkSpeed {
            node: id(peer),
            kbit_s,
            delay_us,
        }],
        models: vec![ModelSpeed {
            head_us: 0,
            step_us: 0,
            weights: weights.0,
            layer_us,
            prefill_row_us: 0,
        }],
        ..Measured::default()
    };
    let home = Home::founded(key(1), true);
    home.append(Body::NodeMeasured(measured(400, 2, 250, 0)));
    home.admit(id(2), Level::Trusted);
    let body = Body::NodeMeasured(measured(700, 1, 9, 8_000));
    home.log.append(&key(2), body, now_ms()).unwrap();
    let found = speeds(&home.log.state(), weights, id(1), 1_000, now_ms());
    let of = |layer_us, hop_us| HostSpeed { layer_us, hop_us };
    // The caller's delay, and the only bandwidth: 1 us per byte.
    let expected = [(id(1), of(400, 0)), (id(2), of(700, 2 * (250 + 1_000)))];
    assert_eq!(found, Speeds::from(expected));
    let other = speeds(&home.log.state(), WeightsId([8; 32]), id(1), 0, now_ms());
    assert_eq!(other, Speeds::new());
}

/// Spans by index of their candidate.
fn spans_by(
    policy: PolicyName,
    speeds: &Speeds,
    ask: &RouteRequest<'_>,
    all: &[Candidate],
) -> Vec<(usize, u32, u32)> {
    let spans = pick_by(policy, speeds, ask, all).unwrap().into_iter();
    spans.map(|s| (s.candidate, s.lo, s.hi)).collect()
}

/// Idle hosts with these ranges, and two that make a route possible.
fn hosts_of_thirty(ranges: &[(u32, u32)]) -> Vec<Candidate> {
    let hosts = ranges.iter().enumerate();
    let hosts = hosts.map(|(n, &(a, b))| of_thirty(&format!("h{n}"), a.min(b), a.max(b), 0));
    let ends = [of_thirty("low", 0, 17, 0), of_thirty("high", 12, 29, 0)];
    hosts.chain(ends).collect()
}

proptest! {
    #[test]
    fn alike_hosts_are_routed_as_greedily_whatever_was_measured_by_chance(
        layers_us in proptest::array::uniform4(950u64..=1_000),
        streams in proptest::array::uniform4(0u32..20),
    ) {
        let mut all = [(2, 20), (2, 29), (15, 29), (21, 29)]
            .map(|(lo, hi)| of_thirty(&format!("{lo}-{hi}"), lo, hi, 0));
        for (candidate, streams) in all.iter_mut().zip(streams) {
            candidate.streams = streams;
        }
        let hosts = all.iter().map(|c| c.descriptor.host);
        let speeds: Speeds = hosts
            .zip(layers_us)
            .map(|(host, layer_us)| (host, HostSpeed { layer_us, hop_us: 300 }))
            .collect();
        let ask = ask_of_thirty();
        let planned = spans_by(PolicyName::Planned, &speeds, &ask, &all);
        prop_assert_eq!(planned, spans_by(PolicyName::Greedy, &Speeds::new(), &ask, &all));
    }

    #[test]
    fn a_planned_route_is_the_greedy_one_or_gains_more_than_the_noise(
        hosts in proptest::collection::vec(((0u32..30, 0u32..30), 1_000u64..2_000, 0u64..4_000), 1..8),
        others in proptest::array::uniform2((1_000u64..2_000, 0u64..4_000)),
    ) {
        let ranges: Vec<(u32, u32)> = hosts.iter().map(|(range, ..)| *range).collect();
        let all = hosts_of_thirty(&ranges);
        let times = hosts.iter().map(|&(_, layer_us, hop_us)| (layer_us, hop_us)).chain(others);
        let speeds: Speeds = all
            .iter()
            .zip(times)
            .map(|(c, (layer_us, hop_us))| (c.descriptor.host, HostSpeed { layer_us, hop_us }))
            .collect();
        let cost = |route: &[(usize, u32, u32)]| -> u64 {
            let spans = route.iter().map(|&(candidate, lo, hi)| {
                let speed = speeds[&all[candidate].descriptor.host];
                speed.hop_us + u64::from(hi - lo + 1) * speed.layer_us
            });
            spans.sum()
        };
        let ask = ask_of_thirty();
        let planned = spans_by(PolicyName::Planned, &speeds, &ask, &all);
        let greedy = spans_by(PolicyName::Greedy, &Speeds::new(), &ask, &all);
        let cheapest = spans_by(PolicyName::PetalsLike, &speeds, &ask, &all);
        let most = cost(&cheapest) + cost(&cheapest) / 10;
        prop_assert!(cost(&planned) <= most);
        if planned != greedy {
            prop_assert!(cost(&greedy) > most);
            prop_assert!(planned.len() <= cheapest.len());
        }
    }

    #[test]
    fn no_span_of_a_route_is_held_by_another_host_of_the_route(
        ranges in proptest::collection::vec((0u32..30, 0u32..30, 0u32..4), 1..10),
        own in any::<bool>(),
    ) {
        let mut all: Vec<Candidate> = ranges
            .iter()
            .enumerate()
            .map(|(n, &(a, b, queue))| of_thirty(&format!("h{n}"), a.min(b), a.max(b), queue))
            .collect();
        (all[0].is_self, all[0].hop_weight) = (own, u32::from(!own));
        // So that each case has a route.
        all.extend([of_thirty("low", 0, 17, 2), of_thirty("high", 12, 29, 2)]);
        let speeds: Speeds = all
            .iter()
            .map(|c| (c.descriptor.host, HostSpeed { layer_us: 500, hop_us: 700 }))
            .collect();
        for (_, policy) in POLICIES {
            let route = pick_by(policy, &speeds, &ask_of_thirty(), &all).unwrap();
            let name = route[0].policy.into_str();
            let layers: Vec<u32> = route.iter().flat_map(|span| span.lo..=span.hi).collect();
            prop_assert_eq!(layers, (2..=29).collect::<Vec<u32>>());
            for (at, span) in route.iter().enumerate() {
                // Layers on the own machine cost no hop.
                if all[span.candidate].is_self {
                    continue;
                }
                let next = route[at + 1..].iter().take(1);
                let others = route[..at].iter().rev().take(1).chain(next);
                for other in others.filter(|other| other.candidate != span.candidate) {
                    let (lo, hi) = all[other.candidate].descriptor.layer_range;
                    let held = lo <= span.lo && span.hi <= hi;
                    prop_assert!(!held, "{}: {:?}", name, route);
                }
                let again = route.iter().filter(|other| other.candidate == span.candidate);
                prop_assert_eq!(again.count(), 1, "{}: {:?}", name, route);
            }
        }
    }
}
