//! Which tokens were shown before.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::{Grant, GrantError, NodeId};

/// What names a token: an id is only unique among one issuer's grants.
type Token = (NodeId, [u8; 16]);

/// Remembers tokens until they have expired, in bounded memory.
///
/// When it is full, tokens are refused, for one that is forgotten could be used twice.
/// So that nobody who uses many can shut the others out, nobody may hold more than a quarter of
/// the places.
///
/// ```
/// # use hearthnet_bus::{Capability, Grant, GrantError, NodeKey, ReplayCache};
/// # let id = NodeKey::from_secret(&[1; 32]).id();
/// # let scope = Capability::shard_serve();
/// # let grant = Grant {
/// #     issuer: id, subject: id, audience: id, scope, not_before: 100, expires: 160, id: [0; 16],
/// # };
/// let mut seen = ReplayCache::new(1024);
/// assert_eq!(seen.remember(&grant, id, 100, 30), Ok(()));
/// assert_eq!(seen.remember(&grant, id, 120, 30), Err(GrantError::Replayed));
/// ```
#[derive(Debug)]
pub struct ReplayCache {
    capacity: usize,
    seen: BTreeSet<Token>,
    /// With whose place each takes.
    by_death: BTreeMap<(u64, Token), NodeId>,
    held: BTreeMap<NodeId, usize>,
}

/// Why something could not be noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotNoted {
    /// It was noted before.
    Seen,
    /// There is no room, in all or for this holder.
    Full,
}

impl ReplayCache {
    /// A cache for at most `capacity` unexpired tokens (about 200 bytes each; memory
    /// is taken as it fills).
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            seen: BTreeSet::new(),
            by_death: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// Takes note of a grant whose form, signature and time were checked, in a place of `holder`, and drops
    /// what has expired by `now` (Unix seconds). `skew` as in [`Grant::admit`]: the
    /// grant is remembered for as long as that would accept it.
    ///
    /// # Errors
    /// [`GrantError::Replayed`] if it was noted before, [`GrantError::CacheFull`] if
    /// there is no room for it.
    pub fn remember(
        &mut self,
        grant: &Grant,
        holder: NodeId,
        now: u64,
        skew: u64,
    ) -> Result<(), GrantError> {
        let token = (grant.issuer, grant.id);
        self.note(token, holder, grant.dead_from(skew), now)
            .map_err(|refusal| match refusal {
                NotNoted::Seen => GrantError::Replayed,
                NotNoted::Full => GrantError::CacheFull,
            })
    }

    /// Takes note of anything that has an issuer and an id, in a place of `holder`, until `death`: the
    /// first moment in which no check accepts it any more, in the same unit as `now`.
    pub(crate) fn note(
        &mut self,
        token: Token,
        holder: NodeId,
        death: u64,
        now: u64,
    ) -> Result<(), NotNoted> {
        self.forget_expired(now);
        if self.seen.contains(&token) {
            return Err(NotNoted::Seen);
        }
        let share = self.capacity.div_ceil(4);
        let held = self.held.get(&holder).copied().unwrap_or(0);
        if self.seen.len() >= self.capacity || held >= share {
            return Err(NotNoted::Full);
        }
        self.seen.insert(token);
        self.by_death.insert((death, token), holder);
        self.held.insert(holder, held + 1);
        Ok(())
    }

