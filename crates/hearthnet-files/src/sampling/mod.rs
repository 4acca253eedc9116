//! Sampling settings, and the recommendations in a model file. The sampler itself is in
//! `hearthnet-tokens`.

mod choice;
mod config;

pub use choice::SamplingChoice;
pub use config::{MAX_BIASES, MAX_LOGPROBS, MAX_PENALTY_WINDOW, SamplerConfig, SamplerConfigError};
