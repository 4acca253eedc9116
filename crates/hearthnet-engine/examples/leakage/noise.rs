//! `--noise 1`: the caller adds random signs to the rows that enter layer 2. The attacker knows how
//! large they are.
//!
//! Per strength, the table has what the attacker still finds: by a linear map that it learned from such
//! rows, and by the guess, of 64, whose row is nearest. Beside it is the change of the answer:
//! - *next token*: share of the positions of all texts at which the likeliest next token is another one;
//! - *KL*: mean divergence of the next token's distribution from that without noise, in nats;
//! - *answers*: the model continues the first 32 tokens of each text by 64 tokens, each the likeliest.
//!   How many differ from those without noise, the share of their tokens that differ by position, and
//!   the median of the first position that differs (64: none).
//!
//! The texts are the books and those in several languages.

use hearthnet_engine::{SeqId, Span};
use hearthnet_testkit::LANGUAGES;

use super::probe::Probe;
use super::{Chance, DEPTHS, Lab, Outcome, Seen};

/// Entry of [`DEPTHS`] at which noise is added.
const NOISY: usize = 2;
/// Norm of the noise as a part of the row's.
const NOISE: [f32; 8] = [0.0, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0];
/// Guesses for each word.
const NEAREST: usize = 64;
/// Tokens of a question, and of its answer.
const QUESTION: usize = 32;
const ANSWER: usize = 64;
/// Rows whose logits are computed at once.
const ROWS: usize = 16;

/// Change of the next token.
#[derive(Default)]
struct Change {
    positions: usize,
    changed: usize,
    divergence: f64,
}

