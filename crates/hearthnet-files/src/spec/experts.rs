//! Mixtures of experts.

use serde::{Deserialize, Serialize};

use super::check::{SpecError, ensure, is_default, positive, size};

/// Limit of experts per layer; the largest models have some hundreds.
pub const MAX_EXPERTS: u32 = 4096;
/// Limit of experts per row; current models use 2 to 16.
pub const MAX_EXPERTS_USED: u32 = 64;

/// Mixture of experts: a row goes through the `used` experts that the router scores highest.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSpec {
    pub count: u32,
    /// Experts per row.
    pub used: u32,
    /// Whether the weights of a row's experts add up to 1. If not, they are those of the softmax
    /// over all experts, or the sigmoids.
    pub normalise: bool,
    /// Whether the router and the matrices of the experts have biases.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bias: bool,
    /// Expert that all rows go through, beside those that the router selects.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared: Option<SharedExpertSpec>,
    /// First blocks, which have a dense feed-forward layer instead of experts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub leading: Option<LeadingSpec>,
    /// Whether weights are sigmoids of the scores, and not a softmax.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sigmoid: bool,
    /// Whether the choice of experts, but not their weights, adds a value of each expert to its
    /// sigmoid.
    #[serde(default, skip_serializing_if = "is_default")]
    pub correction: bool,
    /// Limits the choice to the experts of some groups.
    #[serde(default, skip_serializing_if = "is_default")]
    pub groups: Option<GroupSpec>,
    /// Factor of the weights; `None` is 1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scale: Option<f32>,
    /// Whether the router and the experts normalise the residual stream each for themselves, and
    /// the outputs of the experts and of the shared expert are normalised before they are added.
    /// The weight of each expert then has a stored factor, too.
    #[serde(default, skip_serializing_if = "is_default")]
    pub norms: bool,
}

/// Expert that all rows go through. Its output is multiplied by the sigmoid of a score.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpertSpec {
    /// Width, in values.
    pub ffn: u32,
    /// Whether there is no score, and the output is added as it is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub plain: bool,
}

/// First blocks of a model with experts, which have none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeadingSpec {
    pub blocks: u32,
    /// Width of their feed-forward layers, in values.
    pub ffn: u32,
}

/// Groups of consecutive experts: a row chooses among the experts of the `used` best groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// A divisor of [`ExpertSpec::count`].
    pub count: u32,
    pub used: u32,
}

impl ExpertSpec {
    pub(super) fn check(self, layers: u32) -> Result<(), SpecError> {
        size("experts.shared.ffn", self.shared.map_or(1, |s| s.ffn))?;
        let known = (1..=MAX_EXPERTS).contains(&self.count);
        ensure(known, "experts.count", "must be between 1 and 4096")?;
        let used = (1..=MAX_EXPERTS_USED.min(self.count)).contains(&self.used);
        let reason = "must be between 1 and 64, and at most the number of experts";
        ensure(used, "experts.used", reason)?;
        positive("experts.scale", self.scale)?;
        let plain = self.shared.is_some_and(|shared| shared.plain);
        let whole = !self.norms || plain && !self.bias;
        let reason = "must be combined with a shared expert without score, and not with biases";
        ensure(whole, "experts.norms", reason)?;
        let possible = self.sigmoid || !self.correction;
        let reason = "must be 2 (sigmoid) in a model that corrects the choice of experts";
        ensure(possible, "experts.sigmoid", reason)?;
        if let Some(LeadingSpec { blocks, ffn }) = self.leading {
            size("experts.leading.ffn", ffn)?;
            let some = (1..layers).contains(&blocks);
            let reason = "must be below the number of blocks";
            ensure(some, "experts.leading.blocks", reason)?;
        }
        self.groups.map_or(Ok(()), |groups| groups.check(&self))
    }
}

impl GroupSpec {
    fn check(self, experts: &ExpertSpec) -> Result<(), SpecError> {
        let divides = self.count > 0 && experts.count.is_multiple_of(self.count);
        let reason = "must divide the number of experts";
        ensure(divides, "experts.groups.count", reason)?;
        let each = experts.count / self.count;
        // A group's score is the sum of its two best sigmoids.
        let reason = "must leave at least 2 experts in each group";
        ensure(!experts.sigmoid || each > 1, "experts.groups.count", reason)?;
        let some = (1..=self.count).contains(&self.used);
        let reason = "must be between 1 and the number of groups";
        ensure(some, "experts.groups.used", reason)?;
        let enough = u64::from(self.used) * u64::from(each) >= u64::from(experts.used);
        let reason = "must leave at least as many experts as a row uses";
        ensure(enough, "experts.groups.used", reason)
    }
}
