//! Ranges of layers that a daemon serves, at most one of each model: their memory, and their state
//! as `node.status`, `/healthz` and the watch of the machine see it. Pure.

use std::collections::BTreeMap;

use hearthnet_files::WeightsId;
use hearthnet_http::Health;

use super::layer_request::Memory;

/// Range that is served, or that is about to be.
#[derive(Debug)]
pub(super) struct Range {
    /// Name of the model.
    pub(super) name: String,
    /// Memory that the range and later ones of this host may take.
    pub(super) memory: Memory,
    /// Smaller memory that the next range has, if this one is too large for it.
    pub(super) next: Option<Memory>,
    /// Number of layers that it can hold; 0 if its layers were named, or while that is not known.
    pub(super) room: u32,
    /// Bytes of weights that it holds, or held when it was withdrawn.
    pub(super) held: u64,
    /// Whether steps of callers were computed lately.
    pub(super) is_computing: bool,
    /// It is withdrawn, and will not be served again.
    pub(super) is_leaving: bool,
    pub(super) health: Health,
    /// Shard id, once it is served, or the reason why it is not served now.
    pub(super) serving: Result<Option<String>, String>,
}

impl Range {
    pub(super) fn new(name: &str, memory: Memory) -> Self {
        Self {
            name: name.to_owned(),
            memory,
            next: None,
            room: 0,
            held: 0,
            is_computing: false,
            is_leaving: false,
            health: Health::Starting,
            serving: Ok(None),
        }
    }

    /// The range is served, and fits into the memory that was meant for it.
    pub(super) fn begins(&mut self) {
        self.health = Health::Serving;
        self.memory = self.next.take().unwrap_or(self.memory);
    }
}

/// All ranges of a daemon.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<WeightsId, Range>);

/// Why a model cannot get a range.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It has one; with the shard id or the name.
    Served(String),
    /// The streams of the last range are being drained.
    Leaving,
}

impl Ranges {
    /// Whether a range of the model can be added. Models of the same name count as one, because
    /// shard ids contain the name.
    pub(super) fn is_free(&self, model: WeightsId, name: &str) -> Result<(), Taken> {
        let is_same =
            |(weights, range): &(&WeightsId, &Range)| **weights == model || range.name == name;
        match self.0.iter().find(is_same) {
            None => Ok(()),
            Some((_, range)) if range.is_leaving => Err(Taken::Leaving),
            Some((_, range)) => Err(Taken::Served(match &range.serving {
                Ok(Some(shard)) => shard.clone(),
                _ => range.name.clone(),
            })),
        }
    }

    pub(super) fn add(&mut self, model: WeightsId, range: Range) {
        self.0.insert(model, range);
    }

    pub(super) fn get(&self, model: WeightsId) -> Option<&Range> {
        self.0.get(&model)
    }

    pub(super) fn get_mut(&mut self, model: WeightsId) -> Option<&mut Range> {
        self.0.get_mut(&model)
    }

