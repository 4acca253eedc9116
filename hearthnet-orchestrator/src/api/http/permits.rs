//! Limits on concurrent requests and on pieces of their bodies: in total, and per caller, so that
//! one caller leaves some to others. The owner of the machine has a few extra ones.

use std::sync::Arc;

use hearthnet_transport::{Caps, Full, Place};

use crate::service::fair_queue::OWNER;

/// All permits. Clones share them.
#[derive(Clone)]
pub(super) struct PermitPool {
    most: usize,
    all: Arc<Caps<String>>,
    owners: Arc<Caps<String>>,
}

impl PermitPool {
    /// Creates `most` permits, at least 1, and `owners` more for the owner only.
    pub(super) fn new(most: usize, owners: usize) -> Self {
        let most = most.max(1);
        Self {
            most,
            all: Caps::new(most, own(most)),
            owners: Caps::new(owners, owners),
        }
    }

    /// Takes a permit for the caller `who`. The error is a message about requests.
    pub(super) fn take(&self, who: String) -> Result<Place<String>, String> {
        let is_owner = who == OWNER;
        let full = match self.all.enter(who) {
            Ok(permit) => return Ok(permit),
            Err(full) => full,
        };
        if is_owner
            && full == Full::InAll
            && let Ok(permit) = self.owners.enter(OWNER.to_owned())
        {
            return Ok(permit);
        }
        let whose = match full {
            Full::InAll => format!("{} requests", self.most),
            Full::ForKey => format!("{} requests of yours", own(self.most)),
        };
        Err(format!("{whose} are being answered, which is the limit"))
    }
}

/// Limit of one caller. A quarter is left to others: 64 of 256.
fn own(most: usize) -> usize {
    most - most / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_leaves_a_quarter_of_the_permits_to_others_within_the_total() {
        let permits = PermitPool::new(8, 1);
        let take = |who: &str| permits.take(who.to_owned());
        let hog: Vec<_> = std::iter::from_fn(|| take("hog").ok()).collect();
        assert_eq!(hog.len(), 6);
        let others = [take("a").unwrap(), take("b").unwrap()];
        assert!(take("c").is_err_and(|why| why.starts_with("8 requests are")));
        let owner = take(OWNER).unwrap();
        assert!(take(OWNER).is_err());
        drop((others, owner));
        assert!(take("hog").is_err_and(|why| why.starts_with("6 requests of yours")));
        drop(hog);
        assert_eq!(permits.all.taken(), 0);
    }

    #[test]
    fn a_single_permit_is_open_to_every_caller() {
        let permits = PermitPool::new(0, 1);
        let one = permits.take("a".into());
        assert!(one.is_ok() && permits.take("b".into()).is_err());
    }
}
