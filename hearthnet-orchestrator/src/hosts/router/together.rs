//! Routes through models with layers that one host must run together.
//!
//! These are the last layers of the model. The policies see a smaller model, in which they are one
//! layer, and hosts of which some hold that layer. (So a policy with measurements counts them as
//! the time of one layer. This does not change which hosts can run them.)

use std::ops::Range;

use super::{Candidate, RouteError, RouteRequest, Span};

/// Covers the layers as [`super::pick_by`]. `pick` does so for the smaller model.
///
/// # Errors
/// Any [`RouteError`].
pub(super) fn pick(
    request: &RouteRequest<'_>,
    candidates: &[Candidate],
    pick: impl FnOnce(&RouteRequest<'_>, &[Candidate]) -> Result<Vec<Span>, RouteError>,
) -> Result<Vec<Span>, RouteError> {
    let Range { start, end } = request.together;
    let last = end.saturating_sub(1);
    let smaller = RouteRequest {
        layers: *request.layers.start()..=(*request.layers.end()).min(start),
        total_layers: start.saturating_add(1),
        together: 0..0,
        ..request.clone()
    };
    let (mut indices, mut seen) = (Vec::new(), Vec::new());
    for (index, candidate) in candidates.iter().enumerate() {
        let descriptor = &candidate.descriptor;
        // A host of another model stays one.
        let is_of_model = descriptor.total_layers == request.total_layers;
        let (lo, hi) = descriptor.layer_range;
        let range = match lo <= start && hi >= last {
            true => (lo, start),
            false => (lo, hi.min(start.saturating_sub(1))),
        };
        if !is_of_model || range.0 > range.1 || (start == 0 && hi < last) {
            continue;
        }
        let mut candidate = candidate.clone();
        candidate.descriptor.layer_range = range;
        candidate.descriptor.total_layers = smaller.total_layers;
        indices.push(index);
        seen.push(candidate);
    }
    let spans = pick(&smaller, &seen).map_err(|error| match error {
        RouteError::Uncovered { layer, model_id } if layer == start => RouteError::Together {
            first: start,
            last,
            model_id,
        },
        other => other,
    })?;
    let whole = |span: Span| Span {
        candidate: indices.get(span.candidate).copied().unwrap_or(usize::MAX),
        hi: if span.hi == start { last } else { span.hi },
        ..span
    };
    Ok(spans.into_iter().map(whole).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ask, greedy, named, shard};
    use super::*;

    fn request() -> RouteRequest<'static> {
        RouteRequest {
            together: 9..16,
            ..ask()
        }
    }

    #[test]
    fn layers_that_belong_together_run_on_one_host() {
        let all = [
            shard("a", 0, 11, 0),
            shard("b", 12, 15, 0),
            shard("c", 9, 15, 5),
            shard("d", 10, 15, 0),
        ];
        let route = greedy(&request(), &all).unwrap();
        assert_eq!(named(&route, &all), [("a", 0, 8), ("c", 9, 15)]);
        // A replacement of the last span.
        let again = RouteRequest {
            layers: 9..=15,
            ..request()
        };
        let route = greedy(&again, &all).unwrap();
        assert_eq!(named(&route, &all), [("c", 9, 15)]);
        let one = [shard("all", 0, 15, 0)];
        let route = greedy(&request(), &one).unwrap();
        assert_eq!(named(&route, &one), [("all", 0, 15)]);
    }

    #[test]
    fn hosts_of_a_part_of_these_layers_are_no_route_and_the_error_says_why() {
        let all = [
            shard("a", 0, 11, 0),
            shard("b", 12, 15, 0),
            shard("d", 10, 15, 0),
        ];
        let error = greedy(&request(), &all).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(
                error,
                RouteError::Together {
                    first: 9,
                    last: 15,
                    ..
                }
            ),
            "{text}"
        );
        assert!(text.contains("layers 9 to 15"), "{text}");
        let error = greedy(&request(), &all[1..]).unwrap_err();
        assert!(matches!(error, RouteError::Uncovered { layer: 0, .. }));
    }
}