    pub(super) fn remove(&mut self, model: WeightsId) {
        self.0.remove(&model);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Bytes of weights that all ranges may take.
    pub(super) fn budget(&self) -> u64 {
        let all = self.0.values().map(|range| range.memory.weights);
        all.fold(0, u64::saturating_add)
    }

    /// Gives a range other memory, if it is served and what it holds fits in that. Returns whether it
    /// does.
    pub(super) fn resize(&mut self, model: WeightsId, memory: Memory) -> bool {
        let range = self.0.get_mut(&model);
        let served = range.filter(|range| range.health == Health::Serving);
        let Some(range) = served.filter(|range| range.held <= memory.weights) else {
            return false;
        };
        range.memory = memory;
        range.next = None;
        true
    }

    /// Gives a served range less memory than it holds, as soon as it has given up layers. Until then
    /// no other range may take it. Returns whether the range is served.
    pub(super) fn shrink(&mut self, model: WeightsId, memory: Memory) -> bool {
        let range = self.0.get_mut(&model);
        let Some(range) = range.filter(|range| range.health == Health::Serving) else {
            return false;
        };
        range.next = Some(memory);
        true
    }

    /// Whether a range has to give up layers.
    pub(super) fn is_shrinking(&self) -> bool {
        self.0.values().any(|range| range.next.is_some())
    }

    /// Number of layers that each range can hold, as far as known.
    pub(super) fn rooms(&self) -> BTreeMap<WeightsId, u32> {
        let known = self.0.iter().filter(|(_, range)| range.room > 0);
        known.map(|(model, range)| (*model, range.room)).collect()
    }

    /// Bytes of weights that all ranges hold.
    pub(super) fn held(&self) -> u64 {
        let all = self.0.values().map(|range| range.held);
        all.fold(0, u64::saturating_add)
    }

    pub(super) fn is_computing(&self) -> bool {
        self.0.values().any(|range| range.is_computing)
    }

    /// Shard ids of what is served, with `, ` between them.
    pub(super) fn serving(&self) -> Option<String> {
        let shards = self
            .0
            .values()
            .filter_map(|range| range.serving.as_ref().ok());
        let shards: Vec<&str> = shards.flatten().map(String::as_str).collect();
        (!shards.is_empty()).then(|| shards.join(", "))
    }

    /// Reason why a range is not served now. Reasons are those of the machine or of the community,
    /// so that the first one stands for all.
    pub(super) fn suspended(&self) -> Option<String> {
        let mut reasons = self
            .0
            .values()
            .filter_map(|range| range.serving.as_ref().err());
        reasons.next().cloned()
    }

    /// Health of the best range; `None` without ranges.
    pub(super) fn health(&self) -> Option<Health> {
        let all = self.0.values().map(|range| range.health);
        all.min_by_key(|health| match health {
            Health::Serving => 0,
            Health::Starting => 1,
            Health::Leaving => 2,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WeightsId = WeightsId([1; 32]);
    const B: WeightsId = WeightsId([2; 32]);

    fn memory(weights: u64) -> Memory {
        Memory {
            weights,
            kv: 1,
            models: 1,
        }
    }

    /// Ranges of the models A and B.
    fn both() -> Ranges {
        let mut ranges = Ranges::default();
        for (model, name, budget) in [(A, "a", 40), (B, "b", 2)] {
            assert_eq!(ranges.is_free(model, name), Ok(()));
            ranges.add(model, Range::new(name, memory(budget)));
        }
        ranges
    }

    #[test]
    fn a_model_has_one_range_until_it_has_left() {
        let mut ranges = both();
        assert_eq!(ranges.is_free(A, "c"), Err(Taken::Served("a".to_owned())));
        ranges.get_mut(A).unwrap().serving = Ok(Some("a:0-3".to_owned()));
        let taken = Taken::Served("a:0-3".to_owned());
        assert_eq!(ranges.is_free(A, "a"), Err(taken));
        // Another model of the same name would advertise the same shard ids.
        let other = WeightsId([3; 32]);
        assert_eq!(
            ranges.is_free(other, "b"),
            Err(Taken::Served("b".to_owned()))
        );
        assert_eq!(ranges.is_free(other, "c"), Ok(()));
        ranges.get_mut(A).unwrap().is_leaving = true;
        assert_eq!(ranges.is_free(A, "a"), Err(Taken::Leaving));
        ranges.remove(A);
        assert_eq!(ranges.is_free(A, "a"), Ok(()));
        assert_eq!((ranges.budget(), ranges.len()), (2, 1));
        ranges.remove(B);
        assert!(ranges.is_empty() && ranges.health().is_none());
    }

    #[test]
    fn only_a_range_that_is_served_and_fits_goes_on_with_less_memory() {
        let mut ranges = both();
        let a = ranges.get_mut(A).unwrap();
        (a.held, a.room, a.health) = (30, 3, Health::Serving);
        assert!(!ranges.resize(A, memory(29)));
        assert_eq!(ranges.budget(), 42);
        assert!(ranges.resize(A, memory(30)));
        assert_eq!(
            (ranges.budget(), ranges.rooms()),
            (32, BTreeMap::from([(A, 3)]))
        );
        // Layers that are loading may need more.
        assert!(!ranges.resize(B, memory(2)));
        assert!(!ranges.resize(WeightsId([3; 32]), memory(99)));
    }

    #[test]
    fn a_range_that_is_too_large_keeps_its_memory_until_a_smaller_one_is_served() {
        let mut ranges = both();
        assert!(!ranges.shrink(A, memory(20)), "it is not served yet");
        let a = ranges.get_mut(A).unwrap();
        a.held = 30;
        a.begins();
        assert!(!ranges.resize(A, memory(20)) && ranges.shrink(A, memory(20)));
        assert_eq!((ranges.budget(), ranges.is_shrinking()), (42, true));
        let a = ranges.get_mut(A).unwrap();
        a.health = Health::Starting;
        a.held = 15;
        assert!(ranges.is_shrinking());
        ranges.get_mut(A).unwrap().begins();
        assert_eq!((ranges.budget(), ranges.is_shrinking()), (22, false));
        // The other model was dropped before it had to give up any.
        assert!(ranges.shrink(A, memory(10)) && ranges.resize(A, memory(40)));
        assert_eq!((ranges.budget(), ranges.is_shrinking()), (42, false));
    }

    #[test]
    fn the_state_of_a_daemon_is_that_of_all_its_ranges() {
        let mut ranges = both();
        assert_eq!(ranges.budget(), 42);
        assert_eq!((ranges.serving(), ranges.suspended()), (None, None));
        assert_eq!(ranges.health(), Some(Health::Starting));
        let b = ranges.get_mut(B).unwrap();
        (b.held, b.is_computing, b.health) = (2, true, Health::Serving);
        b.serving = Ok(Some("b:0-1".to_owned()));
        let a = ranges.get_mut(A).unwrap();
        (a.held, a.health) = (30, Health::Leaving);
        a.serving = Err("paused".to_owned());
        assert!(ranges.is_computing());
        assert_eq!(ranges.held(), 32);
        assert_eq!(ranges.health(), Some(Health::Serving));
        assert_eq!(ranges.serving().as_deref(), Some("b:0-1"));
        assert_eq!(ranges.suspended().as_deref(), Some("paused"));
        ranges.get_mut(A).unwrap().serving = Ok(Some("a:2-3".to_owned()));
        assert_eq!(ranges.serving().as_deref(), Some("a:2-3, b:0-1"));
        assert_eq!(ranges.suspended(), None);
    }
}
