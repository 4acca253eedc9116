//! How many calls a peer may make.
//!
//! Pure: times are Unix milliseconds, given by the caller. Each member has a token
//! bucket of its own. A stranger has as many keys as it likes: whoever brings the proof that it was
//! invited pays with what there is for that invite, and all others share one bucket. So who has no
//! code cannot use up what is there for somebody who has.

use hearthnet_transport::{KeyedBuckets, Time, TokenBucket};

use crate::NodeId;

/// Members whose buckets are remembered, and as many invites.
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
    /// What all strangers get together, and what those get who bring the proof of one invite: 1 a
    /// second, 10 at once. They only ever join.
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

/// Whose budget a call is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // There is nobody else.
pub enum Payer {
    /// A member's own.
    Member(NodeId),
    /// That of an open invite, by its key.
    Invite(NodeId),
    /// That of all others.
    Strangers,
}

/// The budgets of all peers.
#[derive(Debug)]
pub struct Budgets {
    members: KeyedBuckets<NodeId>,
    invites: KeyedBuckets<NodeId>,
    strangers: TokenBucket,
}

impl Budgets {
    /// Full budgets with these rates.
    pub fn new(member: Rate, stranger: Rate, now_ms: u64) -> Self {
        Self {
            members: member.buckets(),
            invites: stranger.buckets(),
            strangers: stranger.bucket(Time::from_millis(now_ms)),
        }
    }

    /// Takes one call from a budget.
    ///
    /// # Errors
    /// If there is none left: the milliseconds until there is.
    pub fn take(&mut self, payer: Payer, now_ms: u64) -> Result<(), u64> {
        let now = Time::from_millis(now_ms);
        let bucket = match &payer {
            Payer::Member(key) => self.members.of(key, now),
            Payer::Invite(key) => self.invites.of(key, now),
            Payer::Strangers => &mut self.strangers,
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
    use crate::NodeKey;

    const RATE: Rate = Rate {
        per_second: 10,
        burst: 20,
    };

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    fn member(seed: u8) -> Payer {
        Payer::Member(node(seed))
    }

    fn burst(budgets: &mut Budgets, payer: Payer, now_ms: u64) -> usize {
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
    fn one_member_does_not_spend_what_is_anothers() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, member(1), 0), 20);
        assert_eq!(burst(&mut budgets, member(2), 0), 20);
    }

    #[test]
    fn strangers_share_one_budget_and_those_of_one_invite_another() {
        let mut budgets = Budgets::new(RATE, RATE, 0);
        assert_eq!(burst(&mut budgets, Payer::Strangers, 0), 20);
        assert_eq!(burst(&mut budgets, Payer::Strangers, 0), 0);
        for invite in [node(7), node(8)] {
            assert_eq!(burst(&mut budgets, Payer::Invite(invite), 0), 20);
            assert_eq!(burst(&mut budgets, Payer::Invite(invite), 0), 0);
        }
        assert_eq!(burst(&mut budgets, member(3), 0), 20);
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
                taken += (0..tries).filter(|_| budgets.take(member(1), now).is_ok()).count() as u64;
                prop_assert!(taken <= 20 + now * 10 / 1000);
            }
        }
    }
}
