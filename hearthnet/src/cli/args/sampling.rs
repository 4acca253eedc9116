//! Arguments for sampling and for the end of an answer.

use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_tokens::stop::StopMatcher;

use crate::cli::failure::{Failure, Kind};

#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied [default: the model's own].
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f32>,
    /// Same seed, same text [default: random; --explain prints it].
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Most tokens to generate [default: as many as the model's context leaves; demo: 256].
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    /// Consider only the K likeliest tokens; 0 is all [default of this and the following: the
    /// model's own].
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Consider only the likeliest tokens that together have this probability.
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f32>,
    /// Drop tokens less likely than this fraction of the likeliest.
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens that occurred; 1 is off.
    #[arg(long, value_name = "F")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract this from the logits of tokens that occurred.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract this for every time a token occurred.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// End the answer at this text (repeat for more).
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Report the log-probabilities of the N likeliest tokens per token, 0 for the sampled one only.
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<u8>,
}

impl SamplingArgs {
    /// Sampling values given on the command line; the others are `None`.
    pub(crate) fn choice(&self) -> SamplingChoice {
        SamplingChoice {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
        }
    }

    /// Sampler settings from the flags, else from the model's own values (`own`). A random seed is
    /// drawn if none was given.
    pub(crate) fn over(&self, own: &SamplingChoice) -> Result<SamplerConfig, Failure> {
        let seed = match self.seed {
            Some(seed) => seed,
            None => draw_seed()?,
        };
        Ok(self.choice().or_models(own).over(SamplerConfig {
            seed: Some(seed),
            logprobs: self.logprobs,
            ..SamplerConfig::default()
        }))
    }

    /// Checks the values that no engine accepts, before any work starts.
    ///
    /// # Errors
    /// Returns `bad_request`, naming the flag and its range.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let wrong = |why: String| {
            Failure::new(Kind::BadRequest, why).hint("`hearthnet chat --help` explains the values")
        };
        if self.max_tokens == Some(0) {
            return Err(wrong("`max_tokens` is 0; it must be at least 1".into()));
        }
        let config = self.choice().over(SamplerConfig {
            seed: Some(0),
            logprobs: self.logprobs,
            ..SamplerConfig::default()
        });
        config.validate().map_err(|e| wrong(e.to_string()))?;
        StopMatcher::new(self.stop.clone()).map_err(|e| wrong(e.to_string()))?;
        Ok(())
    }
}

/// Returns a random seed of 53 bits, which every JSON reader represents exactly.
fn draw_seed() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(Failure::internal)?;
    Ok(u64::from_le_bytes(bytes) >> 11)
}
