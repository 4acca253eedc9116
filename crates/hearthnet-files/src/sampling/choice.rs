//! Sampling settings of a caller or a model, and their combination.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::config::{MAX_PENALTY_WINDOW, PENALTY, REPETITION, SHARE, SamplerConfig, TEMPERATURE};
use crate::gguf::Gguf;

/// Partial settings of a [`SamplerConfig`], from a caller or a model. Missing values come from the
/// next source; the ranges are those of [`SamplerConfig`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingChoice {
    /// See [`SamplerConfig::temperature`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// See [`SamplerConfig::top_k`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// See [`SamplerConfig::top_p`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// See [`SamplerConfig::min_p`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// See [`SamplerConfig::repetition_penalty`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// See [`SamplerConfig::presence_penalty`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    /// See [`SamplerConfig::frequency_penalty`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
}

impl SamplingChoice {
    /// Always the likeliest token, without penalties.
    pub const GREEDY: Self = Self {
        temperature: Some(0.0),
        top_k: None,
        top_p: None,
        min_p: None,
        repetition_penalty: None,
        presence_penalty: None,
        frequency_penalty: None,
    };

    /// Default for models without a recommendation: llama.cpp's defaults, with which the makers of
    /// model files usually test them.
    pub const USUAL: Self = Self {
        temperature: Some(0.8),
        top_k: Some(40),
        top_p: Some(0.95),
        min_p: Some(0.05),
        ..Self::GREEDY
    };

    /// Recommendations in the file's `general.sampling.*` metadata, which converters copy from the
    /// model's `generation_config.json`. Values out of range are ignored, because the model works
    /// without them.
    pub fn from_gguf(gguf: &Gguf) -> Self {
        let float = |key: &str, range: RangeInclusive<f32>| {
            let value = gguf.f64(&format!("general.sampling.{key}"));
            // The sampler computes in binary32 anyway.
            let value = value.ok().flatten().map(|value| value as f32);
            value.filter(|value| range.contains(value))
        };
        Self {
            temperature: float("temp", TEMPERATURE),
            top_k: gguf.u32("general.sampling.top_k").ok().flatten(),
            top_p: float("top_p", SHARE),
            min_p: float("min_p", SHARE),
            repetition_penalty: float("penalty_repeat", REPETITION),
            presence_penalty: float("penalty_present", PENALTY),
            frequency_penalty: float("penalty_freq", PENALTY),
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Takes unset values from the model. With a temperature of 0 the caller wants the likeliest
    /// token; the model's penalties and cuts could change it, and are ignored.
    #[must_use]
    pub fn or_models(self, model: &Self) -> Self {
        let model = match self.temperature {
            Some(0.0) => &Self::GREEDY,
            _ => model,
        };
        Self {
            temperature: self.temperature.or(model.temperature),
            top_k: self.top_k.or(model.top_k),
            top_p: self.top_p.or(model.top_p),
            min_p: self.min_p.or(model.min_p),
            repetition_penalty: self.repetition_penalty.or(model.repetition_penalty),
            presence_penalty: self.presence_penalty.or(model.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(model.frequency_penalty),
        }
    }

    /// Replaces values of `base`. Presence and frequency penalties count the whole answer, as in
    /// OpenAI's API. A repetition penalty without them counts according to `base`, by default the
    /// last 64 tokens with the prompt, as in llama.cpp.
    #[must_use]
    pub fn over(self, base: SamplerConfig) -> SamplerConfig {
        let counted = [self.presence_penalty, self.frequency_penalty];
        let answer = counted.iter().flatten().any(|&penalty| penalty != 0.0);
        let (penalty_window, penalise_prompt) = match answer {
            true => (MAX_PENALTY_WINDOW, false),
            false => (base.penalty_window, base.penalise_prompt),
        };
        SamplerConfig {
            penalty_window,
            penalise_prompt,
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            ..base
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: SamplingChoice = SamplingChoice {
        temperature: Some(0.2),
        top_p: Some(0.9),
        repetition_penalty: Some(1.1),
        ..SamplingChoice::GREEDY
    };

    #[test]
    fn unset_values_come_from_the_model() {
        let own = SamplingChoice::default().or_models(&MODEL);
        assert_eq!(own, MODEL);
        let warm = SamplingChoice {
            temperature: Some(1.5),
            top_k: Some(7),
            ..SamplingChoice::default()
        };
        let config = warm.or_models(&MODEL).over(SamplerConfig::default());
        assert_eq!((config.temperature, config.top_k), (1.5, 7));
        assert_eq!((config.top_p, config.repetition_penalty), (0.9, 1.1));
        assert_eq!((config.min_p, config.seed), (0.0, None));
    }

    #[test]
    fn temperature_0_ignores_the_models_recommendation() {
        let greedy = SamplingChoice::GREEDY.or_models(&MODEL);
        let config = greedy.over(SamplerConfig::default());
        assert_eq!(config, SamplerConfig::default());
    }

    #[test]
    fn penalties_of_openais_api_count_the_answer_and_llama_cpps_the_last_tokens() {
        let counted = |choice: SamplingChoice| {
            let config = choice.over(SamplerConfig::default());
            (config.penalty_window, config.penalise_prompt)
        };
        assert_eq!(counted(MODEL), (64, true));
        let presence = SamplingChoice {
            presence_penalty: Some(-0.5),
            ..MODEL
        };
        assert_eq!(counted(presence), (MAX_PENALTY_WINDOW, false));
        let none = SamplingChoice {
            frequency_penalty: Some(0.0),
            ..MODEL
        };
        assert_eq!(counted(none), (64, true));
    }

    #[test]
    fn the_default_settings_are_valid() {
        let config = SamplingChoice::USUAL.over(SamplerConfig {
            seed: Some(1),
            ..SamplerConfig::default()
        });
        assert_eq!(config.validate(), Ok(()));
    }
}
