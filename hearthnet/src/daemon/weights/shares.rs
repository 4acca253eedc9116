//! Number of models that share the memory of this node. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// Time for which another number of models must hold. An adoption that is taken back within it
/// disturbs no other model.
const STABLE: Duration = Duration::from_secs(10);

/// Number of models that share, and the next one.
#[derive(Debug, Default)]
pub(super) struct Shares {
    models: usize,
    /// Another number, and since when it holds.
    next: Option<(usize, Instant)>,
}

impl Shares {
    /// Takes the number of usable models. Returns the number that shared until then, if another one
    /// shares from now on. `at_once`: no layers are served, and no other model is about to be usable.
    pub(super) fn look(&mut self, now: Instant, usable: usize, at_once: bool) -> Option<usize> {
        if usable == self.models {
            self.next = None;
            return None;
        }
        let before = self.next.filter(|(models, _)| *models == usable);
        let since = before.map_or(now, |(_, since)| since);
        self.next = Some((usable, since));
        if !at_once && now.saturating_duration_since(since) < STABLE {
            return None;
        }
        self.next = None;
        Some(std::mem::replace(&mut self.models, usable))
    }

    pub(super) fn models(&self) -> usize {
        self.models
    }

    /// Time of the next look, if another number is awaited.
    pub(super) fn at(&self) -> Option<Instant> {
        self.next.map(|(_, since)| since + STABLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_number_of_models_counts_when_it_has_held_for_a_while() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut shares = Shares::default();
        // The first model is served at once.
        assert_eq!(shares.look(at(0), 0, true), None);
        assert_eq!(shares.look(at(0), 1, true), Some(0));
        assert_eq!((shares.models(), shares.at()), (1, None));
        // A model that is adopted and dropped every five seconds changes nothing.
        for seconds in (10..1_000).step_by(10) {
            assert_eq!(shares.look(at(seconds), 2, false), None);
            assert_eq!(shares.at(), Some(at(seconds + 10)));
            assert_eq!(shares.look(at(seconds + 5), 1, false), None);
            assert_eq!(shares.at(), None);
        }
        assert_eq!(shares.look(at(1_000), 2, false), None);
        assert_eq!(shares.look(at(1_009), 2, false), None);
        // A third one begins the wait anew.
        assert_eq!(shares.look(at(1_009), 3, false), None);
        assert_eq!(shares.look(at(1_018), 3, false), None);
        assert_eq!(shares.look(at(1_019), 3, false), Some(1));
        assert_eq!(shares.models(), 3);
        assert_eq!(shares.look(at(1_020), 2, false), None);
        assert_eq!(shares.look(at(1_030), 2, false), Some(3));
    }
}
