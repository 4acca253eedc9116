//! Order of refused callers while stream slots are scarce. Pure.
//!
//! A host queues no opens: an open that finds no free slot is refused at once, and its caller asks
//! again. On its own that would favour a caller that closes a stream and reopens at once. So a
//! refused caller holds a *claim* for a while: a free slot is kept for callers that run fewer
//! streams than the asking caller and, among equals, for the caller that has been asking for
//! longest.
//!
//! ```text
//! 8 slots: A runs 4, B runs 4.     C asks: refused, claims.
//! A closes one, asks again at once: C runs fewer, so A is refused, and claims.
//! C asks again: it gets the slot.
//! ```
//!
//! A caller has one claim, however often it asks, and loses it when it stops asking. Callers that
//! keep all their streams cannot block a claim for ever: after a while it is *due*, and the host
//! then preempts a stream of a caller that has more than its share.

use std::collections::BTreeMap;
use std::time::Duration;

use hearthnet_transport::NodeId;

/// How long a claim outlives its caller's last request: the longest pause between two requests for
/// room (2 s, distributed-inference.md 4.3), plus half of that for a slow machine.
pub(crate) const HOLDS: Duration = Duration::from_secs(3);

/// Age at which a claim is due: most answers have ended by then, and the caller has not yet given
/// up.
pub(crate) const DUE: Duration = Duration::from_secs(10);

/// Limit of claims: more callers than share a host in practice. Further callers have none.
const MOST: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct Claims(BTreeMap<NodeId, Claim>);

#[derive(Debug, Clone, Copy)]
struct Claim {
    /// Time of the caller's first request.
    since: Duration,
    /// Time of its latest request.
    last: Duration,
}

impl Claims {
    /// Counts the callers before this one. `running` returns the number of streams that a caller
    /// runs.
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

    /// Returns whether the caller's claim is due.
    pub(crate) fn is_due(&self, caller: NodeId, now: Duration) -> bool {
        let claim = self.0.get(&caller);
        claim.is_some_and(|claim| now.saturating_sub(claim.since) >= DUE)
    }

    /// Records a refusal: creates or renews the caller's claim.
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

    /// Removes the claim of a caller that got a slot.
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
    fn claims_are_ordered_by_running_streams_then_by_age() {
        let mut claims = Claims::default();
        let running = |caller: &NodeId| u32::from(*caller == key(1)) * 4;
        claims.refused(key(1), at(0));
        claims.refused(key(2), at(1));
        claims.refused(key(3), at(2));
        assert_eq!(claims.ahead(key(1), at(3), running), 2);
        assert_eq!(claims.ahead(key(2), at(3), running), 0);
        assert_eq!(claims.ahead(key(3), at(3), running), 1);
        // A new caller comes after all callers that run no more streams than it does.
        assert_eq!(claims.ahead(key(4), at(3), running), 2);
        claims.granted(key(2));
        assert_eq!(claims.ahead(key(3), at(3), running), 0);
    }

    #[test]
    fn claims_expire_and_repeated_requests_gain_nothing() {
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
