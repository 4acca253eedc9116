//! Which hosts run which layers: descriptors in, a covering set of spans out.
//!
//! Pure: no clock, no network. [`pick`] filters what the community advertises down to the candidates
//! that may be used at all, and covers a range of layers with spans of them (`cover.rs`).
//!
//! # Worked example (M26 section 8.1)
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

/// Most candidates a routing decision looks at. A community has tens of hosts. The bound keeps a flood
/// of descriptors from turning into a flood of work; whom it leaves out, no claim and no choice of a
/// name decides: those that were not measured, and of these whom the caller's own lot puts last.
pub const MAX_CANDIDATES: usize = 4096;

/// Most candidates of one host, the latest ones: it serves one range, and moves now and then.
pub const MAX_OF_HOST: usize = 4;

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

    fn is_exact(&self) -> bool {
        is_exact(&self.descriptor.arithmetic)
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
    /// Arithmetics that shards may compute with.
    pub arithmetic: Allowed<'a>,
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
    /// Shards of these weights have the layers, but all of them compute with another arithmetic.
    #[error(
        "the hosts of layer {layer} compute with {found}, and this chat takes {wanted} only: \
         its answer would be another one"
    )]
    ArithmeticMismatch {
        /// First layer without a shard that may be used.
        layer: u32,
        /// Arithmetic asked for.
        wanted: String,
        /// An arithmetic on offer.
        found: String,
    },
    /// Shards of these weights have the layers, but none passes rows on in the data type of this chat.
    #[error("the hosts of layer {layer} pass rows on as {found}, and this chat needs {wanted}")]
    DtypeMismatch {
        /// First layer without a shard that may be used.
        layer: u32,
        /// Data type of this chat's rows.
        wanted: String,
        /// A data type on offer.
        found: String,
    },
    /// Covering the model takes more spans than allowed.
    #[error("covering the model takes more than {max} shards")]
    TooManyShards {
        /// The limit in force.
        max: usize,
    },
}

/// Covers the layers asked for with candidates that may be used.
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
            // Whoever has failed of late covers nothing that somebody else could.
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

/// The candidates that may be used, and what speaks against others.
struct Usables<'a> {
    /// At most [`MAX_CANDIDATES`].
    usable: Vec<Usable<'a>>,
    /// Weights that others hold of a model of that name.
    other_weights: Option<String>,
    /// Candidates that have the weights, and another data type; at most [`MAX_CANDIDATES`].
    other_dtypes: Vec<&'a Candidate>,
}

fn usable<'a>(request: &RouteRequest<'_>, candidates: &'a [Candidate]) -> Usables<'a> {
    let (mut usable, mut other_weights, mut other_dtypes) = (Vec::new(), None, Vec::new());
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
mod tests;
