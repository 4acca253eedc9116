//! Time of a decode batch through all layers of a host, as a running chat sees it. Pure.
//!
//! An average would tell of the moment: the first steps after a pause find a sleeping processor and
//! cold caches, and one interruption by another program outweighs many steps. So batches are taken in
//! blocks, of which the median counts, and the shortest of the last blocks is the pace. A machine that
//! other programs keep busy has no short block.

use std::collections::VecDeque;
use std::time::Duration;

/// Batches in a block.
const BLOCK: usize = 16;
/// Blocks that count: the batches of about ten short answers.
const BLOCKS: usize = 32;

#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// Batches since the last whole block.
    block: Vec<Duration>,
    /// Medians of the last blocks.
    medians: VecDeque<Duration>,
}

impl Pace {
    /// Records a batch through `layers` of the `all` layers of the host.
    pub(crate) fn record(&mut self, took: Duration, layers: u32, all: u32) {
        self.block.push(took.saturating_mul(all) / layers.max(1));
        if self.block.len() < BLOCK {
            return;
        }
        if self.medians.len() == BLOCKS {
            self.medians.pop_front();
        }
        self.medians.push_back(median(&mut self.block));
        self.block.clear();
    }

    /// Pace so far; zero without any batch.
    pub(crate) fn typical(&self) -> Duration {
        let shortest = self.medians.iter().min().copied();
        shortest.unwrap_or_else(|| median(&mut self.block.clone()))
    }
}

/// Median, of an even number the shorter one in the middle; zero of none.
fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    let middle = times.len().saturating_sub(1) / 2;
    times.get(middle).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pace: &mut Pace, count: usize, us: u64) {
        (0..count).for_each(|_| pace.record(Duration::from_micros(us), 10, 10));
    }

    fn us(pace: &Pace) -> u128 {
        pace.typical().as_micros()
    }

    #[test]
    fn the_first_batches_count_until_a_block_is_whole() {
        let mut pace = Pace::default();
        assert_eq!(us(&pace), 0);
        record(&mut pace, 1, 900);
        assert_eq!(us(&pace), 900);
        record(&mut pace, 2, 700);
        assert_eq!(us(&pace), 700);
    }

    #[test]
    fn neither_cold_blocks_nor_interruptions_make_a_host_slower() {
        let mut pace = Pace::default();
        record(&mut pace, BLOCK, 1_500);
        assert_eq!(us(&pace), 1_500);
        record(&mut pace, BLOCK - 3, 800);
        record(&mut pace, 3, 90_000);
        assert_eq!(us(&pace), 800);
        record(&mut pace, BLOCK, 1_500);
        assert_eq!(us(&pace), 800);
    }

    #[test]
    fn a_machine_that_stays_busy_becomes_slower() {
        let mut pace = Pace::default();
        record(&mut pace, BLOCK, 800);
        record(&mut pace, BLOCK * (BLOCKS - 1), 1_500);
        assert_eq!(us(&pace), 800);
        record(&mut pace, BLOCK, 1_500);
        assert_eq!(us(&pace), 1_500);
    }

    #[test]
    fn a_batch_through_some_layers_counts_as_through_all() {
        let mut pace = Pace::default();
        pace.record(Duration::from_micros(300), 3, 30);
        assert_eq!(us(&pace), 3_000);
    }
}