impl Lab {
    /// Prints what noise of several strengths hides, and how much it changes the answer.
    pub(crate) fn noise(
        &mut self,
        learned: &Seen,
        texts: &[Vec<u32>],
        guess: usize,
    ) -> Outcome<()> {
        let mut texts = texts.to_vec();
        texts.extend(self.encode(LANGUAGES.into_iter().map(|(_, text)| text))?);
        let seen = self.read(&texts)?;
        println!(
            "| noise | probe, first of 1 | nearest of {NEAREST} guesses: words right | next token changed | KL | answers changed | tokens of them | first changed |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        let mut chance = Chance(0x2545_f491_4f6c_dd1d);
        let own = self.answers(&texts, 0.0, &mut chance)?;
        for strength in NOISE {
            let mut rows = learned.rows[NOISY].clone();
            chance.disturb(&mut rows, self.width, strength);
            let probe = Probe::learn(&rows, &learned.ids, &self.table);
            let mut rows = seen.rows[NOISY].clone();
            chance.disturb(&mut rows, self.width, strength);
            let first = self.rank(&probe.map(&rows)).best(&seen.ids);
            let (mut change, mut honest) = (Change::default(), seen.leaving[0].as_slice());
            let (mut right, mut words) = (0, 0);
            for ids in &texts {
                let sequence = self.open_sequence()?;
                let spans = [(sequence, 0, ids.len() as u32)];
                let mut x = Vec::new();
                self.head.embed(ids, &mut x)?;
                let sent = self.forward_noisy(&spans, &mut x, strength, &mut chance)?;
                let [(sequence, ..)] = spans;
                self.close(sequence);
                let (own, rest) = honest.split_at(x.len() - self.width);
                honest = rest;
                self.compare(own, &x[self.width..], &mut change)?;
                let count = ids.len().min(guess.div_ceil(texts.len()));
                right += self.nearest_words(&probe, &ids[..count], &sent)?;
                words += count;
            }
            let answers = self.answers(&texts, strength, &mut chance)?;
            let mut first_changed = Vec::new();
            let mut tokens = 0;
            for (own, answer) in own.iter().zip(&answers) {
                let differs = || own.iter().zip(answer).map(|(a, b)| a != b);
                tokens += differs().filter(|differs| *differs).count();
                first_changed.push(differs().position(|differs| differs).unwrap_or(ANSWER));
            }
            first_changed.sort_unstable();
            let changed = first_changed.iter().filter(|at| **at < ANSWER).count();
            println!(
                "| {}% | {:.1}% | {right} of {words} | {:.1}% | {:.4} | {changed} of {} | {:.1}% | {} |",
                strength * 100.0,
                first * 100.0,
                change.changed as f64 / change.positions as f64 * 100.0,
                change.divergence / change.positions as f64,
                answers.len(),
                tokens as f64 / (answers.len() * ANSWER) as f64 * 100.0,
                first_changed[first_changed.len() / 2],
            );
        }
        Ok(())
    }

    /// Runs rows through all layers, with noise. Returns the rows that the host receives.
    fn forward_noisy(
        &mut self,
        spans: &[(Vec<SeqId>, u32, u32)],
        x: &mut Vec<f32>,
        strength: f32,
        chance: &mut Chance,
    ) -> Outcome<Vec<f32>> {
        let mut sent = Vec::new();
        for (index, piece) in self.pieces.iter_mut().enumerate() {
            if piece.layers().start == DEPTHS[NOISY] {
                chance.disturb(x, self.width, strength);
                // As the rows are sent.
                let mut encoded = Vec::new();
                self.boundary.encode(x, &mut encoded);
                x.clear();
                self.boundary.decode(&encoded, x)?;
                sent.clone_from(x);
            }
            let spans: Vec<Span> = spans
                .iter()
                .map(|(seqs, position, rows)| Span::new(seqs[index], *position, *rows))
                .collect();
            piece.forward(&spans, x)?;
        }
        Ok(sent)
    }

    /// Answers to the beginnings of texts: the likeliest tokens.
    fn answers(
        &mut self,
        texts: &[Vec<u32>],
        strength: f32,
        chance: &mut Chance,
    ) -> Outcome<Vec<Vec<u32>>> {
        let mut spans = Vec::new();
        let mut now: Vec<u32> = Vec::new();
        for ids in texts {
            let question = &ids[..ids.len().min(QUESTION)];
            spans.push((self.open_sequence()?, 0, question.len() as u32));
            now.extend(question);
        }
        let mut answers = vec![Vec::new(); texts.len()];
        for _ in 0..ANSWER {
            let (mut x, mut last) = (Vec::new(), Vec::new());
            self.head.embed(&now, &mut x)?;
            self.forward_noisy(&spans, &mut x, strength, chance)?;
            let mut end = 0;
            for (_, position, rows) in &mut spans {
                end += *rows as usize;
                last.extend_from_slice(&x[(end - 1) * self.width..end * self.width]);
                (*position, *rows) = (*position + *rows, 1);
            }
            now.clear();
            for (answer, id) in answers.iter_mut().zip(self.likeliest(&last)?) {
                answer.push(id as u32);
                now.push(id as u32);
            }
        }
        for (sequence, ..) in spans {
            self.close(sequence);
        }
        Ok(answers)
    }

    /// Compares the distributions of the next token after rows that leave the last layer.
    fn compare(&self, own: &[f32], other: &[f32], change: &mut Change) -> Outcome<()> {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let chunk = ROWS * self.width;
        for (own, other) in own.chunks(chunk).zip(other.chunks(chunk)) {
            self.head.logits(own, &mut a)?;
            self.head.logits(other, &mut b)?;
            let vocab = self.norms.len();
            for (a, b) in a.chunks_exact(vocab).zip(b.chunks_exact(vocab)) {
                let (p, q) = (log_softmax(a), log_softmax(b));
                change.positions += 1;
                change.changed += usize::from(largest(&p) != largest(&q));
                let pairs = p.iter().zip(&q);
                change.divergence += pairs.map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            }
        }
        Ok(())
    }

    /// Number of words that are found: for each, the guess whose row is nearest to the one that was
    /// sent.
    fn nearest_words(&mut self, probe: &Probe, ids: &[u32], sent: &[f32]) -> Outcome<usize> {
        let width = self.width;
        let own = self.private(DEPTHS[NOISY]);
        let mut prefix = self.open_sequence()?;
        let mut right = 0;
        for ((position, target), id) in (0u32..).zip(sent.chunks_exact(width)).zip(ids) {
            let ranked = self.nearest(&probe.map(target), NEAREST).0;
            let words = ranked.into_iter().next().unwrap_or_default();
            let distance = |row: &[f32]| -> f32 {
                row.iter().zip(target).map(|(a, b)| (a - b) * (a - b)).sum()
            };
            let nearest = |x: &[f32]| {
                let rows = x.chunks_exact(width).map(distance).enumerate();
                rows.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(n, _)| n)
            };
            let found = self.try_words(&words, &own, &mut prefix, position, &nearest)?;
            right += usize::from(found == Some(*id));
        }
        self.close(prefix);
        Ok(right)
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let shifted: Vec<f64> = logits.iter().map(|l| f64::from(*l) - most).collect();
    let sum: f64 = shifted.iter().map(|l| l.exp()).sum();
    shifted.into_iter().map(|l| l - sum.ln()).collect()
}

fn largest(values: &[f64]) -> Option<usize> {
    (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]))
}
