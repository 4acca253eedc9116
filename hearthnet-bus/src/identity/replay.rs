//! Replay detection: a bounded record of used tokens.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::NodeId;

/// Identity of a token. Ids are unique only among the grants of one issuer.
type Token = (NodeId, [u8; 16]);

/// Used tokens, kept until they expire, in bounded memory.
///
/// If there is no room, tokens are refused, because a forgotten token could be used twice. Room is
/// shared by *holders*, the parties of `specs/gossip.md` section 4. Each holder has 32 places of
/// its own. Beyond these, it may take a common place only while it has fewer common places than are
/// free. So *n* holders that want all common places leave one part in *n* + 1 free, and a holder
/// that uses few places is never refused.
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
    /// Free common places.
    free: usize,
    seen: BTreeSet<Token>,
    /// Tokens by expiry, each with the holder of its place.
    by_expiry: BTreeMap<(u64, Token), NodeId>,
    /// Places in use per holder: its own first, then common ones.
    held: BTreeMap<NodeId, usize>,
}

/// Places of each holder beyond the common ones. A chat asks each of its hosts for one grant, and a
/// call is remembered for four minutes; a person causes fewer than 32 calls in that time. The 4,096
/// members of a full community take 26 MiB with these, if each is a party of its own.
const OWN: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayError {
    /// The token was recorded before.
    Seen,
    /// The holder has no place left.
    Full,
}

