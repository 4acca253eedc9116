//! Router: selects hosts that together cover a range of layers.
//!
//! Pure: no clock, no network. [`pick`] filters the advertised candidates and covers the layers
//! with spans of them (`cover.rs`).
//!
//! # Worked example
//! A model of 16 layers, shards `0-7`, `4-11`, `8-15`, all idle. The cursor
//! stands at layer 0: only `0-7` has it. The cursor moves to 8: `4-11` and
//! `8-15` both have it, both are idle and on the same LAN, and `8-15` reaches
//! further. The cover is `{0-7, 8-15}`; `4-11` stays unused.

mod cover;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::RangeInclusive;

use hearthnet_bus::{Descriptor, NodeId};

use self::cover::{Usable, cover};
use crate::exact::{Allowed, is_exact};
use crate::health::Standing;

/// Maximum number of candidates per decision; a community has tens of hosts. It bounds the work
/// under a flood of descriptors. Measured hosts are kept first, then hosts by the caller's secret
/// tie-break, so that no claim and no choice of a name helps.
pub const MAX_CANDIDATES: usize = 4096;

/// Maximum number of candidates of one host, latest first: it serves one range and rarely changes
/// it.
pub const MAX_OF_HOST: usize = 4;

/// Host that may take part.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Validated descriptor.
    pub descriptor: Descriptor,
    /// Distance to the host: 0 in this process, 1 on the same LAN, 2 beyond.
    pub hop_weight: u32,
    pub is_self: bool,
    /// Rating by the caller, over all its calls.
    pub standing: Standing,
    /// Measured round trip of a decode step through one layer, in milliseconds; `None` without
    /// recent measurements.
    pub ms_per_layer: Option<f64>,
    /// Number of recent streams that this caller gave it.
    pub streams: u32,
}

impl Candidate {
    /// Candidate without any measurements.
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

    fn is_exact(&self) -> bool {
        is_exact(&self.descriptor.arithmetic)
    }
}

/// Contiguous layers on one candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into the given candidates.
    pub candidate: usize,
    /// First layer.
    pub lo: u32,
    /// Last layer.
    pub hi: u32,
}

/// Requirements of a route.
#[derive(Debug, Clone)]
pub struct RouteRequest<'a> {
    pub model_id: &'a str,
    /// Identity of the required weights, 64 hex digits.
    pub weights_sha256: &'a str,
    /// Required data type of the residual stream.
    pub boundary_dtype: &'a str,
    /// Allowed arithmetics.
    pub arithmetic: Allowed<'a>,
    /// Layers to cover: `0..=n-1` for a whole pipeline, one span for a replacement.
    pub layers: RangeInclusive<u32>,
    /// Number of layers of the whole model.
    pub total_layers: u32,
    /// Maximum number of spans.
    pub max_shards: usize,
    /// True if the caller's own node may serve; as first shard only if no other is as good.
    pub allow_self: bool,
    pub exclude: &'a BTreeSet<NodeId>,
    /// Secret key of the tie-break. Callers thus prefer different ones of otherwise equal hosts,
    /// and no host can choose a node id that comes first.
    pub tie_breaker: &'a RandomState,
}

/// Reason that no route exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No usable shard holds this layer.
    #[error("no shard covers layer {layer} of {model_id}")]
    Uncovered {
        /// First layer without a shard.
        layer: u32,
        model_id: String,
    },
    /// All shards of this model hold other weights.
    #[error("the shards on offer hold weights {found}, this chat needs {wanted}")]
    WeightsMismatch {
        wanted: String,
        /// Identity that a shard advertises.
        found: String,
    },
    /// All shards with the layers compute with another arithmetic.
    #[error(
        "the hosts of layer {layer} compute with {found}, but this chat needs {wanted}: its answer \
         would differ"
    )]
    ArithmeticMismatch {
        /// First layer without a usable shard.
        layer: u32,
        wanted: String,
        /// Arithmetic that a shard advertises.
        found: String,
    },
    /// All shards with the layers use another data type for rows.
    #[error("the hosts of layer {layer} pass rows on as {found}, and this chat needs {wanted}")]
    DtypeMismatch {
        /// First layer without a usable shard.
        layer: u32,
        wanted: String,
        /// Data type that a shard advertises.
        found: String,
    },
    /// The cover takes more spans than allowed.
    #[error("covering the model takes more than {max} shards")]
    TooManyShards { max: usize },
}

