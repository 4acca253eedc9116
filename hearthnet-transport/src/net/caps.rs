//! Limits on a number of things: in all, and per key that causes them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts permits in all and per key, and refuses more than its limits.
#[derive(Debug)]
pub struct Caps<K> {
    taken: Mutex<(usize, HashMap<K, usize>)>,
    max: usize,
    max_per_key: usize,
}

/// A permit; given back when dropped.
#[derive(Debug)]
pub struct Place<K: Hash + Eq> {
    of: Arc<Caps<K>>,
    key: K,
}

/// Limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // These are all the limits there are.
pub enum Full {
    /// The limit for all keys together.
    InAll,
    /// The limit for this key.
    ForKey,
}

impl<K: Hash + Eq + Clone> Caps<K> {
    /// Allows `max` permits, of which one key may hold `max_per_key`.
    pub fn new(max: usize, max_per_key: usize) -> Arc<Caps<K>> {
        Arc::new(Caps {
            taken: Mutex::default(),
            max,
            max_per_key,
        })
    }

    /// Number of permits that are taken.
    pub fn taken(&self) -> usize {
        self.taken.lock().0
    }

    /// Takes a permit for `key`.
    ///
    /// # Errors
    /// [`Full`] if none is left.
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
