//! Moment at which a running host gives up layers, because its memory for the model has become
//! smaller. Pure; the rule is in `specs/shard-host.md` 7, *Several models*.

use hearthnet_bus::NodeId;

use super::Held;

/// Time for one host to withdraw, to drain and to load, before the next one follows.
const TURN_MS: u64 = 15_000;
/// Hosts that wait longest; later ones go with them.
const LAST_TURN: usize = 8;
/// Longest wait of a host in its turn for the end of answers.
const BUSY_MS: u64 = 60_000;

/// Wait of a host whose layers do not fit into its memory.
#[derive(Debug, Default)]
pub struct ShrinkWait(Option<u64>);

impl ShrinkWait {
    /// Takes whether the layers of the host `own` fit, and whether it computes nothing. Returns whether
    /// it gives up layers now. Of all hosts of the model, those with smaller ids go before it.
    pub fn look(
        &mut self,
        now_ms: u64,
        (own, others): (NodeId, &[Held]),
        is_too_large: bool,
        is_idle: bool,
    ) -> bool {
        if !is_too_large {
            self.0 = None;
            return false;
        }
        let since = *self.0.get_or_insert(now_ms);
        let before = others.iter().filter(|held| held.node < own).count();
        let turn = (before.min(LAST_TURN) as u64).saturating_mul(TURN_MS);
        let waited = now_ms.saturating_sub(since);
        waited >= turn && (is_idle || waited >= turn.saturating_add(BUSY_MS))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::auto::Situation;
    use super::*;
    use crate::tests::{held, node};

    #[test]
    fn hosts_give_up_layers_one_after_another_and_after_their_answers() {
        let all = ["a", "b", "c"].map(|name| held(name, 0, 5));
        let at = |mine: Held, times: &[(u64, bool)]| -> Vec<bool> {
            let others: Vec<Held> = all.iter().copied().filter(|h| *h != mine).collect();
            let mut wait = ShrinkWait::default();
            let look = |(now_ms, is_idle): &(u64, bool)| {
                wait.look(*now_ms, (mine.node, &others), true, *is_idle)
            };
            times.iter().map(look).collect()
        };
        let idle = [(5_000, true), (19_999, true), (20_000, true)];
        assert_eq!(at(all[0], &idle), [true, true, true]);
        assert_eq!(at(all[1], &idle), [false, false, true]);
        assert_eq!(at(all[2], &idle), [false, false, false]);
        // An answer that runs is waited for, but not for ever.
        let busy = [(5_000, false), (64_999, false), (65_000, false)];
        assert_eq!(at(all[0], &busy), [false, false, true]);
        assert_eq!(at(all[1], &busy), [false, false, false]);
    }

    #[test]
    fn a_wait_begins_anew_when_all_layers_fitted_meanwhile() {
        let (mine, others) = (node("b"), [held("a", 0, 5)]);
        let mut wait = ShrinkWait::default();
        let mut look =
            |now_ms, is_too_large| wait.look(now_ms, (mine, &others), is_too_large, true);
        assert!(!look(0, true) && look(TURN_MS, true));
        assert!(!look(TURN_MS, false) && !look(TURN_MS, true));
        assert!(look(2 * TURN_MS, true));
    }

    #[test]
    fn the_last_of_many_hosts_waits_for_eight_turns() {
        let others: Vec<Held> = (0..20).map(|_| held("a", 0, 5)).collect();
        let mut wait = ShrinkWait::default();
        let mut look = |now_ms| wait.look(now_ms, (node("b"), &others), true, true);
        assert!(!look(0) && !look(8 * TURN_MS - 1) && look(8 * TURN_MS));
    }

    #[test]
    fn a_host_keeps_the_layers_that_others_lack() {
        let gone = BTreeSet::from([node("c")]);
        let kept = |others: &[Held], room| {
            let situation = Situation {
                total: 12,
                room,
                mine: held("b", 2, 9),
                others,
                gone: &gone,
                passed_over: 0,
                measured: None,
            };
            situation.kept()
        };
        assert_eq!(kept(&[], 8), None);
        assert_eq!(kept(&[], 4), Some((2, 5)));
        assert_eq!(kept(&[held("a", 0, 4)], 4), Some((5, 8)));
        // A host that is gone serves nothing.
        assert_eq!(kept(&[held("c", 0, 4)], 4), Some((2, 5)));
        assert_eq!(kept(&[], 0), None);
    }
}
