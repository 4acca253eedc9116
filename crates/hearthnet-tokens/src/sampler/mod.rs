//! Choice of the next token from the logits.
//!
//! Equal logits, settings and seed give the same token on every CPU: probabilities are integers
//! computed by single IEEE operations, `log` is the `libm` crate's, random numbers come from
//! ChaCha12. Ties go to the lowest id, -0 equals 0, and NaN is an error.
//!
//! # One token
//!
//! 1. Tokens that a [grammar](crate::grammar) does not allow get the logit minus infinity. Then
//!    [`SamplerConfig::logit_bias`] is added, in binary32.
//! 2. Penalties, for every token that occurs `c` times among the last
//!    [`SamplerConfig::penalty_window`] tokens: `l = l > 0 ? l / r : l * r`, then
//!    `l = l - (c * frequency + presence)`, in binary32.
//! 3. Temperature 0: the greatest logit. Otherwise, with tokens ordered by logit, then id:
//! 4. top-k keeps the first k.
//! 5. top-p keeps the shortest beginning whose weights, at temperature 1, sum up to at least
//!    `p` times the sum of all remaining ones.
//! 6. min-p keeps logits of at least the greatest plus `log(min_p)`.
//! 7. The weight of a token is `exp((l - greatest) * (1 / temperature))` in whole units of 2^-40
//!    (the module `weights` has the arithmetic). With `R` the next 64 random bits, the first token
//!    by id is taken at which the running sum of weights exceeds `floor(R * sum / 2^64)`.
//!
//! A greedy choice takes no random number, every other choice takes exactly one.

mod select;
mod weights;

use crate::grammar::Allowed;
use hearthnet_files::sampling::{SamplerConfig, SamplerConfigError};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use select::Candidate;
use std::collections::{HashMap, VecDeque};
use std::fmt;

#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Sampled {
    pub id: u32,
    /// Log probability in the model's own distribution, if requested.
    pub logprob: Option<f32>,
    /// Likeliest tokens with their log probabilities, best first, if requested.
    pub top: Vec<(u32, f32)>,
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// There are no logits, or every token is ruled out (minus infinity).
    #[error("no token has a finite logit")]
    NoCandidate,

    /// More logits than any vocabulary has tokens.
    #[error("there are logits for {0} tokens; at most {max} are accepted", max = weights::MAX_TOKENS)]
    TooMany(usize),

    /// The first token whose logit is NaN or plus infinity.
    #[error("the logit of token {0} is not a finite number")]
    NotFinite(u32),
}

/// Chooses the tokens of one sequence.
#[derive(Clone)]
pub struct Sampler {
    config: SamplerConfig,
    random: ChaCha12Rng,
    /// The last tokens, at most `penalty_window`, and the count of each among them.
    recent: VecDeque<u32>,
    counts: HashMap<u32, u32>,
    /// Buffers to reuse.
    penalised: Vec<f32>,
    candidates: Vec<Candidate>,
    weights: Vec<u64>,
}

