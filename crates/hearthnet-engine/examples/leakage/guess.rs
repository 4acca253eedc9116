//! Words that are guessed, and checked by running them through the private layers.

use std::ops::Range;
use std::time::{Duration, Instant};

use hearthnet_engine::{Engine, SeqId, Span};

use super::probe::Probe;
use super::{Lab, Outcome, is_same};

/// Guesses per batch: initial and largest number.
const GUESSES: (usize, usize) = (8, 512);

impl Lab {
    /// Recovers the beginnings of the texts, `tokens` in total, word by word. The likeliest words
    /// of the probe are run through the private layers and compared with the rows that the host
    /// received.
    pub(crate) fn guess(
        &mut self,
        probe: &Probe,
        depth: u32,
        index: usize,
        texts: &[Vec<u32>],
        tokens: usize,
    ) -> Outcome<Guessed> {
        let began = Instant::now();
        let own = self.private(depth);
        let mut guessed = Guessed::default();
        let width = self.width;
        for ids in texts {
            let ids = &ids[..ids.len().min(tokens.div_ceil(texts.len()))];
            // Rows that the host of the layers from `DEPTHS[index]` on receives.
            let sent = self.run_text(ids)?.rows.swap_remove(index);
            let mut prefix: Vec<SeqId> = self.open_sequence()?;
            for (position, target) in (0u32..).zip(sent.chunks_exact(width)) {
                let mapped = probe.map(target);
                let ranked = self.nearest(&mapped, self.norms.len()).0;
                let ranked = ranked.into_iter().next().unwrap_or_default();
                let (mut rest, mut most) = (ranked.as_slice(), GUESSES.0);
                let mut found = None;
                while found.is_none() && !rest.is_empty() {
                    let (now, later) = rest.split_at(most.min(rest.len()));
                    (rest, most) = (later, (most * 4).min(GUESSES.1));
                    guessed.tried += now.len() as u64;
                    let same =
                        |x: &[f32]| x.chunks_exact(width).position(|row| is_same(row, target));
                    found = self.try_words(now, &own, &mut prefix, position, &same)?;
                }
                guessed.words += 1;
                match found {
                    Some(id) => guessed.right += u64::from(ids.get(position as usize) == Some(&id)),
                    None => break,
                }
            }
            self.close(prefix);
        }
        guessed.took = began.elapsed();
        Ok(guessed)
    }

    /// Pieces of the first `depth` layers.
    pub(crate) fn private(&self, depth: u32) -> Range<usize> {
        let pieces = self.pieces.iter();
        0..pieces.take_while(|p| p.layers().end <= depth).count()
    }

    /// Runs words through the private layers. Returns the one whose row `pick` chooses, and appends it
    /// to the prefix.
    pub(crate) fn try_words(
        &mut self,
        words: &[u32],
        own: &Range<usize>,
        prefix: &mut [SeqId],
        position: u32,
        pick: &dyn Fn(&[f32]) -> Option<usize>,
    ) -> Outcome<Option<u32>> {
        let mut x = Vec::new();
        self.head.embed(words, &mut x)?;
        let mut forks: Vec<Vec<SeqId>> = Vec::new();
        for piece in own.clone() {
            let fork = |engine: &mut Engine| engine.fork(prefix[piece]);
            let engine = &mut self.pieces[piece];
            let seqs = words
                .iter()
                .map(|_| fork(engine))
                .collect::<Result<Vec<_>, _>>()?;
            let spans: Vec<Span> = seqs
                .iter()
                .map(|seq| Span::new(*seq, position, 1))
                .collect();
            engine.forward(&spans, &mut x)?;
            forks.push(seqs);
        }
        let found = pick(&x);
        for (piece, seqs) in own.clone().zip(forks) {
            for (n, seq) in seqs.into_iter().enumerate() {
                let left = if Some(n) == found {
                    std::mem::replace(&mut prefix[piece], seq)
                } else {
                    seq
                };
                self.pieces[piece].close(left);
            }
        }
        Ok(found.map(|n| words[n]))
    }
}

/// Result of guessing.
#[derive(Default)]
pub(crate) struct Guessed {
    words: u64,
    right: u64,
    tried: u64,
    took: Duration,
}

impl std::fmt::Display for Guessed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = self.words.max(1) as f64;
        let percent = self.right as f64 / words * 100.0;
        let each = self.took.as_secs_f64() / words;
        write!(
            f,
            "{percent:.1}% of {} | {:.0} | {:.0} ms",
            self.words,
            self.tried as f64 / words,
            each * 1e3
        )
    }
}
