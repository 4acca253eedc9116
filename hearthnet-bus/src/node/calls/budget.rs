//! Rate limits for calls. Pure: the caller passes times as Unix milliseconds.
//!
//! Each member has its own token bucket. A stranger can make any number of keys, so strangers with
//! a valid proof of an invite share the bucket of that invite, and all others share one bucket. A
//! stranger without a code therefore cannot use up the calls of an invited one.

use hearthnet_transport::{KeyedBuckets, Time, TokenBucket};

use crate::NodeId;

/// Upper bound of member buckets, and of invite buckets.
const MAX_PEERS: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub per_second: u32,
    /// Calls at once after an idle time.
    pub burst: u32,
}

impl Rate {
    /// Rate of a member: 10 calls a second, 40 at once.
    pub const MEMBER: Self = Self {
        per_second: 10,
        burst: 40,
    };
    /// Rate of all strangers together, and of the strangers of one invite: 1 call a second, 10 at
    /// once. They only call `community.join`.
    pub const STRANGERS: Self = Self {
        per_second: 1,
        burst: 10,
    };

    fn bucket(self, now: Time) -> TokenBucket {
        TokenBucket::with_burst(self.per_second.into(), self.burst.into(), now)
    }

    fn buckets(self) -> KeyedBuckets<NodeId> {
        KeyedBuckets::new(self.per_second.into(), self.burst.into(), MAX_PEERS)
    }
}

/// Bucket to which a call is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Complete by design.
pub enum BudgetKey {
    /// The calling member.
    Member(NodeId),
    /// An open invite, by its key.
    Invite(NodeId),
    /// The bucket shared by strangers without a proof.
    Strangers,
}

#[derive(Debug)]
pub struct Budgets {
    members: KeyedBuckets<NodeId>,
    invites: KeyedBuckets<NodeId>,
    strangers: TokenBucket,
}

impl Budgets {
    /// Full buckets with these rates.
    pub fn new(member: Rate, stranger: Rate, now_ms: u64) -> Self {
        Self {
            members: member.buckets(),
            invites: stranger.buckets(),
            strangers: stranger.bucket(Time::from_millis(now_ms)),
        }
    }

    /// Charges one call.
    ///
    /// # Errors
    /// If the bucket is empty: the milliseconds until it has a call.
    pub fn take(&mut self, payer: BudgetKey, now_ms: u64) -> Result<(), u64> {
        let now = Time::from_millis(now_ms);
        let bucket = match &payer {
            BudgetKey::Member(key) => self.members.of(key, now),
            BudgetKey::Invite(key) => self.invites.of(key, now),
            BudgetKey::Strangers => &mut self.strangers,
        };
        match bucket.take(now) {
            true => Ok(()),
            false => Err(bucket.ready_at(1).0.saturating_sub(now.0).div_ceil(1000)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::id as node;

    const RATE: Rate = Rate {
        per_second: 10,
        burst: 20,
    };

    fn member(seed: u8) -> BudgetKey {
        BudgetKey::Member(node(seed))
    }

    fn burst(budgets: &mut Budgets, payer: BudgetKey, now_ms: u64) -> usize {
        let taken = (0..100).filter(|_| budgets.take(payer, now_ms).is_ok());
        taken.count()
    }

    #[test]
    fn a_peer_gets_its_burst_and_then_its_rate() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, member(1), 0), 20);
        assert_eq!(budgets.take(member(1), 0), Err(100));
        assert_eq!(budgets.take(member(1), 99), Err(1));
        assert_eq!(budgets.take(member(1), 100), Ok(()));
        assert_eq!(burst(&mut budgets, member(1), 600), 5);
        assert_eq!(burst(&mut budgets, member(1), u64::MAX), 20);
    }

    #[test]
    fn members_have_separate_buckets() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, member(1), 0), 20);
        assert_eq!(burst(&mut budgets, member(2), 0), 20);
    }

    #[test]
    fn strangers_share_one_bucket_and_those_of_an_invite_another() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, BudgetKey::Strangers, 0), 20);
        assert_eq!(burst(&mut budgets, BudgetKey::Strangers, 0), 0);
        for invite in [node(7), node(8)] {
            assert_eq!(burst(&mut budgets, BudgetKey::Invite(invite), 0), 20);
            assert_eq!(burst(&mut budgets, BudgetKey::Invite(invite), 0), 0);
        }
        assert_eq!(burst(&mut budgets, member(3), 0), 20);
    }

    proptest! {
        #[test]
        fn a_member_gets_at_most_the_burst_and_the_rate(
            steps in prop::collection::vec((0u64..300, 1usize..8), 1..100),
        ) {
            let mut budgets = Budgets::new(RATE, RATE, 0);
            let (mut now, mut taken) = (0, 0);
            for (pass, tries) in steps {
                now += pass;
                taken += (0..tries).filter(|_| budgets.take(member(1), now).is_ok()).count() as u64;
                prop_assert!(taken <= 20 + now * 10 / 1000);
            }
        }
    }
}