    /// Tokens remembered now.
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    /// Whether no token is remembered.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    fn forget_expired(&mut self, now: u64) {
        while let Some(first) = self.by_death.first_entry() {
            let (death, token) = *first.key();
            if death > now {
                break;
            }
            let holder = first.remove();
            self.seen.remove(&token);
            if let Entry::Occupied(mut held) = self.held.entry(holder) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{Capability, NodeKey};

    fn grant(issuer: u8, id: u8, expires: u64) -> Grant {
        let issuer = NodeKey::from_secret(&[issuer; 32]).id();
        Grant {
            issuer,
            subject: issuer,
            audience: issuer,
            scope: Capability::shard_serve(),
            not_before: expires - 60,
            expires,
            id: [id; 16],
        }
    }

    fn remember(
        seen: &mut ReplayCache,
        grant: &Grant,
        now: u64,
        skew: u64,
    ) -> Result<(), GrantError> {
        seen.remember(grant, grant.subject, now, skew)
    }

    #[test]
    fn a_token_is_remembered_until_no_clock_accepts_it() {
        let mut seen = ReplayCache::new(8);
        let token = grant(1, 1, 160);
        remember(&mut seen, &token, 100, 30).unwrap();
        assert_eq!(
            remember(&mut seen, &token, 189, 30),
            Err(GrantError::Replayed)
        );
        // From 190 on, the time check refuses it: the place is free again.
        remember(&mut seen, &grant(1, 2, 300), 190, 30).unwrap();
        assert_eq!(seen.len(), 1);
    }

    #[test]
    fn the_same_id_from_another_issuer_is_another_token() {
        let mut seen = ReplayCache::new(8);
        remember(&mut seen, &grant(1, 1, 160), 100, 0).unwrap();
        remember(&mut seen, &grant(2, 1, 160), 100, 0).unwrap();
        assert_eq!(seen.len(), 2);
    }

    #[test]
    fn a_full_cache_refuses_instead_of_forgetting() {
        let mut seen = ReplayCache::new(4);
        for issuer in 1..=4 {
            remember(&mut seen, &grant(issuer, 1, 160), 100, 0).unwrap();
        }
        assert_eq!(
            remember(&mut seen, &grant(5, 1, 160), 100, 0),
            Err(GrantError::CacheFull)
        );
        assert_eq!(
            remember(&mut seen, &grant(1, 1, 160), 100, 0),
            Err(GrantError::Replayed)
        );
        assert_eq!(remember(&mut seen, &grant(5, 1, 260), 160, 0), Ok(()));
    }

    #[test]
    fn one_issuer_cannot_fill_the_cache_for_all() {
        let mut seen = ReplayCache::new(16);
        for id in 0..4 {
            remember(&mut seen, &grant(1, id, 160), 100, 0).unwrap();
        }
        assert_eq!(
            remember(&mut seen, &grant(1, 4, 160), 100, 0),
            Err(GrantError::CacheFull)
        );
        assert_eq!(remember(&mut seen, &grant(2, 4, 160), 100, 0), Ok(()));
    }

    #[test]
    fn those_for_whom_one_answers_have_its_places_together() {
        let issuer = |n: u8| NodeKey::from_secret(&[n; 32]).id();
        let (one, other) = (issuer(1), issuer(9));
        let mut seen = ReplayCache::new(16);
        for n in 1..=4 {
            assert_eq!(seen.note((issuer(n), [0; 16]), one, 160, 100), Ok(()));
        }
        let fifth = (issuer(5), [0; 16]);
        assert_eq!(seen.note(fifth, one, 160, 100), Err(NotNoted::Full));
        assert_eq!(seen.note((other, [0; 16]), other, 160, 100), Ok(()));
        // What is dead leaves its place to whose it was.
        assert_eq!(seen.note(fifth, one, 260, 160), Ok(()));
        assert_eq!(seen.held.get(&one), Some(&1));
        assert_eq!(seen.held.len(), 1);
    }

    proptest! {
        /// Against a model that remembers everything: no token is accepted twice while
        /// it can still be valid, and the bound holds at every step.
        #[test]
        fn nothing_is_accepted_twice_in_its_lifetime(
            steps in proptest::collection::vec((1u8..5, 0u8..4, 60u64..120, 0u64..40), 1..80),
        ) {
            let mut seen = ReplayCache::new(6);
            let mut accepted: HashMap<([u8; 16], NodeId), u64> = HashMap::new();
            let mut now = 1000;
            for (issuer, id, life, pass) in steps {
                now += pass;
                let token = grant(issuer, id, now + life);
                let before = accepted.get(&(token.id, token.issuer)).copied();
                match remember(&mut seen, &token, now, 10) {
                    Ok(()) => {
                        prop_assert!(before.is_none_or(|death| death <= now));
                        accepted.insert((token.id, token.issuer), token.expires + 10);
                    }
                    Err(GrantError::Replayed) => prop_assert!(before.is_some_and(|d| d > now)),
                    Err(error) => prop_assert_eq!(error, GrantError::CacheFull),
                }
                prop_assert!(seen.len() <= 6);
                prop_assert_eq!(seen.by_death.len(), seen.len());
                prop_assert_eq!(seen.held.values().sum::<usize>(), seen.len());
            }
        }
    }
}
