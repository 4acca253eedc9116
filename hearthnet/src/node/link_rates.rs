//! Bandwidth of links: the best rate at which weights came from a member.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use parking_lot::Mutex;

/// Least time and bytes of a rate.
const LEAST: (Duration, u64) = (Duration::from_secs(1), 4 << 20);
/// Least time and bytes of a rate on a slow link.
const LEAST_SLOW: (Duration, u64) = (Duration::from_secs(10), 1 << 20);

/// Best rates by member, in bytes per second, since this process began. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinkRates(Arc<Mutex<BTreeMap<NodeId, u64>>>);

impl LinkRates {
    fn note(&self, node: NodeId, rate: u64) {
        let mut all = self.0.lock();
        let best = all.entry(node).or_default();
        *best = rate.max(*best);
    }

    /// Bandwidth of a link in kbit/s; 0 if it is not known.
    pub(crate) fn kbit_s(&self, node: &NodeId) -> u32 {
        let rate = self.0.lock().get(node).copied().unwrap_or_default();
        u32::try_from(rate / 125).unwrap_or(u32::MAX)
    }
}

/// Rate of the transfer from one member.
#[derive(Debug)]
pub(crate) struct RateMeter {
    pub(crate) node: NodeId,
    pub(crate) rates: LinkRates,
    pub(crate) window: Mutex<Window>,
}

impl RateMeter {
    /// Counts the bytes of a read that has just ended.
    pub(crate) fn received(&self, bytes: usize) {
        let rate = self.window.lock().received(bytes as u64, Instant::now());
        if let Some(rate) = rate {
            self.rates.note(self.node, rate);
        }
    }
}

/// Bytes since the end of an earlier read. Reads overlap, so a rate counts from the end of one read
/// to the end of another.
#[derive(Debug, Default)]
pub(crate) struct Window {
    since: Option<Instant>,
    bytes: u64,
}

impl Window {
    /// Bytes per second, once a window is long enough.
    fn received(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        let Some(since) = self.since else {
            self.since = Some(now);
            return None;
        };
        self.bytes = self.bytes.saturating_add(bytes);
        let time = now.saturating_duration_since(since);
        let is_enough = |(least, bytes): (Duration, u64)| time >= least && self.bytes >= bytes;
        if !is_enough(LEAST) && !is_enough(LEAST_SLOW) {
            return None;
        }
        let rate = self.bytes as f64 / time.as_secs_f64();
        *self = Self {
            since: Some(now),
            bytes: 0,
        };
        Some(rate as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_from_the_end_of_one_read_to_the_end_of_another() {
        let (begin, mut window) = (Instant::now(), Window::default());
        let mut read = |ms, mib: u64| {
            let now = begin + Duration::from_millis(ms);
            window.received(mib << 20, now)
        };
        // Bytes before the window do not count.
        assert_eq!(read(0, 100), None);
        assert_eq!(read(500, 8), None);
        assert_eq!(read(1_000, 8), Some(16 << 20));
        // The next window begins there.
        assert_eq!(read(1_900, 2), None);
        assert_eq!(read(3_000, 2), Some(2 << 20));
        // A slow link needs longer.
        assert_eq!(read(9_000, 1), None);
        assert_eq!(read(13_000, 1), Some((2 << 20) / 10));
    }

    #[test]
    fn the_best_rate_of_each_member_is_kept() {
        let [near, far] = [[1; 32], [2; 32]].map(NodeId::from_checked);
        let rates = LinkRates::default();
        assert_eq!(rates.kbit_s(&near), 0);
        for rate in [1_000_000, 125_000_000, 7] {
            rates.note(near, rate);
        }
        rates.clone().note(far, u64::MAX);
        assert_eq!(rates.kbit_s(&near), 1_000_000);
        assert_eq!(rates.kbit_s(&far), u32::MAX);
    }
}