/// Omits the tokens, so that they cannot enter a log.
impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sampler")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Sampler {
    /// Sampler at the start of its random sequence.
    ///
    /// # Errors
    /// [`SamplerConfigError`] if a setting is out of range.
    pub fn new(config: SamplerConfig) -> Result<Self, SamplerConfigError> {
        config.validate()?;
        // The seed's layout is defined here, so that no version of `rand_core` can change it.
        let mut seed = *b"........hearthnet sampler 1.....";
        for (to, from) in seed.iter_mut().zip(config.seed.unwrap_or(0).to_le_bytes()) {
            *to = from;
        }
        Ok(Self {
            random: ChaCha12Rng::from_seed(seed),
            config,
            recent: VecDeque::new(),
            counts: HashMap::new(),
            penalised: Vec::new(),
            candidates: Vec::new(),
            weights: Vec::new(),
        })
    }

    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Adds tokens that the sampler did not choose, such as the prompt: penalties count them too.
    /// OpenAI's penalties count only the answer; for those, do not call this.
    pub fn observe(&mut self, ids: &[u32]) {
        if !self.config.penalises() {
            return;
        }
        let window = usize::try_from(self.config.penalty_window).unwrap_or(usize::MAX);
        for &id in ids.get(ids.len().saturating_sub(window)..).unwrap_or(ids) {
            if self.recent.len() >= window
                && let Some(old) = self.recent.pop_front()
                && let Some(count) = self.counts.get_mut(&old)
            {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&old);
                }
            }
            self.recent.push_back(id);
            *self.counts.entry(id).or_default() += 1;
        }
    }

    /// Chooses the next token; `logits` has one value per token. A logit of minus infinity rules a
    /// token out. After an error the sampler is unchanged.
    ///
    /// # Errors
    /// [`SampleError`] if a logit is NaN or plus infinity, or all tokens are ruled out.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        self.sample_allowed(logits, None)
    }

    /// As [`Self::sample`], among the tokens that a grammar allows. Log probabilities are those of
    /// all tokens.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn sample_allowed(
        &mut self,
        logits: &[f32],
        allowed: Option<&Allowed>,
    ) -> Result<Sampled, SampleError> {
        check(logits)?;
        let mut penalised = std::mem::take(&mut self.penalised);
        let is_plain = self.counts.is_empty() && self.config.logit_bias.is_empty();
        let chosen = if is_plain && allowed.is_none() {
            self.choose(logits)
        } else {
            penalised.clear();
            penalised.extend_from_slice(logits);
            if let Some(allowed) = allowed {
                allowed.apply(&mut penalised);
            }
            self.bias(&mut penalised);
            self.penalise(&mut penalised);
            self.choose(&penalised)
        };
        self.penalised = penalised;
        let id = chosen?;
        self.observe(&[id]);
        let (logprob, top) = match self.config.logprobs {
            None => (None, Vec::new()),
            Some(count) => self.logprobs(logits, id, count),
        };
        Ok(Sampled { id, logprob, top })
    }

    /// Log probability of a token that was not chosen here, such as one of the prompt, and the
    /// likeliest ones in its place. The sampler's choices do not change.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn score(&mut self, logits: &[f32], id: u32) -> Result<Sampled, SampleError> {
        check(logits)?;
        let count = self.config.logprobs.unwrap_or(0);
        let (logprob, top) = self.logprobs(logits, id, count);
        Ok(Sampled { id, logprob, top })
    }

    fn bias(&self, logits: &mut [f32]) {
        for &(id, bias) in &self.config.logit_bias {
            let logit = usize::try_from(id).ok().and_then(|id| logits.get_mut(id));
            if let Some(logit) = logit {
                *logit = (*logit + bias).min(f32::MAX);
            }
        }
    }

    fn penalise(&self, logits: &mut [f32]) {
        let config = &self.config;
        for (&id, &count) in &self.counts {
            let Some(logit) = usize::try_from(id).ok().and_then(|id| logits.get_mut(id)) else {
                continue;
            };
            if *logit > 0.0 {
                *logit /= config.repetition_penalty;
            } else {
                *logit *= config.repetition_penalty;
            }
            *logit -= count as f32 * config.frequency_penalty + config.presence_penalty;
            *logit = logit.min(f32::MAX); // Division by less than 1 may have overflowed.
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let best = select::best(logits).ok_or(SampleError::NoCandidate)?;
        if self.config.temperature == 0.0 {
            return Ok(best.id);
        }
        self.keep(logits, best);
        let warmth = 1.0 / f64::from(self.config.temperature);
        let top = f64::from(best.logit);
        self.weights.clear();
        let weight = |c: &Candidate| weights::weight((f64::from(c.logit) - top) * warmth);
        self.weights.extend(self.candidates.iter().map(weight));
        let sum: u64 = self.weights.iter().sum();

        let hit = ((u128::from(self.random.next_u64()) * u128::from(sum)) >> 64) as u64;
        let mut running = 0;
        for (candidate, weight) in self.candidates.iter().zip(&self.weights) {
            running += weight;
            if running > hit {
                return Ok(candidate.id);
            }
        }
        // Unreachable: the running sum ends at `sum`, and the hit is below it.
        Ok(best.id)
    }

    /// Fills `candidates` with the tokens that pass top-k, top-p and min-p, ordered by id.
    fn keep(&mut self, logits: &[f32], best: Candidate) {
        let config = &self.config;
        let floor = if config.min_p > 0.0 {
            f64::from(best.logit) + libm::log(f64::from(config.min_p))
        } else {
            f64::NEG_INFINITY
        };
        let likely = |c: &Candidate| f64::from(c.logit) >= floor;
        let top_k = usize::try_from(config.top_k).unwrap_or(usize::MAX);
        if top_k > 0 && top_k < logits.len() {
            select::first_k(logits, top_k, &mut self.candidates);
            if config.top_p < 1.0 {
                select::cut_at(&mut self.candidates, best.logit, config.top_p);
            }
            self.candidates.retain(likely);
            self.candidates
                .sort_unstable_by_key(|candidate| candidate.id);
            return;
        }
        let last = if config.top_p < 1.0 {
            select::last_of_nucleus(logits, best.logit, config.top_p, &mut self.candidates)
        } else {
            None
        };
        // Without top-p, all tokens that are not ruled out; with top-p, those up to this one.
        let last = last.unwrap_or(Candidate {
            id: u32::MAX,
            logit: f32::MIN,
        });
        let tokens = select::candidates(0, logits);
        self.candidates.clear();
        self.candidates
            .extend(tokens.filter(|c| c.order(&last).is_le() && likely(c)));
    }

    fn logprobs(&mut self, logits: &[f32], id: u32, count: u8) -> (Option<f32>, Vec<(u32, f32)>) {
        let Some(best) = select::best(logits) else {
            return (None, Vec::new());
        };
        let top = f64::from(best.logit);
        let sum: u64 = logits
            .iter()
            .map(|l| weights::weight(f64::from(*l) - top))
            .sum();
        let log_sum = libm::log(sum as f64 / weights::ONE as f64);
        let logprob = |logit: f32| (f64::from(logit) - top - log_sum) as f32;
        select::first_k(logits, usize::from(count), &mut self.candidates);
        let top = self
            .candidates
            .iter()
            .map(|c| (c.id, logprob(c.logit)))
            .collect();
        let chosen = usize::try_from(id)
            .ok()
            .and_then(|id| logits.get(id))
            .copied();
        (chosen.map(logprob), top)
    }
}

fn check(logits: &[f32]) -> Result<(), SampleError> {
    if logits.len() > weights::MAX_TOKENS {
        return Err(SampleError::TooMany(logits.len()));
    }
    match select::not_finite(logits) {
        Some(id) => Err(SampleError::NotFinite(id)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
