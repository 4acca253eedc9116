//! Which hosts run which layers: descriptors in, a covering set of spans out.
//!
//! Pure: no clock, no network. A [`RoutingPolicy`] covers a range of layers with
//! spans of candidates; [`pick`] filters what the community advertises down to
//! the candidates that may be used at all, asks the policy, and checks what it
//! answered, so that a research policy cannot produce a broken pipeline.
//!
//! # Worked example (M26 section 8.1)
//! A model of 16 layers, shards `0-7`, `4-11`, `8-15`, all idle. The cursor
//! stands at layer 0: only `0-7` has it. The cursor moves to 8: `4-11` and
//! `8-15` both have it, both are idle and on the same LAN, and `8-15` reaches
//! further. The cover is `{0-7, 8-15}`; `4-11` stays unused.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::RangeInclusive;

use hearthnet_bus::{Descriptor, NodeId};

use crate::health::Standing;

/// Most candidates a routing decision looks at. A community has tens of hosts. The bound keeps a flood
/// of descriptors from turning into a flood of work; whom it leaves out, no claim and no choice of a
/// name decides: those that were not measured, and of these whom the caller's own lot puts last.
pub const MAX_CANDIDATES: usize = 4096;

/// Most candidates of one host, the latest ones: it serves one range, and moves now and then.
pub const MAX_OF_HOST: usize = 4;

/// Streams that a host may be given whatever its share: a caller's first chats tell nothing yet.
const FREE_STREAMS: u32 = 2;

/// One host that may take part, as the caller sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// What the host says, already validated.
    pub descriptor: Descriptor,
    /// Distance to the host: 0 within this process, more on the same LAN, more still beyond.
    pub hop_weight: u32,
    /// Whether the host is the caller's own node.
    pub is_self: bool,
    /// What the caller has seen of it, in other calls as well.
    pub standing: Standing,
    /// Its round trip of a decode step through one layer, as the caller has measured it, in
    /// milliseconds; `None`: not measured of late.
    pub ms_per_layer: Option<f64>,
    /// Streams that it was given of late, by this caller.
    pub streams: u32,
}

impl Candidate {
    /// A host that nothing is known of but what it says.
    pub fn new(descriptor: Descriptor, hop_weight: u32, is_self: bool) -> Self {
        Self {
            descriptor,
            hop_weight,
            is_self,
            standing: Standing::Good,
            ms_per_layer: None,
            streams: 0,
        }
    }

    fn holds(&self, layer: u32) -> bool {
        let (lo, hi) = self.descriptor.layer_range;
        lo <= layer && layer <= hi
    }
}

/// A contiguous piece of the model on one candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into the candidates that were given.
    pub candidate: usize,
    /// First layer that this span runs.
    pub lo: u32,
    /// Last layer that this span runs.
    pub hi: u32,
}

/// What is wanted of a route.
#[derive(Debug, Clone)]
pub struct RouteRequest<'a> {
    /// Model that the caller asks for.
    pub model_id: &'a str,
    /// Identity of the weights that every shard must hold, 64 hex digits.
    pub weights_sha256: &'a str,
    /// Data type of the residual stream that every shard must speak.
    pub boundary_dtype: &'a str,
    /// Layers to cover; `0..=n-1` for a whole pipeline, one span for a repick.
    pub layers: RangeInclusive<u32>,
    /// Layers of the whole model.
    pub total_layers: u32,
    /// Most spans allowed.
    pub max_shards: usize,
    /// Whether the caller's own node may serve, as the first shard only if no other is as good.
    pub allow_self: bool,
    /// Hosts that must not be used.
    pub exclude: &'a BTreeSet<NodeId>,
    /// The caller's lots: of hosts that are equal otherwise, callers prefer different ones. A secret, so
    /// that nobody can choose a name that comes first.
    pub lots: &'a RandomState,
}

/// Why no route exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No usable shard holds this layer.
    #[error("no shard covers layer {layer} of {model_id}")]
    Uncovered {
        /// First layer without a shard.
        layer: u32,
        /// The model.
        model_id: String,
    },
    /// Shards of this model exist, but all of them hold other weights.
    #[error("the shards on offer hold weights {found}, this chat needs {wanted}")]
    WeightsMismatch {
        /// Identity asked for.
        wanted: String,
        /// An identity on offer.
        found: String,
    },
    /// Covering the model takes more spans than allowed.
    #[error("covering the model takes more than {max} shards")]
    TooManyShards {
        /// The limit in force.
        max: usize,
    },
    /// A routing policy returned spans that do not cover the range exactly.
    #[error("the routing policy {policy} returned a broken cover")]
    BrokenPolicy {
        /// Name of the policy.
        policy: &'static str,
    },
}

