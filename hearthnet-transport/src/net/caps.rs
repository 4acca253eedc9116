//! How many of something there may be: in all, and for each of those who cause them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts places in all and per key, and gives out no more than it may.
pub(crate) struct Caps<K> {
    taken: Mutex<(usize, HashMap<K, usize>)>,
    max: usize,
    max_per_key: usize,
}

/// One place; given back when dropped.
pub(crate) struct Place<K: Hash + Eq> {
    of: Arc<Caps<K>>,
    key: K,
}

impl<K: Hash + Eq + Clone> Caps<K> {
    pub(crate) fn new(max: usize, max_per_key: usize) -> Arc<Caps<K>> {
        Arc::new(Caps {
            taken: Mutex::default(),
            max,
            max_per_key,
        })
    }

    /// A place for `key`, if there is one left.
    pub(crate) fn enter(self: &Arc<Self>, key: K) -> Option<Place<K>> {
        let mut guard = self.taken.lock();
        let (total, by_key) = &mut *guard;
        let here = by_key.get(&key).copied().unwrap_or(0);
        if *total >= self.max || here >= self.max_per_key {
            return None;
        }
        *total += 1;
        by_key.insert(key.clone(), here + 1);
        Some(Place {
            of: self.clone(),
            key,
        })
    }
}

impl<K: Hash + Eq> Drop for Place<K> {
    fn drop(&mut self) {
        let mut guard = self.of.taken.lock();
        let (total, by_key) = &mut *guard;
        *total = total.saturating_sub(1);
        if let Some(here) = by_key.get_mut(&self.key) {
            *here = here.saturating_sub(1);
            if *here == 0 {
                by_key.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_in_all_and_per_key_and_come_back() {
        let caps = Caps::new(3, 2);
        let held: Vec<_> = (0..3).filter_map(|_| caps.enter("a")).collect();
        assert_eq!(held.len(), 2);
        let other = caps.enter("b").unwrap();
        assert!(caps.enter("c").is_none());
        drop(held);
        assert!(caps.enter("a").is_some());
        drop(other);
        assert_eq!(*caps.taken.lock(), (0, HashMap::new()));
    }
}
