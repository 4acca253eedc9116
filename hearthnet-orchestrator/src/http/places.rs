//! Places for requests that are being answered: bounded in all, and of one caller, so that it leaves
//! some for others.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// All places, and who has how many.
pub(super) struct Places {
    most: usize,
    taken: Mutex<BTreeMap<String, usize>>,
}

/// A place. Dropping it gives it back.
pub(super) struct Place {
    places: Arc<Places>,
    who: String,
}

impl Places {
    /// For so many requests at once, at least 1.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1),
            taken: Mutex::default(),
        })
    }

    /// A place for a request, or what is full.
    pub(super) fn take(self: &Arc<Self>, who: String) -> Result<Place, String> {
        let mut taken = self.taken.lock();
        // A quarter is left to others: 64 of 256, twice what may run and wait.
        let own = self.most - self.most / 4;
        if taken.values().sum::<usize>() >= self.most {
            let most = self.most;
            return Err(format!(
                "{most} requests are being answered, which is as many as may"
            ));
        }
        let count = taken.entry(who.clone()).or_default();
        if *count >= own {
            return Err(format!(
                "{own} requests of yours are being answered, which is as many as may"
            ));
        }
        *count += 1;
        let places = Arc::clone(self);
        Ok(Place { places, who })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        if let Some(count) = taken.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_leaves_a_quarter_of_the_places_to_others_and_all_have_no_more_than_there_are() {
        let places = Places::new(8);
        let take = |who: &str| places.take(who.to_owned());
        let hog: Vec<Place> = std::iter::from_fn(|| take("hog").ok()).collect();
        assert_eq!(hog.len(), 6);
        let others = [take("a").unwrap(), take("b").unwrap()];
        assert!(take("c").is_err_and(|why| why.starts_with("8 requests are")));
        drop(others);
        assert!(take("hog").is_err_and(|why| why.starts_with("6 requests of yours")));
        drop(hog);
        assert!(places.taken.lock().is_empty());
    }

    #[test]
    fn where_there_is_one_place_anybody_may_have_it() {
        let places = Places::new(0);
        let one = places.take("a".into());
        assert!(one.is_ok() && places.take("b".into()).is_err());
    }
}