/// Chooses spans. Implementations see only candidates that may be used.
pub trait RoutingPolicy: Send + Sync {
    /// Name as it stands in the configuration and in traces.
    fn name(&self) -> &'static str;

    /// Covers `layers` completely, in order and without overlap.
    ///
    /// `usable` holds indices into `candidates`.
    ///
    /// # Errors
    /// [`RouteError::Uncovered`] or [`RouteError::TooManyShards`].
    fn cover(
        &self,
        request: &RouteRequest<'_>,
        candidates: &[Candidate],
        usable: &[usize],
    ) -> Result<Vec<Span>, RouteError>;
}

/// M26 section 5.2: from the first layer on, take the least loaded shard that has the next layer.
///
/// What the caller has seen counts more than what hosts say: whoever failed of late comes after
/// all others, whoever returned impossible numbers comes last, and of the rest those that were
/// measured to be twice as slow as the fastest, or worse, come later. Of those that are equal in this,
/// whoever has had more than its share of the caller's streams comes later, whatever it claims. Only
/// then does the load decide that they claim, then the distance, then who reaches
/// furthest; and last a lot that is different for each caller, so that callers spread.
#[derive(Debug, Default, Clone, Copy)]
pub struct GreedyCover;

impl RoutingPolicy for GreedyCover {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn cover(
        &self,
        request: &RouteRequest<'_>,
        candidates: &[Candidate],
        usable: &[usize],
    ) -> Result<Vec<Span>, RouteError> {
        let by_load = |c: &Candidate, beside: &Beside| {
            let (depth, distance) = (c.descriptor.queue_depth, c.hop_weight);
            let slowness = slowness(c, beside.fastest);
            (c.standing, slowness, beside.is_over(c), depth, distance)
        };
        let by_standing = |c: &Candidate, _: &Beside| (c.standing, 0, false, 0, 0);
        let by_reach = |_: &Candidate, _: &Beside| (Standing::Good, 0, false, 0, 0);
        // Least load first can take more hops than allowed where fewer would do:
        // longest reach first is the cover with the fewest hops.
        let tries: [&CostOf; 3] = [&by_load, &by_standing, &by_reach];
        let mut cover = Err(RouteError::TooManyShards {
            max: request.max_shards,
        });
        for cost in tries {
            cover = walk(request, candidates, usable, cost);
            if !matches!(cover, Err(RouteError::TooManyShards { .. })) {
                break;
            }
        }
        cover
    }
}

/// What speaks against a candidate, before its reach: the most important first.
type Cost = (Standing, u32, bool, u32, u32);

/// What speaks against a candidate, beside others.
type CostOf = dyn Fn(&Candidate, &Beside) -> Cost;

/// Those that a candidate stands beside.
struct Beside {
    /// The least time per layer that was measured of any of the route's candidates.
    fastest: Option<f64>,
    /// Hosts of the layer in question, and the streams that they were given of late.
    hosts: u32,
    streams: u32,
}

impl Beside {
    /// Whether a host has had more than its share, were it given one more stream: half of all, or twice
    /// what would be its own if all were given alike, whichever is less. A claim costs nothing, and
    /// whoever draws all chats by it reads them all. The caller's own layers are not bounded.
    fn is_over(&self, candidate: &Candidate) -> bool {
        let (own, all) = (
            u64::from(candidate.streams) + 1,
            u64::from(self.streams) + 1,
        );
        let is_free = candidate.is_self || candidate.streams < FREE_STREAMS;
        !is_free && own * u64::from(self.hosts.max(4)) > 2 * all
    }
}

/// How often a host's time per layer is twice that of the `fastest` that was measured. What
/// a host says of itself counts where nothing was measured, and never makes it faster than those
/// that were.
fn slowness(candidate: &Candidate, fastest: Option<f64>) -> u32 {
    let Some(fastest) = fastest else { return 0 };
    let (lo, hi) = candidate.descriptor.layer_range;
    let layers = hi.saturating_sub(lo).saturating_add(1);
    let claimed = f64::from(candidate.descriptor.ms_per_token) / f64::from(layers);
    let takes = candidate.ms_per_layer.unwrap_or(claimed);
    // A microsecond per layer is beyond what any machine needs to be told apart by.
    let mut bound = fastest.max(0.001) * 2.0;
    let mut times = 0;
    while takes >= bound && times < 16 {
        (times, bound) = (times + 1, bound * 2.0);
    }
    times
}