impl ReplayCache {
    /// Creates a cache with `capacity` common places for unexpired tokens. A token takes about 200
    /// bytes, allocated when it is recorded.
    pub fn new(capacity: usize) -> Self {
        Self {
            free: capacity,
            seen: BTreeSet::new(),
            by_expiry: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// Records a token in a place of `holder` until `expires_at`: the first moment at which every
    /// check refuses it, in the unit of `now`.
    pub(crate) fn note(
        &mut self,
        token: Token,
        holder: NodeId,
        expires_at: u64,
        now: u64,
    ) -> Result<(), ReplayError> {
        self.forget_expired(now);
        if self.seen.contains(&token) {
            return Err(ReplayError::Seen);
        }
        let held = self.held.get(&holder).copied().unwrap_or(0);
        if held >= OWN {
            if held - OWN >= self.free {
                return Err(ReplayError::Full);
            }
            self.free -= 1;
        }
        self.seen.insert(token);
        self.by_expiry.insert((expires_at, token), holder);
        self.held.insert(holder, held + 1);
        Ok(())
    }

    /// Number of remembered tokens.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.seen.len()
    }

    fn forget_expired(&mut self, now: u64) {
        while let Some(first) = self.by_expiry.first_entry() {
            let (expires_at, token) = *first.key();
            if expires_at > now {
                break;
            }
            let holder = first.remove();
            self.seen.remove(&token);
            if let Entry::Occupied(mut held) = self.held.entry(holder) {
                let left = *held.get() - 1;
                if left >= OWN {
                    self.free += 1;
                }
                match left {
                    0 => drop(held.remove()),
                    _ => *held.get_mut() = left,
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
    use crate::testing::id as issuer;
    use crate::{Capability, Grant, GrantError};

    fn grant(issuer: u8, id: u8, expires: u64) -> Grant {
        let issuer = crate::testing::id(issuer);
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

    /// Number of a call as the id of its token.
    fn number(n: u32) -> [u8; 16] {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&n.to_be_bytes());
        id
    }

    /// Records calls of this holder, numbered from `from`, until one is refused. Returns their
    /// number.
    fn fill(seen: &mut ReplayCache, holder: NodeId, from: u32, expires_at: u64, now: u64) -> usize {
        let noted = (from..).map(|n| seen.note((holder, number(n)), holder, expires_at, now));
        noted.take_while(|noted| *noted == Ok(())).count()
    }

    #[test]
    fn a_full_cache_refuses_instead_of_forgetting() {
        let mut seen = ReplayCache::new(4);
        let first = OWN + 2;
        assert_eq!(fill(&mut seen, issuer(1), 0, 160, 100), first);
        assert_eq!(fill(&mut seen, issuer(1), 1000, 160, 100), 0);
        let replayed = seen.note((issuer(1), [0; 16]), issuer(1), 160, 100);
        assert_eq!(replayed, Err(ReplayError::Seen));
        // Expired tokens free their places.
        assert_eq!(fill(&mut seen, issuer(1), 2000, 260, 160), first);
        assert_eq!((seen.len(), seen.free), (first, 2));
    }

    /// Members that post-date 10 calls a second by 115 s have each remembered for 235 s.
    #[test]
    fn a_member_that_calls_seldom_has_a_place_beside_greedy_ones() {
        for greedy in [1, 4, 8, 40] {
            let mut seen = ReplayCache::new(8192);
            let mut refused = 0;
            for second in 0..600u32 {
                let now = u64::from(second);
                // Each second another holder begins.
                for holder in 1..=greedy.min(second) {
                    let holder = issuer(u8::try_from(holder).unwrap());
                    for n in 0..10 {
                        let token = (holder, number(second * 10 + n));
                        let noted = seen.note(token, holder, now + 235, now);
                        refused += usize::from(noted.is_err());
                    }
                }
                // At one call in four seconds, remembered for 120 s, 30 are held at a time.
                if second % 4 == 0 {
                    let token = (issuer(99), number(second));
                    let noted = seen.note(token, issuer(99), now + 120, now);
                    assert_eq!(noted, Ok(()), "{greedy} greedy, second {second}");
                }
            }
            // A single holder that calls as often as it may has a place for each call.
            assert_eq!(refused > 0, greedy > 1, "{greedy} greedy: {refused}");
            let parties = usize::try_from(greedy).unwrap() + 1;
            assert!(seen.len() <= 8192 + parties * OWN);
        }
    }

    #[test]
    fn greedy_holders_leave_an_equal_part_free() {
        let mut seen = ReplayCache::new(8192);
        for second in 0..1000u32 {
            let now = u64::from(second);
            // Each holder wants 100 places a second, and the first begins long before the last.
            for holder in (1..=4).filter(|holder| u32::from(*holder) * 50 <= second) {
                for n in 0..100 {
                    let token = (issuer(holder), number(second * 100 + n));
                    let _full = seen.note(token, issuer(holder), now + 240, now);
                }
            }
        }
        let held: Vec<usize> = (1..=4).map(|n| seen.held[&issuer(n)] - OWN).collect();
        assert!(
            held.iter().all(|held| held.abs_diff(8192 / 5) < 200),
            "{held:?}"
        );
        assert!(seen.free.abs_diff(8192 / 5) < 200, "{}", seen.free);
    }

    #[test]
    fn nodes_of_one_holder_share_its_places() {
        let (one, other) = (issuer(1), issuer(9));
        let mut seen = ReplayCache::new(0);
        for n in 1..=OWN as u8 {
            assert_eq!(seen.note((issuer(n), [0; 16]), one, 160, 100), Ok(()));
        }
        let next = (issuer(77), [0; 16]);
        assert_eq!(seen.note(next, one, 160, 100), Err(ReplayError::Full));
        assert_eq!(seen.note((other, [1; 16]), other, 160, 100), Ok(()));
        // An expired token frees the place of its holder.
        assert_eq!(seen.note(next, one, 260, 160), Ok(()));
        assert_eq!(seen.held.get(&one), Some(&1));
        assert_eq!(seen.held.len(), 1);
    }

    proptest! {
        /// Compares with a model that remembers everything: no token is accepted twice while it can
        /// still be valid, and the bound holds at every step.
        #[test]
        fn no_token_is_accepted_twice_in_its_lifetime(
            steps in proptest::collection::vec((1u8..3, 0u8..64, 60u64..120, 0u64..3), 1..300),
        ) {
            let mut seen = ReplayCache::new(0);
            let mut accepted: HashMap<([u8; 16], NodeId), u64> = HashMap::new();
            let mut now = 1000;
            for (issuer, id, life, pass) in steps {
                now += pass;
                let token = grant(issuer, id, now + life);
                let before = accepted.get(&(token.id, token.issuer)).copied();
                match remember(&mut seen, &token, now, 10) {
                    Ok(()) => {
                        prop_assert!(before.is_none_or(|expires_at| expires_at <= now));
                        accepted.insert((token.id, token.issuer), token.expires + 10);
                    }
                    Err(GrantError::Replayed) => prop_assert!(before.is_some_and(|d| d > now)),
                    Err(error) => prop_assert_eq!(error, GrantError::CacheFull),
                }
                prop_assert!(seen.held.values().all(|held| *held <= OWN));
                prop_assert_eq!(seen.by_expiry.len(), seen.len());
                prop_assert_eq!(seen.held.values().sum::<usize>(), seen.len());
            }
        }
    }
}
