//! Random numbers of a seed.

use hearthnet_testkit::SplitMix64;

/// Stream of random numbers, the same on all machines.
#[derive(Debug, Clone)]
pub(crate) struct Random(SplitMix64);

impl Random {
    /// A stream of numbers for one purpose, so that its draws do not shift those of another one.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut random = SplitMix64(seed ^ purpose.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        Self(random)
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.0.next()
    }

    /// A number below `end`, or 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.draw().checked_rem(end).unwrap_or(0)
    }

    /// A number between both, inclusive.
    pub(crate) fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most.saturating_sub(least) + 1)
    }

    /// True in one of `of` cases.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}
