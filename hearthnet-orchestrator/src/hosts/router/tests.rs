use std::collections::BTreeSet;

use hearthnet_engine::ARITHMETIC;
use proptest::prelude::*;

use super::*;
use crate::exact::Exact;
use crate::tests::{descriptor, node};

/// Candidate for a model of `total` layers, whose software has the name of its host.
pub(super) fn shard_of(total: u32, host: &str, lo: u32, hi: u32, queue: u32) -> Candidate {
    let mut descriptor = descriptor("m", node(host), lo, hi, total);
    descriptor.queue_depth = queue;
    descriptor.software = host.into();
    Candidate::new(descriptor, 0, false)
}

/// [`shard_of`] a model of 16 layers.
pub(super) fn shard(host: &str, lo: u32, hi: u32, queue: u32) -> Candidate {
    shard_of(16, host, lo, hi, queue)
}

/// Idle hosts of the worked example.
pub(super) fn overlapping() -> [Candidate; 3] {
    [
        shard("a", 0, 7, 0),
        shard("b", 4, 11, 0),
        shard("c", 8, 15, 0),
    ]
}

/// Exact hosts of the first and last layers, and a host with another arithmetic for those between.
pub(super) fn card_between() -> [Candidate; 3] {
    [
        other("card", 0, 11, 0),
        shard("a", 0, 3, 2),
        shard("b", 12, 15, 2),
    ]
}

/// Request for all layers; each one has its own tie-break.
pub(super) fn ask() -> RouteRequest<'static> {
    static NONE: BTreeSet<NodeId> = BTreeSet::new();
    RouteRequest {
        model_id: "m",
        weights_sha256: "abababababababababababababababababababababababababababababababab",
        boundary_dtype: "fp16",
        arithmetic: Exact::default().allows(None),
        layers: 0..=15,
        total_layers: 16,
        together: 16..16,
        max_shards: 16,
        allow_self: false,
        exclude: &NONE,
        tie_breaker: Box::leak(Box::new(TieBreaker::random())),
    }
}

/// Hosts by name, with their layers.
pub(super) type Named<'a> = Vec<(&'a str, u32, u32)>;

pub(super) fn named<'a>(route: &[Span], all: &'a [Candidate]) -> Named<'a> {
    let name = |span: &Span| all[span.candidate].descriptor.software.as_str();
    let spans = route.iter();
    spans.map(|span| (name(span), span.lo, span.hi)).collect()
}

pub(super) fn greedy(ask: &RouteRequest<'_>, all: &[Candidate]) -> Result<Vec<Span>, RouteError> {
    pick_by(PolicyName::Greedy, &Speeds::new(), ask, all)
}

fn route_by<'a>(ask: &RouteRequest<'_>, all: &'a [Candidate]) -> Result<Named<'a>, RouteError> {
    Ok(named(&greedy(ask, all)?, all))
}

fn route(all: &[Candidate]) -> Named<'_> {
    route_by(&ask(), all).unwrap()
}

#[test]
fn the_worked_example_of_the_specification_holds() {
    assert_eq!(route(&overlapping()), [("a", 0, 7), ("c", 8, 15)]);
}

/// Host with another arithmetic.
pub(super) fn other(host: &str, lo: u32, hi: u32, queue: u32) -> Candidate {
    let mut candidate = shard(host, lo, hi, queue);
    candidate.descriptor.arithmetic = "torch-cuda-fp16".into();
    candidate
}

fn asks(exact: Exact) -> RouteRequest<'static> {
    RouteRequest {
        arithmetic: exact.allows(None),
        ..ask()
    }
}

#[test]
fn exact_hosts_come_first_where_they_have_all_layers() {
    // Regardless of load and reach.
    let all = [
        other("fast", 0, 15, 0),
        shard("a", 0, 7, 9),
        shard("b", 8, 15, 9),
    ];
    let exact = [("a", 0, 7), ("b", 8, 15)];
    assert_eq!(route_by(&asks(Exact::Require), &all).unwrap(), exact);
    assert_eq!(route_by(&asks(Exact::Prefer), &all).unwrap(), exact);
    let any = route_by(&asks(Exact::Any), &all).unwrap();
    assert_eq!(any, [("fast", 0, 15)]);
}

