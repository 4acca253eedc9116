/// Random numbers of a seed, the same on all machines: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// Next number.
    #[allow(clippy::should_implement_trait, reason = "the numbers have no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