/// Moves a cursor over the layers, taking the best shard at each stop.
fn walk(
    request: &RouteRequest<'_>,
    candidates: &[Candidate],
    usable: &[usize],
    cost: &CostOf,
) -> Result<Vec<Span>, RouteError> {
    let (first, last) = (*request.layers.start(), *request.layers.end());
    // Of all layers: they are much alike, and of those at hand perhaps none was measured.
    let all = usable.iter().filter_map(|&i| Some((i, candidates.get(i)?)));
    let measured = all.clone().filter_map(|(_, c)| c.ms_per_layer);
    let fastest = measured.min_by(f64::total_cmp);
    let mut spans: Vec<Span> = Vec::new();
    let mut cursor = first;
    loop {
        let here = all.clone().filter(|(_, c)| c.holds(cursor));
        let given: BTreeMap<NodeId, u32> = here
            .clone()
            .map(|(_, c)| (c.descriptor.host, c.streams))
            .collect();
        let beside = Beside {
            fastest,
            hosts: u32::try_from(given.len()).unwrap_or(u32::MAX),
            streams: given.values().sum(),
        };
        let best = here.min_by_key(|(_, c)| {
            let own_first = c.is_self && cursor == 0;
            let reach = c.descriptor.layer_range.1.min(last);
            let host = c.descriptor.host;
            let lot = request.lots.hash_one(host);
            (cost(c, &beside), own_first, Reverse(reach), lot, host)
        });
        let Some((index, candidate)) = best else {
            return Err(RouteError::Uncovered {
                layer: cursor,
                model_id: request.model_id.to_owned(),
            });
        };
        if spans.len() == request.max_shards {
            return Err(RouteError::TooManyShards {
                max: request.max_shards,
            });
        }
        let hi = candidate.descriptor.layer_range.1.min(last);
        spans.push(Span {
            candidate: index,
            lo: cursor,
            hi,
        });
        if hi == last {
            return Ok(spans);
        }
        cursor = hi + 1;
    }
}

/// Filters the candidates, asks the policy, and checks its answer.
///
/// # Errors
/// Any [`RouteError`].
pub fn pick(
    policy: &dyn RoutingPolicy,
    request: &RouteRequest<'_>,
    candidates: &[Candidate],
) -> Result<Vec<Span>, RouteError> {
    let (mut usable, mut other_weights) = (Vec::new(), None);
    let mut of_host: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (index, candidate) in in_order(request.lots, candidates) {
        let d = &candidate.descriptor;
        let taken = of_host.entry(d.host).or_default();
        if *taken == MAX_OF_HOST || usable.len() == MAX_CANDIDATES {
            continue;
        }
        if request.exclude.contains(&d.host)
            || (candidate.is_self && !request.allow_self)
            || d.total_layers != request.total_layers
            || d.boundary_dtype != request.boundary_dtype
        {
            continue;
        }
        if d.weights_sha256 == request.weights_sha256 {
            usable.push(index);
            *taken += 1;
        } else if d.model_id == request.model_id {
            other_weights = Some(d.weights_sha256.clone());
        }
    }
    let spans = match (policy.cover(request, candidates, &usable), other_weights) {
        (Err(RouteError::Uncovered { .. }), Some(found)) => {
            return Err(RouteError::WeightsMismatch {
                wanted: request.weights_sha256.to_owned(),
                found,
            });
        }
        (spans, _) => spans?,
    };
    let mut next = *request.layers.start();
    for span in &spans {
        let holds = usable.contains(&span.candidate)
            && candidates
                .get(span.candidate)
                .is_some_and(|c| c.holds(span.lo) && c.holds(span.hi));
        if !holds || span.lo != next || span.hi < span.lo {
            return Err(RouteError::BrokenPolicy {
                policy: policy.name(),
            });
        }
        next = span.hi + 1;
    }
    if next != *request.layers.end() + 1 || spans.len() > request.max_shards {
        return Err(RouteError::BrokenPolicy {
            policy: policy.name(),
        });
    }
    Ok(spans)
}

