//! Predictions of float64 models over a text, the reference for engines. They belong to the two small
//! real models' files; see `crates/hearthnet-engine/tests/data/parity/README.md`.

use serde::Deserialize;

/// Predictions at some positions of the text's windows.
#[derive(Debug, Deserialize)]
pub struct Predictions {
    /// SHA-256 of the model file, in hexadecimal.
    pub model_sha256: String,
    /// Token ids of the windows, where no other file has them.
    #[serde(default)]
    pub ids: Vec<Vec<u32>>,
    pub positions: Vec<Prediction>,
}

#[derive(Debug, Deserialize)]
pub struct Prediction {
    /// Index of the window in the text, from 0.
    pub window: usize,
    /// Position in the window, from 0.
    pub position: usize,
    /// Likeliest next tokens.
    pub ids: Vec<usize>,
    /// Log-probabilities of `ids`, in nats, then that of all other tokens together.
    pub log_p: Vec<f64>,
    /// KL divergence of llama.cpp's prediction, in nats.
    pub llama_cpp: f64,
}

impl Predictions {
    /// Reads the stored predictions for [`smollm2`](crate::smollm2).
    ///
    /// # Panics
    /// If the stored file is malformed, which a test excludes.
    pub fn smollm2() -> Self {
        let stored = include_str!("../../hearthnet-engine/tests/data/parity/kl.json");
        serde_json::from_str(stored).expect("what is stored")
    }

    /// Reads the stored predictions for [`gemma3`](crate::gemma3).
    ///
    /// # Panics
    /// As [`smollm2`](Self::smollm2).
    pub fn gemma3() -> Self {
        let stored = include_str!("../../hearthnet-engine/tests/data/parity/kl-gemma3.json");
        serde_json::from_str(stored).expect("what is stored")
    }
}

impl Prediction {
    /// KL(p || q) in nats over the stored tokens, with all other tokens counted as one. `log_q`
    /// holds the log-probabilities of all tokens.
    ///
    /// # Panics
    /// If `log_q` has too few tokens.
    pub fn divergence(&self, log_q: &[f64]) -> f64 {
        let mut rest: f64 = log_q.iter().map(|q| q.exp()).sum();
        let mut sum = 0.0;
        for (&id, &log_p) in self.ids.iter().zip(&self.log_p) {
            rest -= log_q[id].exp();
            sum += log_p.exp() * (log_p - log_q[id]);
        }
        let log_p_rest = self.log_p[self.ids.len()];
        sum + log_p_rest.exp() * (log_p_rest - rest.ln())
    }
}

/// Replaces `log_p` by the log-probabilities of all tokens, in nats.
pub fn log_softmax(logits: &[f32], log_p: &mut Vec<f64>) {
    let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&v| (f64::from(v) - top).exp()).sum();
    log_p.clear();
    log_p.extend(logits.iter().map(|&v| f64::from(v) - top - sum.ln()));
}
