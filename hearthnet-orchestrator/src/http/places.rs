//! Places for requests that are served, and for pieces of their bodies: bounded over all callers, and per
//! caller, so that one leaves some for others. The owner of the machine has a few of its own.

use std::sync::Arc;

use hearthnet_transport::{Caps, Full, Place};

use crate::service::fair_queue::OWNER;

/// All places. Clones are the same ones.
#[derive(Clone)]
pub(super) struct Places {
    most: usize,
    all: Arc<Caps<String>>,
    owners: Arc<Caps<String>>,
}

impl Places {
    /// `most` places at once, at least 1, and `owners` more that only the owner has.
    pub(super) fn new(most: usize, owners: usize) -> Self {
        let most = most.max(1);
        Self {
            most,
            all: Caps::new(most, own(most)),
            owners: Caps::new(owners, owners),
        }
    }

    /// A place for the caller `who`, or what is full, in words about requests.
    pub(super) fn take(&self, who: String) -> Result<Place<String>, String> {
        let is_owner = who == OWNER;
        let full = match self.all.enter(who) {
            Ok(place) => return Ok(place),
            Err(full) => full,
        };
        if is_owner
            && full == Full::InAll
            && let Ok(place) = self.owners.enter(OWNER.to_owned())
        {
            return Ok(place);
        }
        let whose = match full {
            Full::InAll => format!("{} requests", self.most),
            Full::ForKey => format!("{} requests of yours", own(self.most)),
        };
        Err(format!(
            "{whose} are being answered, which is as many as may"
        ))
    }
}

/// Those of one caller. A quarter is left to others: 64 of 256, twice what may run and wait.
fn own(most: usize) -> usize {
    most - most / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_leaves_a_quarter_of_the_places_to_others_and_all_have_no_more_than_there_are() {
        let places = Places::new(8, 1);
        let take = |who: &str| places.take(who.to_owned());
        let hog: Vec<_> = std::iter::from_fn(|| take("hog").ok()).collect();
        assert_eq!(hog.len(), 6);
        let others = [take("a").unwrap(), take("b").unwrap()];
        assert!(take("c").is_err_and(|why| why.starts_with("8 requests are")));
        let owner = take(OWNER).unwrap();
        assert!(take(OWNER).is_err());
        drop((others, owner));
        assert!(take("hog").is_err_and(|why| why.starts_with("6 requests of yours")));
        drop(hog);
        assert_eq!(places.all.taken(), 0);
    }

    #[test]
    fn where_there_is_one_place_anybody_may_have_it() {
        let places = Places::new(0, 1);
        let one = places.take("a".into());
        assert!(one.is_ok() && places.take("b".into()).is_err());
    }
}
