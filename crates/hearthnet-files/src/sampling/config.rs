//! Settings of the sampler.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Largest number of reported log probabilities. OpenAI's API accepts 20.
pub const MAX_LOGPROBS: u8 = 20;
/// Longest window of penalties, in tokens.
pub const MAX_PENALTY_WINDOW: u32 = 1 << 20;

/// Maximum number of tokens with a bias.
pub const MAX_BIASES: usize = 1024;
/// Range of a bias, as in OpenAI's API.
const BIAS: RangeInclusive<f32> = -100.0..=100.0;

pub(super) const TEMPERATURE: RangeInclusive<f32> = 0.0..=100.0;
/// Range of [`SamplerConfig::top_p`] and [`SamplerConfig::min_p`].
pub(super) const SHARE: RangeInclusive<f32> = 0.0..=1.0;
pub(super) const REPETITION: RangeInclusive<f32> = 0.0625..=16.0;
/// Range of presence and frequency penalty.
pub(super) const PENALTY: RangeInclusive<f32> = -2.0..=2.0;

/// Settings of a sampler. The default is greedy.
///
/// The steps follow llama.cpp's default order: penalties, top-k, top-p, min-p, temperature, then
/// the draw. So the temperature does not affect top-p and min-p.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerConfig {
    /// Divides the logits before the draw, 0 to 100. 0 is greedy: the best token, no draw.
    pub temperature: f32,
    /// Keeps the best k tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the best tokens until their probabilities sum up to p, 0 to 1; the token that
    /// reaches p is kept too, so 0 keeps the best one, and 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this times as likely as the best one, 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits of recent tokens, and multiplies their negative ones; 1/16
    /// to 16, 1 does nothing.
    pub repetition_penalty: f32,
    /// Taken off the logits of recent tokens, -2 to 2.
    pub presence_penalty: f32,
    /// Taken off the logits of recent tokens once for each time they occurred, -2 to 2.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, -100 to 100, before penalties. Each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens of prompt and answer that penalties look back over, 0 to 1,048,576; 0 disables
    /// penalties.
    pub penalty_window: u32,
    /// Whether penalties count the tokens of the prompt too, as in llama.cpp; OpenAI's count only
    /// the answer. The caller decides by it whether to show the sampler the
    /// prompt.
    pub penalise_prompt: bool,
    /// Seed of all draws: the same seed gives the same tokens on every machine. Required unless the
    /// choice is greedy. A caller without a preference draws a seed and reports it.
    pub seed: Option<u64>,
    /// Reports the log probability of the chosen token and of the best n, 0 to 20, in the model's
    /// own distribution: before penalties, cuts and temperature.
    pub logprobs: Option<u8>,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            penalty_window: 64,
            penalise_prompt: true,
            seed: None,
            logprobs: None,
        }
    }
}

/// Why settings are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerConfigError {
    /// A number is outside its range, or NaN.
    #[error("`{field}` is {value}; it must be from {min} to {max}")]
    OutOfRange {
        /// Field of [`SamplerConfig`].
        field: &'static str,
        value: f64,
        min: f64,
        max: f64,
    },

    /// The choice is random, but there is no seed.
    #[error("`seed` is needed when `temperature` is above 0: draw one and report it")]
    SeedMissing,
}

impl SamplerConfig {
    /// Checks all fields.
    ///
    /// # Errors
    /// [`SamplerConfigError`] for the first field out of range.
    pub fn validate(&self) -> Result<(), SamplerConfigError> {
        let floats = [
            ("temperature", self.temperature, TEMPERATURE),
            ("top_p", self.top_p, SHARE),
            ("min_p", self.min_p, SHARE),
            ("repetition_penalty", self.repetition_penalty, REPETITION),
            ("presence_penalty", self.presence_penalty, PENALTY),
            ("frequency_penalty", self.frequency_penalty, PENALTY),
        ];
        let biases = self.logit_bias.iter();
        let biases = biases.map(|(_, bias)| ("logit_bias", *bias, BIAS));
        let floats = floats
            .into_iter()
            .chain(biases)
            .map(|(field, value, range)| {
                let (min, max) = range.into_inner();
                (field, f64::from(value), f64::from(min), f64::from(max))
            });
        let (window, logprobs) = (self.penalty_window, self.logprobs.unwrap_or(0));
        let integers = [
            (
                "penalty_window",
                window.into(),
                0.0,
                MAX_PENALTY_WINDOW.into(),
            ),
            ("logprobs", logprobs.into(), 0.0, MAX_LOGPROBS.into()),
        ];
        for (field, value, min, max) in floats.chain(integers) {
            if !(min..=max).contains(&value) {
                return Err(SamplerConfigError::OutOfRange {
                    field,
                    value,
                    min,
                    max,
                });
            }
        }
        if self.temperature > 0.0 && self.seed.is_none() {
            return Err(SamplerConfigError::SeedMissing);
        }
        Ok(())
    }

    /// Whether a penalty can change a logit.
    pub fn penalises(&self) -> bool {
        self.penalty_window > 0
            && (self.repetition_penalty != 1.0
                || self.presence_penalty != 0.0
                || self.frequency_penalty != 0.0)
    }
}