#[test]
fn others_stand_in_for_exact_hosts_that_are_missing_unless_exactness_is_required() {
    let all = card_between();
    let mixed = [("a", 0, 3), ("card", 4, 11), ("b", 12, 15)];
    assert_eq!(route_by(&asks(Exact::Prefer), &all).unwrap(), mixed);
    assert_eq!(
        route_by(&asks(Exact::Require), &all).unwrap_err(),
        RouteError::ArithmeticMismatch {
            layer: 4,
            wanted: ARITHMETIC.into(),
            found: "torch-cuda-fp16".into(),
        }
    );
    // A layer without any host is reported as missing.
    let hole = [other("card", 0, 3, 0), shard("b", 8, 15, 0)];
    let error = route_by(&asks(Exact::Require), &hole[1..]).unwrap_err();
    assert!(matches!(error, RouteError::Uncovered { layer: 0, .. }));
    let error = route_by(&asks(Exact::Prefer), &hole).unwrap_err();
    assert!(matches!(error, RouteError::Uncovered { layer: 4, .. }));
}

#[test]
fn more_hops_than_allowed_are_no_reason_to_do_without_an_answer() {
    let mut all = vec![other("card", 0, 15, 0)];
    all.extend((0..16).map(|layer| shard(&format!("h{layer}"), layer, layer, 0)));
    let ask = |exact| RouteRequest {
        max_shards: 4,
        ..asks(exact)
    };
    let route = route_by(&ask(Exact::Prefer), &all).unwrap();
    assert!(route.len() <= 4, "{route:?}");
    let error = route_by(&ask(Exact::Require), &all).unwrap_err();
    assert_eq!(error, RouteError::TooManyShards { max: 4 });
}

#[test]
fn an_exact_host_that_has_failed_comes_after_another_that_has_not() {
    let mut failed = shard("failed", 0, 15, 0);
    failed.standing = Standing::Failing;
    let all = [failed, other("card", 0, 15, 3)];
    let route = route_by(&asks(Exact::Prefer), &all).unwrap();
    assert_eq!(route, [("card", 0, 15)]);
    let route = route_by(&asks(Exact::Require), &all).unwrap();
    assert_eq!(route, [("failed", 0, 15)]);
}

#[test]
fn a_replacement_has_the_same_arithmetic_unless_any_is_allowed() {
    let all = [shard("a", 0, 15, 0), other("card", 0, 15, 9)];
    let ask = |exact: Exact, before| RouteRequest {
        arithmetic: exact.allows(Some(before)),
        ..ask()
    };
    let card = route_by(&ask(Exact::Prefer, "torch-cuda-fp16"), &all).unwrap();
    assert_eq!(card, [("card", 0, 15)]);
    let error = route_by(&ask(Exact::Prefer, "torch-cuda-fp16"), &all[..1]);
    assert!(matches!(error, Err(RouteError::ArithmeticMismatch { .. })));
    let any = route_by(&ask(Exact::Any, "torch-cuda-fp16"), &all).unwrap();
    assert_eq!(any, [("a", 0, 15)]);
}

#[test]
fn the_least_loaded_shard_wins_even_when_it_reaches_less_far() {
    let all = [
        shard("a", 0, 15, 3),
        shard("b", 0, 7, 0),
        shard("c", 6, 15, 1),
    ];
    assert_eq!(route(&all), [("b", 0, 7), ("c", 8, 15)]);
}

#[test]
fn an_overlapping_shard_runs_only_the_layers_that_are_still_missing() {
    let all = [shard("a", 0, 9, 0), shard("b", 4, 15, 0)];
    assert_eq!(route(&all), [("a", 0, 9), ("b", 10, 15)]);
}

#[test]
fn a_hole_is_reported_with_its_first_layer() {
    let all = [shard("a", 0, 7, 0), shard("b", 9, 15, 0)];
    assert_eq!(
        route_by(&ask(), &all).unwrap_err(),
        RouteError::Uncovered {
            layer: 8,
            model_id: "m".into()
        }
    );
}