/// Covers the requested layers with usable candidates.
///
/// # Errors
/// Any [`RouteError`].
pub fn pick(request: &RouteRequest<'_>, candidates: &[Candidate]) -> Result<Vec<Span>, RouteError> {
    let Usables {
        usable,
        other_weights,
        other_dtypes,
    } = usable(request, candidates);
    let may = |c: &Candidate| request.arithmetic.admits(&c.descriptor.arithmetic);
    let (usable, others): (Vec<_>, Vec<_>) = usable.into_iter().partition(|(_, c)| may(c));
    let covered = match request.arithmetic {
        Allowed::ExactFirst => {
            // A recently failed host is used only for layers without another host.
            let first = |c: &Candidate| c.is_exact() && c.standing == Standing::Good;
            let exact = usable.iter().filter(|(_, c)| first(c)).copied();
            let exact: Vec<Usable<'_>> = exact.collect();
            cover(request, &exact).or_else(|_| cover(request, &usable))
        }
        Allowed::Only(_) | Allowed::All => cover(request, &usable),
    };
    let Err(RouteError::Uncovered { layer, .. }) = covered else {
        return covered;
    };
    if let (Allowed::Only(wanted), Some((_, other))) = (
        request.arithmetic,
        others.iter().find(|(_, c)| c.holds(layer)),
    ) {
        return Err(RouteError::ArithmeticMismatch {
            layer,
            wanted: wanted.to_owned(),
            found: other.descriptor.arithmetic.clone(),
        });
    }
    if let Some(other) = other_dtypes.iter().find(|c| c.holds(layer)) {
        return Err(RouteError::DtypeMismatch {
            layer,
            wanted: request.boundary_dtype.to_owned(),
            found: other.descriptor.boundary_dtype.clone(),
        });
    }
    match other_weights {
        Some(found) => Err(RouteError::WeightsMismatch {
            wanted: request.weights_sha256.to_owned(),
            found,
        }),
        None => covered,
    }
}

/// Usable candidates, and reasons for rejecting others.
struct Usables<'a> {
    /// At most [`MAX_CANDIDATES`].
    usable: Vec<Usable<'a>>,
    /// Weights of other candidates with the same model id.
    other_weights: Option<String>,
    /// Candidates with the right weights and another data type; at most [`MAX_CANDIDATES`].
    other_dtypes: Vec<&'a Candidate>,
}

fn usable<'a>(request: &RouteRequest<'_>, candidates: &'a [Candidate]) -> Usables<'a> {
    let (mut usable, mut other_weights, mut other_dtypes) = (Vec::new(), None, Vec::new());
    let mut of_host: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (index, candidate) in in_order(request.tie_breaker, candidates) {
        let d = &candidate.descriptor;
        let taken = of_host.entry(d.host).or_default();
        if *taken == MAX_OF_HOST || usable.len() == MAX_CANDIDATES {
            continue;
        }
        if request.exclude.contains(&d.host)
            || (candidate.is_self && !request.allow_self)
            || d.total_layers != request.total_layers
        {
            continue;
        }
        if d.boundary_dtype != request.boundary_dtype {
            if d.weights_sha256 == request.weights_sha256 && other_dtypes.len() < MAX_CANDIDATES {
                other_dtypes.push(candidate);
            }
        } else if d.weights_sha256 == request.weights_sha256 {
            usable.push((index, candidate));
            *taken += 1;
        } else if d.model_id == request.model_id {
            other_weights = Some(d.weights_sha256.clone());
        }
    }
    Usables {
        usable,
        other_weights,
        other_dtypes,
    }
}

/// Order in which candidates are considered: measured ones first, then by tie-break; the latest
/// advertisement of a host first.
fn in_order<'a>(
    tie_breaker: &RandomState,
    candidates: &'a [Candidate],
) -> impl Iterator<Item = (usize, &'a Candidate)> {
    let mut all: Vec<_> = candidates.iter().enumerate().collect();
    all.sort_by_cached_key(|(_, c)| {
        let d = &c.descriptor;
        let tie = tie_breaker.hash_one(d.host);
        (c.ms_per_layer.is_none(), tie, Reverse(d.advertised_at))
    });
    all.into_iter()
}

#[cfg(test)]
mod tests;
