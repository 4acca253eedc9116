//! Cheapest route over ranges that hosts hold.

use std::collections::BTreeSet;

use super::input::Layers;

/// Range that a host holds, and what it costs to use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by callers.
pub struct Offer {
    pub layers: Layers,
    /// Cost of each span, whatever its length.
    pub enter_us: u64,
    pub layer_us: u64,
}

impl Offer {
    /// Cost of a span of so many layers.
    pub fn cost(&self, layers: u32) -> u64 {
        let compute = self.layer_us.saturating_mul(u64::from(layers));
        self.enter_us.saturating_add(compute)
    }
}

/// Cheapest way to cover the layers up to some layer.
#[derive(Clone, Copy)]
struct Step {
    cost: u64,
    offer: usize,
    from: u32,
}

/// Spans as index of the offer and layers, in layer order, and their cost.
pub type Route = (Vec<(usize, Layers)>, u64);

/// Covers `layers` with at most `max_spans` spans of `offers` at the smallest total cost: an exact
/// shortest path over pairs of layer and host. Of equal routes, the one with fewer spans, then
/// earlier offers.
pub fn shortest(layers: Layers, offers: &[Offer], max_spans: usize) -> Option<Route> {
    let all = shortest_by_spans(layers, offers, max_spans).into_iter();
    all.min_by_key(|(_, cost)| *cost)
}

/// Cheapest route with each number of spans, from one to `max_spans`, that can cover the layers.
pub fn shortest_by_spans(layers: Layers, offers: &[Offer], max_spans: usize) -> Vec<Route> {
    let tables = tables(layers, offers, max_spans);
    let route = |spans: usize| {
        let tables = tables.get(1..=spans)?;
        let cost = tables.last()?.last().copied()??.cost;
        let (mut route, mut end) = (Vec::with_capacity(spans), layers.end);
        for table in tables.iter().rev() {
            let at = end.saturating_sub(layers.first) as usize;
            let step = table.get(at).copied()??;
            route.push((step.offer, Layers::new(step.from, end)));
            end = step.from;
        }
        route.reverse();
        Some((route, cost))
    };
    (1..tables.len()).filter_map(route).collect()
}

/// One table per number of spans, from zero: the cheapest way to each layer with exactly so many.
fn tables(layers: Layers, offers: &[Offer], max_spans: usize) -> Vec<Vec<Option<Step>>> {
    let size = layers.count() as usize;
    let at = |layer: u32| layer.saturating_sub(layers.first) as usize;
    let start = Step {
        cost: 0,
        offer: 0,
        from: layers.first,
    };
    let mut before: Vec<Option<Step>> = vec![Some(start)];
    before.resize(size + 1, None);
    let mut tables = Vec::new();
    for _ in 0..max_spans.min(size) {
        let mut next: Vec<Option<Step>> = vec![None; size + 1];
        for (index, offer) in offers.iter().enumerate() {
            let held = offer.layers.within(layers);
            let mut open: Option<(u64, u32)> = None;
            for layer in held.first..held.end.max(held.first) {
                let here = before.get(at(layer)).copied().flatten();
                let entered = here.map(|step| (step.cost.saturating_add(offer.enter_us), layer));
                open = match (open, entered) {
                    (Some(old), Some(new)) if new.0 < old.0 => Some(new),
                    (None, new) => new,
                    (old, _) => old,
                };
                let Some((cost, from)) = &mut open else {
                    continue;
                };
                *cost = cost.saturating_add(offer.layer_us);
                let Some(slot) = next.get_mut(at(layer) + 1) else {
                    continue;
                };
                if slot.is_none_or(|step| *cost < step.cost) {
                    *slot = Some(Step {
                        cost: *cost,
                        offer: index,
                        from: *from,
                    });
                }
            }
        }
        tables.push(std::mem::replace(&mut before, next));
    }
    tables.push(before);
    tables
}

/// Covers `layers` with one span each of `offers` so that the most expensive span is as cheap as possible.
/// A span costs its layers, or `enter_us` if that is more. Of equal routes, the one with fewer
/// spans, then earlier offers. Returns the spans and the cost of the most expensive one. Exact for
/// ranges that do not overlap; otherwise only the best way to each layer is continued.
pub(super) fn narrowest(layers: Layers, offers: &[Offer]) -> Option<Route> {
    let size = layers.count() as usize;
    let at = |layer: u32| layer.saturating_sub(layers.first) as usize;
    // Cost, spans, offer and first layer of the best way to each layer.
    let mut best: Vec<Option<(u64, usize, usize, u32)>> = vec![None; size + 1];
    *best.first_mut()? = Some((0, 0, 0, layers.first));
    for from in layers.first..layers.end {
        let Some((cost, spans, ..)) = best.get(at(from)).copied().flatten() else {
            continue;
        };
        // A host that came before would have to share its time between two spans.
        let (mut used, mut before) = (BTreeSet::new(), from);
        while before > layers.first {
            let (.., offer, first) = best.get(at(before)).copied()??;
            used.insert(offer);
            before = first;
        }
        for (index, offer) in offers.iter().enumerate() {
            if !offer.layers.holds(from) || used.contains(&index) {
                continue;
            }
            for end in from + 1..=offer.layers.end.min(layers.end) {
                let compute = offer.layer_us.saturating_mul(u64::from(end - from));
                let way = (
                    cost.max(compute).max(offer.enter_us),
                    spans + 1,
                    index,
                    from,
                );
                let slot = best.get_mut(at(end))?;
                if slot.is_none_or(|old| way < old) {
                    *slot = Some(way);
                }
            }
        }
    }
    let cost = best.last().copied()??.0;
    let (mut route, mut end) = (Vec::new(), layers.end);
    while end > layers.first {
        let (.., offer, from) = best.get(at(end)).copied()??;
        route.push((offer, Layers::new(from, end)));
        end = from;
    }
    route.reverse();
    Some((route, cost))
}