#[test]
fn hosts_with_another_data_type_are_told_apart_from_no_hosts() {
    let mut other = shard("a", 0, 15, 0);
    other.descriptor.boundary_dtype = "fp32".into();
    // The data type is part of the manifest, so the weights id differs as well.
    other.descriptor.weights_sha256 = "12".repeat(32);
    let error = route_by(&ask(), &[other.clone()]).unwrap_err();
    assert!(
        matches!(error, RouteError::DtypeMismatch { layer: 0, .. }),
        "{error:?}"
    );
    let said = error.to_string();
    assert!(said.contains("fp32") && said.contains("fp16"), "{said}");
    // A missing layer is reported as such, whatever the other layers' hosts use.
    let error = route_by(&ask(), &[shard("b", 0, 7, 0)]).unwrap_err();
    assert!(
        matches!(error, RouteError::Uncovered { layer: 8, .. }),
        "{error:?}"
    );
    assert!(route_by(&ask(), &[other, shard("c", 0, 15, 0)]).is_ok());
}

#[test]
fn other_weights_are_told_apart_from_no_shards() {
    let weights = "cd".repeat(32);
    let ask = RouteRequest {
        weights_sha256: &weights,
        ..ask()
    };
    let all = [shard("a", 0, 15, 0)];
    assert!(matches!(
        route_by(&ask, &all).unwrap_err(),
        RouteError::WeightsMismatch { .. }
    ));
    assert!(matches!(
        route_by(&ask, &[]).unwrap_err(),
        RouteError::Uncovered { layer: 0, .. }
    ));
}

#[test]
fn an_excluded_host_is_replaced_or_missed() {
    let exclude = BTreeSet::from([node("a")]);
    let ask = RouteRequest {
        exclude: &exclude,
        ..ask()
    };
    let two = [shard("a", 0, 15, 0), shard("b", 0, 15, 9)];
    assert_eq!(route_by(&ask, &two).unwrap(), [("b", 0, 15)]);
    assert!(route_by(&ask, &two[..1]).is_err());
}

#[test]
fn the_own_node_serves_only_when_allowed_and_not_first_if_another_is_as_good() {
    let mut own = shard("self", 0, 15, 0);
    own.is_self = true;
    let mut all = [own, shard("b", 0, 7, 0)];
    assert!(matches!(
        route_by(&ask(), &all).unwrap_err(),
        RouteError::Uncovered { layer: 8, .. }
    ));
    let ask = RouteRequest {
        allow_self: true,
        ..ask()
    };
    assert_eq!(
        route_by(&ask, &all).unwrap(),
        [("b", 0, 7), ("self", 8, 15)]
    );
    // A busy or more distant host is worse.
    all[1].descriptor.queue_depth = 5;
    assert_eq!(route_by(&ask, &all).unwrap(), [("self", 0, 15)]);
    (all[1].descriptor.queue_depth, all[1].hop_weight) = (0, 1);
    assert_eq!(route_by(&ask, &all).unwrap(), [("self", 0, 15)]);
}

#[test]
fn a_cover_within_the_limit_is_found_when_the_idle_one_is_too_long() {
    let mut all: Vec<_> = (0..16)
        .map(|i| shard(&format!("s{i:02}"), i, i, 0))
        .collect();
    all.push(shard("wide", 0, 15, 7));
    let ask = RouteRequest {
        max_shards: 4,
        ..ask()
    };
    assert_eq!(route_by(&ask, &all).unwrap(), [("wide", 0, 15)]);
    assert_eq!(
        route_by(&ask, &all[..16]).unwrap_err(),
        RouteError::TooManyShards { max: 4 }
    );
}

/// Host of the whole model with measurements.
pub(super) fn seen(
    host: &str,
    queue: u32,
    standing: Standing,
    ms_per_layer: Option<f64>,
) -> Candidate {
    Candidate {
        standing,
        ms_per_layer,
        seen_layers: 16,
        ..shard(host, 0, 15, queue)
    }
}

