//! Cache of idle conversations, limited in number and age. Pure.
//!
//! An idle conversation still holds its KV on its hosts. Its next turn starts with the same tokens,
//! so it takes the conversation over and prefills only the new ones. Conversations of other callers
//! are never used, since the number of cached tokens would reveal their prompts. Nor are
//! conversations whose hosts were selected by another rule.
//!
//! A conversation that is taken over is truncated to the common prefix. The prefix must be long
//! enough, and at least as long as the truncated part: a new chat that shares its system prompt
//! with a long conversation does not destroy that one.

use crate::exact::Exact;

/// Holder of the KV of a token sequence.
pub(crate) trait CachedPrefix {
    /// Tokens in order.
    fn held(&self) -> &[u32];

    /// Returns false once its KV is lost.
    fn is_alive(&self) -> bool;
}

/// Limits of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixCacheLimits {
    /// Maximum number of conversations; 0 disables the cache.
    pub count: usize,
    /// Maximum age of a conversation, in milliseconds.
    pub idle_ms: u64,
    /// Minimum common prefix for taking a conversation over, in tokens.
    pub min_prefix: usize,
}

/// Cached conversations, oldest first.
#[derive(Debug)]
pub(crate) struct PrefixCache<T> {
    limits: PrefixCacheLimits,
    entries: Vec<Entry<T>>,
}

/// Identity that must match for a conversation to be taken over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) caller: String,
    pub(crate) model: String,
    /// Rule by which its hosts, and their replacements, are selected.
    pub(crate) exact: Exact,
}

#[derive(Debug)]
struct Entry<T> {
    key: Key,
    since_ms: u64,
    item: T,
}

impl<T: CachedPrefix> PrefixCache<T> {
    pub(crate) fn new(limits: PrefixCacheLimits) -> Self {
        Self {
            limits,
            entries: Vec::new(),
        }
    }

    /// Stores a conversation; returns the evicted ones.
    pub(crate) fn put(&mut self, key: Key, item: T, now_ms: u64) -> Vec<T> {
        self.entries.push(Entry {
            key,
            since_ms: now_ms,
            item,
        });
        let over = self.entries.len().saturating_sub(self.limits.count);
        self.entries.drain(..over).map(|entry| entry.item).collect()
    }

    /// Removes and returns the conversation that shares the longest prefix with the prompt.
    pub(crate) fn take(&mut self, key: &Key, prompt: &[u32]) -> Option<T> {
        let mut best: Option<(usize, usize)> = None;
        for (at, entry) in self.entries.iter().enumerate() {
            if entry.key != *key || !entry.item.is_alive() {
                continue;
            }
            let held = entry.item.held();
            let common = held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            let worth = common >= self.limits.min_prefix.max(1) && common >= held.len() - common;
            // On a tie, the latest one: its hosts are most likely still there.
            if worth && best.is_none_or(|(most, _)| common >= most) {
                best = Some((common, at));
            }
        }
        best.map(|(_, at)| self.entries.remove(at).item)
    }

    /// Removes the oldest conversation.
    pub(crate) fn take_oldest(&mut self) -> Option<T> {
        (!self.entries.is_empty()).then(|| self.entries.remove(0).item)
    }