/// Candidates in the order in which they are looked at: those that were measured first, the others as
/// the caller's lots have them, and of one host the latest first.
fn in_order<'a>(
    lots: &RandomState,
    candidates: &'a [Candidate],
) -> impl Iterator<Item = (usize, &'a Candidate)> {
    let mut all: Vec<_> = candidates.iter().enumerate().collect();
    all.sort_by_cached_key(|(_, c)| {
        let d = &c.descriptor;
        let lot = lots.hash_one(d.host);
        (c.ms_per_layer.is_none(), lot, Reverse(d.advertised_at))
    });
    all.into_iter()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::node;

    fn shard(host: &str, lo: u32, hi: u32, queue: u32) -> Candidate {
        Candidate {
            descriptor: Descriptor {
                shard_id: Descriptor::shard_id("m", lo, hi),
                model_id: "m".into(),
                weights_sha256: "ab".repeat(32),
                layer_range: (lo, hi),
                total_layers: 16,
                vram_required_mb: 1,
                weights_mb: 0,
                kv_mb: 0,
                max_concurrent_streams: 4,
                host: node(host),
                endpoint: "127.0.0.1:1".into(),
                advertised_at: 0,
                boundary_dtype: "fp16".into(),
                arithmetic: "canonical-1".into(),
                ms_per_token: 0.0,
                queue_depth: queue,
                software: "test".into(),
            },
            hop_weight: 0,
            is_self: false,
            standing: Standing::Good,
            ms_per_layer: None,
            streams: 0,
        }
    }

    struct Ask {
        exclude: BTreeSet<NodeId>,
        weights: String,
        max: usize,
        allow_self: bool,
        lots: RandomState,
    }

    impl Default for Ask {
        fn default() -> Self {
            Self {
                exclude: BTreeSet::new(),
                weights: "ab".repeat(32),
                max: 16,
                allow_self: false,
                lots: RandomState::new(),
            }
        }
    }

    impl Ask {
        fn route(&self, candidates: &[Candidate]) -> Result<Vec<(NodeId, u32, u32)>, RouteError> {
            let request = RouteRequest {
                model_id: "m",
                weights_sha256: &self.weights,
                boundary_dtype: "fp16",
                layers: 0..=15,
                total_layers: 16,
                max_shards: self.max,
                allow_self: self.allow_self,
                exclude: &self.exclude,
                lots: &self.lots,
            };
            let spans = pick(&GreedyCover, &request, candidates)?;
            Ok(spans
                .iter()
                .map(|s| (candidates[s.candidate].descriptor.host, s.lo, s.hi))
                .collect())
        }
    }

    fn spans(list: &[(&str, u32, u32)]) -> Vec<(NodeId, u32, u32)> {
        list.iter().map(|&(h, lo, hi)| (node(h), lo, hi)).collect()
    }

    #[test]
    fn the_worked_example_of_the_specification_holds() {
        let all = [
            shard("a", 0, 7, 0),
            shard("b", 4, 11, 0),
            shard("c", 8, 15, 0),
        ];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("a", 0, 7), ("c", 8, 15)])
        );
    }

    #[test]
    fn the_least_loaded_shard_wins_even_when_it_reaches_less_far() {
        let all = [
            shard("a", 0, 15, 3),
            shard("b", 0, 7, 0),
            shard("c", 6, 15, 1),
        ];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("b", 0, 7), ("c", 8, 15)])
        );
    }

    #[test]
    fn an_overlapping_shard_runs_only_the_layers_that_are_still_missing() {
        let all = [shard("a", 0, 9, 0), shard("b", 4, 15, 0)];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("a", 0, 9), ("b", 10, 15)])
        );
    }

    #[test]
    fn a_hole_is_reported_with_its_first_layer() {
        let all = [shard("a", 0, 7, 0), shard("b", 9, 15, 0)];
        assert_eq!(
            Ask::default().route(&all).unwrap_err(),
            RouteError::Uncovered {
                layer: 8,
                model_id: "m".into()
            }
        );
    }

    #[test]
    fn other_weights_are_told_apart_from_no_shards() {
        let ask = Ask {
            weights: "cd".repeat(32),
            ..Ask::default()
        };
        let all = [shard("a", 0, 15, 0)];
        assert!(matches!(
            ask.route(&all).unwrap_err(),
            RouteError::WeightsMismatch { .. }
        ));
        assert!(matches!(
            ask.route(&[]).unwrap_err(),
            RouteError::Uncovered { layer: 0, .. }
        ));
    }

    #[test]
    fn an_excluded_host_is_replaced_or_missed() {
        let ask = Ask {
            exclude: BTreeSet::from([node("a")]),
            ..Ask::default()
        };
        let two = [shard("a", 0, 15, 0), shard("b", 0, 15, 9)];
        assert_eq!(ask.route(&two).unwrap(), spans(&[("b", 0, 15)]));
        assert!(ask.route(&two[..1]).is_err());
    }

    #[test]
    fn the_own_node_serves_only_when_allowed_and_not_first_if_another_is_as_good() {
        let mut own = shard("self", 0, 15, 0);
        own.is_self = true;
        let mut all = [own, shard("b", 0, 7, 0)];
        assert!(matches!(
            Ask::default().route(&all).unwrap_err(),
            RouteError::Uncovered { layer: 8, .. }
        ));
        let ask = Ask {
            allow_self: true,
            ..Ask::default()
        };
        assert_eq!(
            ask.route(&all).unwrap(),
            spans(&[("b", 0, 7), ("self", 8, 15)])
        );
        // A busy host, or one that is further away, is not as good.
        all[1].descriptor.queue_depth = 5;
        assert_eq!(ask.route(&all).unwrap(), spans(&[("self", 0, 15)]));
        (all[1].descriptor.queue_depth, all[1].hop_weight) = (0, 1);
        assert_eq!(ask.route(&all).unwrap(), spans(&[("self", 0, 15)]));
    }

    #[test]
    fn a_cover_within_the_limit_is_found_when_the_idle_one_is_too_long() {
        let mut all: Vec<_> = (0..16)
            .map(|i| shard(&format!("s{i:02}"), i, i, 0))
            .collect();
        all.push(shard("wide", 0, 15, 7));
        let ask = Ask {
            max: 4,
            ..Ask::default()
        };
        assert_eq!(ask.route(&all).unwrap(), spans(&[("wide", 0, 15)]));
        assert_eq!(
            ask.route(&all[..16]).unwrap_err(),
            RouteError::TooManyShards { max: 4 }
        );
    }

    /// A host that runs the whole model, with what was seen of it.
    fn seen(host: &str, queue: u32, standing: Standing, ms_per_layer: Option<f64>) -> Candidate {
        Candidate {
            standing,
            ms_per_layer,
            ..shard(host, 0, 15, queue)
        }
    }

    #[test]
    fn a_host_that_failed_or_lied_is_asked_when_nobody_else_has_the_layers() {
        let (good, failing) = (Standing::Good, Standing::Failing);
        let liar = seen("liar", 0, Standing::Quarantined, None);
        let all = [
            liar.clone(),
            seen("failing", 0, failing, None),
            seen("busy", 9, good, None),
        ];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("busy", 0, 15)])
        );
        assert_eq!(
            Ask::default().route(&all[..2]).unwrap(),
            spans(&[("failing", 0, 15)])
        );
        assert_eq!(
            Ask::default()
                .route(&[liar.clone(), shard("half", 0, 7, 9)])
                .unwrap(),
            spans(&[("half", 0, 7), ("liar", 8, 15)])
        );
        // Not even where one good host too many would be needed, if others reach as far.
        let mut all: Vec<_> = (0..16)
            .map(|i| shard(&format!("s{i:02}"), i, i, 0))
            .collect();
        all.extend([liar, shard("wide", 0, 15, 7)]);
        let ask = Ask {
            max: 4,
            ..Ask::default()
        };
        assert_eq!(ask.route(&all).unwrap(), spans(&[("wide", 0, 15)]));
        all.pop();
        assert_eq!(ask.route(&all).unwrap(), spans(&[("liar", 0, 15)]));
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
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("fast", 0, 15)])
        );
        // A little slower is as good: the load decides.
        let all = [seen("near", 0, good, Some(1.9)), fast.clone()];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("near", 0, 15)])
        );
        // Who says to be fast is no better than who was measured to be, ...
        let boasts = claims(shard("boasts", 0, 15, 4), 0.001);
        let all = [boasts, fast.clone()];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("fast", 0, 15)])
        );
        // ... and who says to be slow is believed.
        let modest = claims(shard("modest", 0, 15, 0), 16.0 * 2.0);
        let all = [modest, fast];
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("fast", 0, 15)])
        );
        // Nobody was measured: as before, the load.
        let all = [
            claims(shard("a", 0, 15, 1), 0.1),
            claims(shard("b", 0, 15, 0), 9e9),
        ];
        assert_eq!(Ask::default().route(&all).unwrap(), spans(&[("b", 0, 15)]));
    }

    #[test]
    fn callers_spread_over_equal_hosts_and_each_chooses_the_same_again() {
        let all: Vec<_> = (0..4).map(|n| shard(&format!("h{n}"), 0, 15, 0)).collect();
        let chosen: Vec<NodeId> = (0..400)
            .map(|_| {
                let ask = Ask::default();
                let route = ask.route(&all).unwrap();
                assert_eq!(ask.route(&all).unwrap(), route);
                route[0].0
            })
            .collect();
        for n in 0..4 {
            let count = chosen
                .iter()
                .filter(|host| **host == node(&format!("h{n}")))
                .count();
            assert!((50..150).contains(&count), "h{n}: {count}");
        }
    }

    #[test]
    fn ten_thousand_descriptors_are_cut_to_a_bounded_number() {
        struct Counts;
        impl RoutingPolicy for Counts {
            fn name(&self) -> &'static str {
                "counts"
            }
            fn cover(
                &self,
                _: &RouteRequest<'_>,
                _: &[Candidate],
                usable: &[usize],
            ) -> Result<Vec<Span>, RouteError> {
                Err(RouteError::TooManyShards { max: usable.len() })
            }
        }
        let usable = |candidates: &[Candidate]| {
            let ask = Ask::default();
            let request = RouteRequest {
                model_id: "m",
                weights_sha256: &ask.weights,
                boundary_dtype: "fp16",
                layers: 0..=15,
                total_layers: 16,
                max_shards: ask.max,
                allow_self: false,
                exclude: &ask.exclude,
                lots: &ask.lots,
            };
            match pick(&Counts, &request, candidates) {
                Err(RouteError::TooManyShards { max }) => max,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(usable(&vec![shard("x", 3, 4, 0); 10_000]), MAX_OF_HOST);
        let all: Vec<_> = (0..10_000)
            .map(|n| shard(&format!("h{n}"), 3, 4, 0))
            .collect();
        assert_eq!(usable(&all), MAX_CANDIDATES);
    }

    #[test]
    fn a_flood_of_one_members_descriptors_leaves_the_others_theirs() {
        let mut all = vec![shard("flood", 3, 4, 0); 10_000];
        all.push(shard("late", 0, 15, 9));
        assert_eq!(
            Ask::default().route(&all).unwrap(),
            spans(&[("late", 0, 15)])
        );
        // And of a host that has moved five times the latest range counts.
        let moved = |n: u32| {
            let mut one = shard("moves", n, 15, 0);
            one.descriptor.advertised_at = n.into();
            one
        };
        let all: Vec<_> = [9, 3, 0, 1, 2, 4].map(moved).to_vec();
        assert!(Ask::default().route(&all).is_err());
    }

    /// Routes one chat after the other over these hosts; how many of them each has had.
    fn drawn(hosts: &mut [Candidate], chats: u32) -> Vec<u32> {
        let ask = Ask::default();
        let before: Vec<u32> = hosts.iter().map(|host| host.streams).collect();
        for _ in 0..chats {
            for (host, ..) in ask.route(hosts).unwrap() {
                let chosen = hosts.iter_mut().find(|one| one.descriptor.host == host);
                chosen.unwrap().streams += 1;
            }
        }
        let all = hosts.iter().zip(before);
        all.map(|(host, before)| host.streams - before).collect()
    }

    #[test]
    fn no_claim_draws_more_than_a_share_of_the_chats() {
        // Idle, all layers: beside honest hosts that have something to do, and halves of the model.
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
        // Nor away from the caller's own layers.
        let mut own = shard("own", 0, 15, 0);
        own.is_self = true;
        let ask = Ask {
            allow_self: true,
            ..Ask::default()
        };
        own.streams = 20;
        let all = [own, shard("other", 0, 15, 1)];
        assert_eq!(ask.route(&all).unwrap(), spans(&[("own", 0, 15)]));
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
            match Ask::default().route(&all) {
                Ok(route) => {
                    prop_assert!(held);
                    let layers: Vec<u32> = route.iter().flat_map(|(_, lo, hi)| *lo..=*hi).collect();
                    prop_assert_eq!(layers, (0..16).collect::<Vec<_>>());
                }
                Err(e) => prop_assert!(!held, "{}", e),
            }
        }
    }
}