#[test]
fn a_false_accuser_comes_last_among_hosts_of_equal_standing() {
    let (good, failing) = (Standing::Good, Standing::Failing);
    let accuser = |standing| Candidate {
        is_false_accuser: true,
        ..seen("accuser", 0, standing, Some(0.1))
    };
    // Neither its speed nor the other's queue counts.
    let slow = seen("slow", 9, good, Some(5.0));
    for (all, taken) in [
        (vec![accuser(good), slow.clone()], "slow"),
        (vec![slow, accuser(good)], "slow"),
        (
            vec![accuser(good), seen("failing", 0, failing, None)],
            "accuser",
        ),
        (vec![accuser(good)], "accuser"),
    ] {
        assert_eq!(route(&all), [(taken, 0, 15)]);
    }
}

#[test]
fn a_failing_or_quarantined_host_is_used_if_no_other_has_the_layers() {
    let (good, failing) = (Standing::Good, Standing::Failing);
    let liar = seen("liar", 0, Standing::Quarantined, None);
    let all = [
        liar.clone(),
        seen("failing", 0, failing, None),
        seen("busy", 9, good, None),
    ];
    assert_eq!(route(&all), [("busy", 0, 15)]);
    assert_eq!(route(&all[..2]), [("failing", 0, 15)]);
    assert_eq!(
        route(&[liar.clone(), shard("half", 0, 7, 9)]),
        [("half", 0, 7), ("liar", 8, 15)]
    );
    // Even if the good hosts would exceed the hop limit, if others reach as far.
    let mut all: Vec<_> = (0..16)
        .map(|i| shard(&format!("s{i:02}"), i, i, 0))
        .collect();
    all.extend([liar, shard("wide", 0, 15, 7)]);
    let ask = RouteRequest {
        max_shards: 4,
        ..ask()
    };
    assert_eq!(route_by(&ask, &all).unwrap(), [("wide", 0, 15)]);
    all.pop();
    assert_eq!(route_by(&ask, &all).unwrap(), [("liar", 0, 15)]);
}

#[test]
fn measured_speed_counts_more_than_load_and_any_claim() {
    let good = Standing::Good;
    let claims = |mut c: Candidate, ms_per_token| {
        c.descriptor.ms_per_token = ms_per_token;
        c
    };
    // Idle and slow against busy and fast.
    let slow = claims(seen("slow", 0, good, Some(4.0)), 0.001);
    let fast = claims(seen("fast", 3, good, Some(1.0)), 900.0);
    let all = [slow.clone(), fast.clone()];
    assert_eq!(route(&all), [("fast", 0, 15)]);
    // Slightly slower is equal: the load decides.
    let all = [seen("near", 0, good, Some(1.9)), fast.clone()];
    assert_eq!(route(&all), [("near", 0, 15)]);
    // A fast claim does not beat a fast measurement, ...
    let boasts = claims(shard("boasts", 0, 15, 4), 0.001);
    let all = [boasts, fast.clone()];
    assert_eq!(route(&all), [("fast", 0, 15)]);
    // ... and a slow claim is believed.
    let modest = claims(shard("modest", 0, 15, 0), 16.0 * 2.0);
    let all = [modest, fast];
    assert_eq!(route(&all), [("fast", 0, 15)]);
    // Without measurements, the load decides.
    let all = [
        claims(shard("a", 0, 15, 1), 0.1),
        claims(shard("b", 0, 15, 0), 9e9),
    ];
    assert_eq!(route(&all), [("b", 0, 15)]);
}

#[test]
fn callers_spread_over_equal_hosts_and_each_chooses_the_same_again() {
    let all: Vec<_> = (0..4).map(|n| shard(&format!("h{n}"), 0, 15, 0)).collect();
    let chosen: Vec<&str> = (0..400)
        .map(|_| {
            let ask = ask();
            let route = route_by(&ask, &all).unwrap();
            assert_eq!(route_by(&ask, &all).unwrap(), route);
            route[0].0
        })
        .collect();
    for name in ["h0", "h1", "h2", "h3"] {
        let count = chosen.iter().filter(|host| **host == name).count();
        assert!((50..150).contains(&count), "{name}: {count}");
    }
}