    /// Removes conversations that are too old or have lost their KV.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<T> {
        let idle_ms = self.limits.idle_ms;
        let gone = |entry: &mut Entry<T>| {
            now_ms.saturating_sub(entry.since_ms) >= idle_ms || !entry.item.is_alive()
        };
        self.entries
            .extract_if(.., gone)
            .map(|entry| entry.item)
            .collect()
    }

    /// Removes the conversations whose key is `of`.
    pub(crate) fn remove(&mut self, of: impl Fn(&Key) -> bool) -> Vec<T> {
        let removed = self.entries.extract_if(.., |entry| of(&entry.key));
        removed.map(|entry| entry.item).collect()
    }

    /// Removes all conversations.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        self.entries.drain(..).map(|entry| entry.item).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq, Clone)]
    struct Fake(Vec<u32>, bool);

    impl CachedPrefix for Fake {
        fn held(&self) -> &[u32] {
            &self.0
        }
        fn is_alive(&self) -> bool {
            self.1
        }
    }

    fn me() -> Key {
        Key {
            caller: "me".into(),
            model: "m".into(),
            exact: Exact::Prefer,
        }
    }

    fn fake(ids: impl IntoIterator<Item = u32>) -> Fake {
        Fake(ids.into_iter().collect(), true)
    }

    fn kept(count: usize, min_prefix: usize) -> PrefixCache<Fake> {
        PrefixCache::new(PrefixCacheLimits {
            count,
            idle_ms: 100,
            min_prefix,
        })
    }

    #[test]
    fn the_next_turn_takes_its_conversation_over() {
        let mut kept = kept(4, 4);
        assert!(kept.put(me(), fake(0..10), 0).is_empty());
        assert!(kept.put(me(), fake(50..60), 0).is_empty());
        let prompt: Vec<u32> = (0..20).collect();
        assert_eq!(kept.take(&me(), &prompt), Some(fake(0..10)));
        assert_eq!(kept.take(&me(), &prompt), None);
        assert_eq!(kept.len(), 1);
    }

    #[test]
    fn conversations_of_other_callers_models_and_rules_are_not_taken() {
        let mut kept = kept(4, 1);
        kept.put(me(), fake(0..10), 0);
        let prompt: Vec<u32> = (0..20).collect();
        let (mut you, mut other, mut exact) = (me(), me(), me());
        you.caller = "you".into();
        other.model = "other".into();
        exact.exact = Exact::Require;
        for key in [you, other, exact] {
            assert_eq!(kept.take(&key, &prompt), None);
        }
        assert_eq!(kept.len(), 1);
    }

    #[test]
    fn a_long_conversation_is_not_forgotten_for_a_short_prefix() {
        let mut kept = kept(4, 4);
        kept.put(me(), fake(0..100), 0);
        let same_instructions: Vec<u32> = (0..49).chain(500..510).collect();
        assert_eq!(kept.take(&me(), &same_instructions), None);
        let half: Vec<u32> = (0..50).chain(500..510).collect();
        assert!(kept.take(&me(), &half).is_some());
    }

    #[test]
    fn a_conversation_without_its_hosts_is_never_taken() {
        let mut kept = kept(4, 1);
        kept.put(me(), Fake((0..10).collect(), false), 0);
        assert_eq!(kept.take(&me(), &[0, 1, 2]), None);
        assert_eq!(kept.expire(0).len(), 1);
    }

    #[test]
    fn the_oldest_goes_first_and_time_ends_them_all() {
        let mut kept = kept(2, 1);
        kept.put(me(), fake([1]), 0);
        kept.put(me(), fake([2]), 50);
        assert_eq!(kept.put(me(), fake([3]), 60), [fake([1])]);
        assert_eq!(kept.expire(149), []);
        assert_eq!(kept.expire(150), [fake([2])]);
        assert_eq!(kept.take_oldest(), Some(fake([3])));
        assert_eq!(kept.take_oldest(), None);
    }

    #[test]
    fn keeping_none_gives_everything_back_at_once() {
        assert_eq!(kept(0, 1).put(me(), fake([1]), 0), [fake([1])]);
    }

    proptest! {
        #[test]
        fn the_longest_common_prefix_that_is_worth_it_wins(
            held in prop::collection::vec(prop::collection::vec(0..3u32, 0..8), 0..6),
            prompt in prop::collection::vec(0..3u32, 1..8),
            min_prefix in 0..4usize,
        ) {
            let mut kept = kept(8, min_prefix);
            for ids in &held {
                kept.put(me(), fake(ids.iter().copied()), 0);
            }
            let common = |ids: &[u32]| ids.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
            let best = held
                .iter()
                .map(|ids| (common(ids), ids.len()))
                .filter(|(n, all)| *n >= min_prefix.max(1) && 2 * n >= *all)
                .map(|(n, _)| n)
                .max();
            let taken = kept.take(&me(), &prompt);
            prop_assert_eq!(taken.map(|fake| common(&fake.0)), best);
        }
    }
}
