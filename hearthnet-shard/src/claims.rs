//! Whose turn it is where places for streams are scarce. Pure.
//!
//! A host never makes anybody wait: an open that finds no place is refused at once, and its caller
//! asks again. Without more, whoever gives a place back would have it again before anybody else
//! asks. So a refused caller has a *claim* for a while: a place that is free is kept for those
//! callers that run fewer streams than the one who asks, and of equals for the one that has been
//! asking for longest.
//!
//! ```text
//! 8 places: A runs 4, B runs 4.    C asks: refused, claims.
//! A closes one, asks again at once: C runs fewer, so A is refused, and claims.
//! C asks again: it has the place.
//! ```
//!
//! A caller has one claim, however often it asks, and loses it when it does not come back. Nobody has
//! to wait for ever for those that give nothing back: a claim is *due* after a while, and then a place
//! is taken from whoever has more than its share.

use std::collections::BTreeMap;
use std::time::Duration;

use hearthnet_transport::NodeId;

/// How long a refused caller may take to ask again: the longest pause between two requests for
/// room (2 s, distributed-inference.md 4.3), and half of that for a slow machine.
pub(crate) const HOLDS: Duration = Duration::from_secs(3);

/// How long a claim waits until it is due: most answers have ended by then, and whoever waits for one
/// is still there.
pub(crate) const DUE: Duration = Duration::from_secs(10);

/// Most claims: more callers than share a host in earnest. Who comes later has none.
const MOST: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct Claims(BTreeMap<NodeId, Claim>);

#[derive(Debug, Clone, Copy)]
struct Claim {
    /// Since when its caller has been asking.
    since: Duration,
    /// When it last did.
    last: Duration,
}

impl Claims {
    /// How many callers come before this one. `running` says how many streams a caller runs.
    pub(crate) fn ahead(
        &mut self,
        caller: NodeId,
        now: Duration,
        running: impl Fn(&NodeId) -> u32,
    ) -> usize {
        self.0
            .retain(|_, claim| now.saturating_sub(claim.last) <= HOLDS);
        let own = self.0.get(&caller).map_or(now, |claim| claim.since);
        let rank = (running(&caller), own, caller);
        self.0
            .iter()
            .filter(|(other, claim)| {
                **other != caller && (running(other), claim.since, **other) < rank
            })
            .count()
    }

    /// Whether a caller has waited for long enough.
    pub(crate) fn is_due(&self, caller: NodeId, now: Duration) -> bool {
        let claim = self.0.get(&caller);
        claim.is_some_and(|claim| now.saturating_sub(claim.since) >= DUE)
    }

    /// A caller was refused.
    pub(crate) fn refused(&mut self, caller: NodeId, now: Duration) {
        if self.0.len() >= MOST && !self.0.contains_key(&caller) {
            return;
        }
        let claim = self.0.entry(caller).or_insert(Claim {
            since: now,
            last: now,
        });
        claim.last = now;
    }

    /// A caller has got what it asked for.
    pub(crate) fn granted(&mut self, caller: NodeId) {
        self.0.remove(&caller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn key(n: u8) -> NodeId {
        NodeId::from_checked([n; 32])
    }

    #[test]
    fn who_runs_fewer_streams_is_first_and_of_equals_who_has_been_asking_for_longest() {
        let mut claims = Claims::default();
        let running = |caller: &NodeId| u32::from(*caller == key(1)) * 4;
        claims.refused(key(1), at(0));
        claims.refused(key(2), at(1));
        claims.refused(key(3), at(2));
        assert_eq!(claims.ahead(key(1), at(3), running), 2);
        assert_eq!(claims.ahead(key(2), at(3), running), 0);
        assert_eq!(claims.ahead(key(3), at(3), running), 1);
        // A newcomer comes after all that run no more than it does.
        assert_eq!(claims.ahead(key(4), at(3), running), 2);
        claims.granted(key(2));
        assert_eq!(claims.ahead(key(3), at(3), running), 0);
    }

    #[test]
    fn a_caller_that_does_not_come_back_holds_nothing_up_and_asking_often_gains_nothing() {
        let mut claims = Claims::default();
        for second in 0..10 {
            claims.refused(key(1), at(second));
        }
        claims.refused(key(2), at(9));
        assert_eq!(claims.ahead(key(2), at(9), |_| 0), 1);
        assert_eq!(claims.ahead(key(2), at(9) + HOLDS, |_| 0), 1);
        let later = at(9) + HOLDS + Duration::from_millis(1);
        assert_eq!(claims.ahead(key(2), later, |_| 0), 0);
    }

    #[test]
    fn claims_are_bounded() {
        let mut claims = Claims::default();
        for n in 0..2 * MOST {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
            claims.refused(NodeId::from_checked(bytes), at(1));
        }
        assert_eq!(claims.0.len(), MOST);
    }
}