#[test]
fn ten_thousand_descriptors_are_cut_to_a_bounded_number() {
    let ask = ask();
    let count = |all: &[Candidate]| usable(&ask, all).0.len();
    assert_eq!(count(&vec![shard("x", 3, 4, 0); 10_000]), MAX_OF_HOST);
    let all: Vec<_> = (0..10_000)
        .map(|n| shard(&format!("h{n}"), 3, 4, 0))
        .collect();
    assert_eq!(count(&all), MAX_CANDIDATES);
}

#[test]
fn a_flood_of_one_members_descriptors_leaves_the_others_theirs() {
    let mut all = vec![shard("flood", 3, 4, 0); 10_000];
    all.push(shard("late", 0, 15, 9));
    assert_eq!(route(&all), [("late", 0, 15)]);
    // Of a host with five advertised ranges, the latest count.
    let moved = |n: u32| {
        let mut one = shard("moves", n, 15, 0);
        one.descriptor.advertised_at = n.into();
        one
    };
    let all: Vec<_> = [9, 3, 0, 1, 2, 4].map(moved).to_vec();
    assert!(route_by(&ask(), &all).is_err());
}

/// Routes several chats in a row over these hosts; returns the number of chats per host.
fn drawn(hosts: &mut [Candidate], chats: u32) -> Vec<u32> {
    let ask = ask();
    let before: Vec<u32> = hosts.iter().map(|host| host.streams).collect();
    for _ in 0..chats {
        for span in greedy(&ask, hosts).unwrap() {
            hosts[span.candidate].streams += 1;
        }
    }
    let all = hosts.iter().zip(before);
    all.map(|(host, before)| host.streams - before).collect()
}

#[test]
fn no_claim_draws_more_than_a_share_of_the_chats() {
    // Idle with all layers, beside honest busy hosts with halves of the model.
    let mut hosts = vec![shard("claims", 0, 15, 0)];
    hosts.extend((0..4).map(|n| shard(&format!("honest {n}"), 0, 15, 3)));
    let of_five = drawn(&mut hosts.clone(), 5)[0];
    assert!(of_five <= 2, "{of_five} of 5");
    let of_forty = drawn(&mut hosts, 40)[0];
    assert!(of_forty <= 17, "{of_forty} of 40");
    let halves = [shard("first", 0, 7, 1), shard("second", 8, 15, 1)];
    let mut hosts = [&[shard("claims", 0, 15, 0)][..], &halves].concat();
    let of_forty = drawn(&mut hosts, 40)[0];
    assert!((19..=22).contains(&of_forty), "{of_forty} of 40");
}

#[test]
fn a_share_never_sends_a_chat_to_a_host_that_was_measured_to_be_slow_or_failed() {
    let good = Standing::Good;
    for other in [
        seen("slow", 0, good, Some(9.0)),
        seen("failing", 0, Standing::Failing, None),
    ] {
        let mut hosts = [seen("fast", 3, good, Some(1.0)), other];
        assert_eq!(drawn(&mut hosts, 20), [20, 0]);
    }
    // The caller's own layers have no limit.
    let mut own = shard("own", 0, 15, 0);
    own.is_self = true;
    let ask = RouteRequest {
        allow_self: true,
        ..ask()
    };
    own.streams = 20;
    let all = [own, shard("other", 0, 15, 1)];
    assert_eq!(route_by(&ask, &all).unwrap(), [("own", 0, 15)]);
}

proptest! {
    #[test]
    fn a_route_covers_every_layer_exactly_once_and_exists_whenever_all_are_held(
        ranges in proptest::collection::vec((0u32..16, 0u32..16, 0u32..4), 0..12)
    ) {
        let all: Vec<_> = ranges
            .iter()
            .enumerate()
            .map(|(i, &(a, b, q))| shard(&format!("h{i}"), a.min(b), a.max(b), q))
            .collect();
        let held = (0..16).all(|l| all.iter().any(|c| {
            c.descriptor.layer_range.0 <= l && l <= c.descriptor.layer_range.1
        }));
        match route_by(&ask(), &all) {
            Ok(route) => {
                prop_assert!(held);
                let layers: Vec<u32> = route.iter().flat_map(|(_, lo, hi)| *lo..=*hi).collect();
                prop_assert_eq!(layers, (0..16).collect::<Vec<_>>());
            }
            Err(e) => prop_assert!(!held, "{}", e),
        }
    }
}
