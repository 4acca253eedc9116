//! How many of something there may be: in all, and for each of those who cause them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts places in all and per key, and gives out no more than it may.
#[derive(Debug)]
pub struct Caps<K> {
    taken: Mutex<(usize, HashMap<K, usize>)>,
    max: usize,
    max_per_key: usize,
}

/// One place; given back when dropped.
#[derive(Debug)]
pub struct Place<K: Hash + Eq> {
    of: Arc<Caps<K>>,
    key: K,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The two limits there are.
pub enum Full {
    /// All are taken.
    InAll,
    /// This key has taken as many as one may.
    ForKey,
}

impl<K: Hash + Eq + Clone> Caps<K> {
    /// `max` places, of which one key may take `max_per_key`.
    pub fn new(max: usize, max_per_key: usize) -> Arc<Caps<K>> {
        Arc::new(Caps {
            taken: Mutex::default(),
            max,
            max_per_key,
        })
    }

    /// Places that are taken.
    pub fn taken(&self) -> usize {
        self.taken.lock().0
    }

    /// A place for `key`.
    ///
    /// # Errors
    /// [`Full`] if there is none left.
    pub fn enter(self: &Arc<Self>, key: K) -> Result<Place<K>, Full> {
        let mut guard = self.taken.lock();
        let (total, by_key) = &mut *guard;
        let here = by_key.get(&key).copied().unwrap_or(0);
        if here >= self.max_per_key {
            return Err(Full::ForKey);
        }
        if *total >= self.max {
            return Err(Full::InAll);
        }
        *total += 1;
        by_key.insert(key.clone(), here + 1);
        Ok(Place {
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
        let held: Vec<_> = (0..3).filter_map(|_| caps.enter("a").ok()).collect();
        assert_eq!(held.len(), 2);
        assert_eq!(caps.enter("a").unwrap_err(), Full::ForKey);
        let other = caps.enter("b").unwrap();
        assert_eq!(caps.enter("c").unwrap_err(), Full::InAll);
        drop(held);
        assert!(caps.enter("a").is_ok());
        drop(other);
        assert_eq!(*caps.taken.lock(), (0, HashMap::new()));
    }
}
