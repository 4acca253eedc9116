//! How many calls a peer may make.
//!
//! Pure: times are Unix milliseconds, given by the caller. Each member has a token
//! bucket of its own; all strangers share one, for a stranger has as many keys as it likes.

use std::collections::HashMap;

use crate::NodeId;

/// A bucket's worth of one call, so that milliseconds of a rate per second are whole numbers.
const ONE: u64 = 1000;
/// Members whose buckets are remembered. A full bucket says nothing and is dropped first.
const MAX_PEERS: usize = 1024;

/// A rate: `per_second` calls over time, `burst` at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Calls per second over time.
    pub per_second: u32,
    /// Calls at once after a quiet time.
    pub burst: u32,
}

impl Rate {
    /// What a member gets: 10 a second, 40 at once.
    pub const MEMBER: Self = Self {
        per_second: 10,
        burst: 40,
    };
    /// What all strangers get together: 1 a second, 10 at once. They only ever join.
    pub const STRANGERS: Self = Self {
        per_second: 1,
        burst: 10,
    };

    fn capacity(self) -> u64 {
        u64::from(self.burst) * ONE
    }
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: u64,
    at_ms: u64,
}

impl Bucket {
    fn full(rate: Rate, now_ms: u64) -> Self {
        Self {
            level: rate.capacity(),
            at_ms: now_ms,
        }
    }

    fn fill(&mut self, rate: Rate, now_ms: u64) {
        // A clock that stands still or goes back earns nothing.
        let passed = now_ms.saturating_sub(self.at_ms);
        self.at_ms = self.at_ms.max(now_ms);
        let earned = passed.saturating_mul(u64::from(rate.per_second));
        self.level = self.level.saturating_add(earned).min(rate.capacity());
    }

    /// Takes one call, or says in how many milliseconds there will be one.
    fn take(&mut self, rate: Rate, now_ms: u64) -> Result<(), u64> {
        self.fill(rate, now_ms);
        match self.level.checked_sub(ONE) {
            Some(rest) => {
                self.level = rest;
                Ok(())
            }
            None => Err((ONE - self.level).div_ceil(u64::from(rate.per_second).max(1))),
        }
    }
}

/// The budgets of all peers.
#[derive(Debug)]
pub struct Budgets {
    member: Rate,
    strangers: Rate,
    members: HashMap<NodeId, Bucket>,
    shared: Bucket,
}

impl Budgets {
    /// Full budgets with these rates.
    pub fn new(member: Rate, strangers: Rate, now_ms: u64) -> Self {
        Self {
            member,
            strangers,
            members: HashMap::new(),
            shared: Bucket::full(strangers, now_ms),
        }
    }

    /// Takes one call from a peer's budget.
    ///
    /// # Errors
    /// If there is none left: the milliseconds until there is.
    pub fn take(&mut self, peer: NodeId, is_member: bool, now_ms: u64) -> Result<(), u64> {
        if !is_member {
            return self.shared.take(self.strangers, now_ms);
        }
        let rate = self.member;
        if self.members.len() >= MAX_PEERS && !self.members.contains_key(&peer) {
            self.members.retain(|_, bucket| {
                bucket.fill(rate, now_ms);
                bucket.level < rate.capacity()
            });
            if self.members.len() >= MAX_PEERS {
                return Err(1000);
            }
        }
        self.members
            .entry(peer)
            .or_insert_with(|| Bucket::full(rate, now_ms))
            .take(rate, now_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::NodeKey;

    const RATE: Rate = Rate {
        per_second: 10,
        burst: 20,
    };

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    fn burst(budgets: &mut Budgets, peer: u8, is_member: bool, now_ms: u64) -> usize {
        (0..100)
            .filter(|_| budgets.take(node(peer), is_member, now_ms).is_ok())
            .count()
    }

    #[test]
    fn a_peer_gets_its_burst_and_then_its_rate() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, 1, true, 0), 20);
        assert_eq!(budgets.take(node(1), true, 0), Err(100));
        assert_eq!(budgets.take(node(1), true, 99), Err(1));
        assert_eq!(budgets.take(node(1), true, 100), Ok(()));
        assert_eq!(burst(&mut budgets, 1, true, 600), 5);
        assert_eq!(burst(&mut budgets, 1, true, u64::MAX), 20);
    }

    #[test]
    fn one_member_does_not_spend_what_is_anothers() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, 1, true, 0), 20);
        assert_eq!(burst(&mut budgets, 2, true, 0), 20);
    }

    #[test]
    fn strangers_share_one_budget_whatever_their_keys() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, 1, false, 0), 20);
        assert_eq!(burst(&mut budgets, 2, false, 0), 0);
        assert_eq!(burst(&mut budgets, 3, true, 0), 20);
    }

    proptest! {
        #[test]
        fn nobody_gets_more_than_the_burst_and_the_rate(
            steps in prop::collection::vec((0u64..300, 1usize..8), 1..100),
        ) {
            let mut budgets = Budgets::new(RATE, RATE, 0);
            let (mut now, mut taken) = (0, 0);
            for (pass, tries) in steps {
                now += pass;
                taken += (0..tries).filter(|_| budgets.take(node(1), true, now).is_ok()).count() as u64;
                prop_assert!(taken <= 20 + now * 10 / 1000);
            }
        }
    }
}
