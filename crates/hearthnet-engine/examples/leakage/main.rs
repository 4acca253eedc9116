//! Measures how much a host can read of a chat: words recovered from the rows that enter and leave
//! its layers.
//!
//! ```text
//! cargo run --release -p hearthnet-engine --example leakage [-- --train TOKENS --guess TOKENS]
//! ```
//!
//! With `--noise 1`, the caller adds random numbers to the rows that enter layer 2, and the attacker
//! knows how large they are: it learns its map from such rows, and of its first 64 guesses for a word
//! takes the one whose row is nearest. The table compares that with the change of the answer.
//!
//! With `--random TOKENS`, each text is replaced by that many random tokens. This models a secret
//! beginning that a caller puts before its conversation.
//!
//! The model is SmolLM2-135M-Instruct, exactly as hosts run it. The targets are in `texts.txt`:
//! openings of public-domain texts (the Declaration of Independence, 1776; the Gettysburg Address,
//! 1863; Alice's Adventures in Wonderland, 1865; Pride and Prejudice, 1813; A Tale of Two Cities,
//! 1859; Moby-Dick, 1851). The attacker trains with text that the model itself writes from a random
//! first token, which needs only the weights.
//!
//! For rows that enter layer `d`, so that the first `d` layers are private:
//! - *lookup*: the row of the embedding table that is nearest, by angle or by distance, whichever
//!   recovers more;
//! - *probe*: the same after a linear map (ridge regression, row to embedding) that was learned
//!   from the attacker's own text;
//! - *guesses*: the attacker runs its guesses for the next word, the likeliest first, through the
//!   private layers behind the words that it has found already, and compares bits.
//!
//! For rows that leave layer `n - 1 - m`, so that the last `m` layers are private: how often the
//! likeliest next token is the model's own when the layers in between are left out.

#![allow(
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measurement: it prints, and its own shapes are its own"
)]

mod probe;

use std::error::Error;
use std::io::Write as _;
use std::ops::Range;
use std::time::{Duration, Instant};

use hearthnet_engine::{Engine, EngineOptions, Head, SeqId, Span};
use hearthnet_files::ModelFile;
use hearthnet_tokens::{Special, Tokenizer};
use rayon::prelude::*;

use self::probe::Probe;

const TEXT: &str = include_str!("texts.txt");
/// Numbers of private first layers.
const DEPTHS: [u32; 7] = [0, 1, 2, 4, 8, 15, 22];
/// Deepest of them at which words are guessed: a guess runs all private layers.
const GUESSED: u32 = 8;
/// Entry of [`DEPTHS`] at which noise is added, and its norm as a part of the row's.
const NOISY: usize = 2;
const NOISE: [f32; 7] = [0.0, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0];
/// Guesses for each word behind noise.
const NEAREST: usize = 64;
/// Numbers of private last layers.
const LAST: [u32; 5] = [0, 1, 2, 4, 8];
/// Texts that the model writes for the attacker in parallel.
const TEXTS: usize = 64;
/// Guesses per batch: initial and largest number.
const GUESSES: (usize, usize) = (8, 512);

/// Nearest tokens of every row, the nearest first.
type Nearest = Vec<Vec<u32>>;
type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let (mut train, mut guess, mut random, mut noise) = (32_768usize, 96usize, 0usize, 0usize);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or("a number is missing")?.parse()?;
        match flag.as_str() {
            "--train" => train = value,
            "--guess" => guess = value,
            "--random" => random = value,
            "--noise" => noise = value,
            _ => return Err(format!("unknown: {flag}").into()),
        }
    }
    let file = ModelFile::open(&hearthnet_testkit::smollm2())?;
    let mut lab = Lab::open(&file)?;
    say(&format!(
        "having the model write {train} tokens to learn from"
    ));
    let mut learned = lab.write(train / TEXTS)?;
    let texts: Vec<Vec<u32>> = TEXT
        .split("\n\n")
        .map(|text| Ok(lab.tokenizer.encode(text.trim(), Special::Plain)?))
        .collect::<Outcome<_>>()?;
    let (mut chance, vocab) = (Chance(0x51a7_0b5c_93d1_e2f4), lab.norms.len() as u64);
    let mut tokens = |_: Vec<u32>| {
        (0..random)
            .map(|_| (chance.next() % vocab) as u32)
            .collect()
    };
    let texts: Vec<Vec<u32>> = match random {
        0 => texts,
        _ => texts.into_iter().map(&mut tokens).collect(),
    };
    let seen = lab.read(&texts)?;
    say(&format!(
        "{} tokens of {} texts to recover",
        seen.ids.len(),
        texts.len()
    ));
    if noise > 0 {
        return lab.noise(&learned, &seen, &texts, guess);
    }
    println!(
        "| private first layers | lookup | probe, first of 1 | first of 5 | guesses: words right | guesses per word | time per word |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (index, depth) in DEPTHS.into_iter().enumerate() {
        let rows = &seen.rows[index];
        let lookup = lab.rank(rows).best(&seen.ids);
        let probe = Probe::learn(&learned.rows[index], &learned.ids, &lab.table);
        // Frees the memory of rows that are no longer needed.
        learned.rows[index] = Vec::new();
        let ranks = lab.rank(&probe.map(rows));
        let (first, five) = (ranks.best(&seen.ids), ranks.within(5, &seen.ids));
        let guessed = match depth {
            1..=GUESSED => lab.guess(&probe, depth, index, &texts, guess)?.to_string(),
            _ => String::from("- | - | -"),
        };
        println!(
            "| {depth} | {:.1}% | {:.1}% | {:.1}% | {guessed} |",
            lookup * 100.0,
            first * 100.0,
            five * 100.0
        );
    }
    println!("\n| private last layers | likeliest next token read without them |\n|---|---|");
    let own = lab.likeliest(&seen.leaving[0])?;
    for (last, rows) in LAST.into_iter().zip(&seen.leaving) {
        let read = lab.likeliest(rows)?;
        let same = own.iter().zip(&read).filter(|(a, b)| a == b).count();
        println!(
            "| {last} | {:.1}% |",
            same as f64 / own.len() as f64 * 100.0
        );
    }
    Ok(())
}

fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

/// The model, split where rows are observed.
struct Lab {
    tokenizer: Tokenizer,
    head: Head,
    /// Engines of the pieces between splits.
    pieces: Vec<Engine>,
    width: usize,
    /// Embeddings of all tokens, as they enter layer 0.
    table: Vec<f32>,
    /// Norms of the embeddings.
    norms: Vec<f32>,
}

/// Rows of some tokens.
#[derive(Default)]
struct Seen {
    ids: Vec<u32>,
    /// Rows that enter the layer, per entry of [`DEPTHS`].
    rows: Vec<Vec<f32>>,
    /// Rows that leave the layer, per entry of [`LAST`].
    leaving: Vec<Vec<f32>>,
}

impl Lab {
    fn open(file: &ModelFile) -> Outcome<Self> {
        let layers = file.spec().layers;
        let mut cuts: Vec<u32> = DEPTHS.into_iter().chain(LAST.map(|m| layers - m)).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let options = EngineOptions {
            max_kv_bytes: 8 << 30,
            ..EngineOptions::default()
        };
        let load = |pair: &[u32]| Engine::load(file, pair[0]..pair[1], &options, &mut |_, _| {});
        let pieces = cuts.windows(2).map(load).collect::<Result<Vec<_>, _>>()?;
        let head = Head::load(file, &options)?;
        let width = file.spec().width as usize;
        let mut table = Vec::new();
        head.embed(&(0..file.spec().vocab).collect::<Vec<_>>(), &mut table)?;
        Ok(Self {
            tokenizer: Tokenizer::from_gguf(file.gguf())?,
            head,
            pieces,
            width,
            norms: table
                .chunks_exact(width)
                .map(|row| dot(row, row).sqrt())
                .collect(),
            table,
        })
    }

    /// Runs rows through all pieces, and records the observed ones.
    fn run(
        &mut self,
        spans: &[(Vec<SeqId>, u32, u32)],
        x: &mut [f32],
        seen: &mut Seen,
    ) -> Outcome<()> {
        seen.rows.resize(DEPTHS.len(), Vec::new());
        seen.leaving.resize(LAST.len(), Vec::new());
        let total = self.pieces.last().map_or(0, |piece| piece.layers().end);
        for (index, piece) in self.pieces.iter_mut().enumerate() {
            if let Some(at) = DEPTHS.iter().position(|d| *d == piece.layers().start) {
                seen.rows[at].extend_from_slice(x);
            }
            let spans: Vec<Span> = spans
                .iter()
                .map(|(seqs, position, rows)| Span::new(seqs[index], *position, *rows))
                .collect();
            piece.forward(&spans, x)?;
            if let Some(at) = LAST.iter().position(|m| total - m == piece.layers().end) {
                seen.leaving[at].extend_from_slice(x);
            }
        }
        Ok(())
    }

    fn open_sequence(&mut self) -> Outcome<Vec<SeqId>> {
        let pieces = self.pieces.iter_mut();
        Ok(pieces.map(Engine::open).collect::<Result<_, _>>()?)
    }

    /// Text of the model's own: [`TEXTS`] texts of `tokens` tokens, at temperature 1.
    fn write(&mut self, tokens: usize) -> Outcome<Seen> {
        let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
        let vocab = self.norms.len() as u64;
        let mut now: Vec<u32> = (0..TEXTS).map(|_| (chance.next() % vocab) as u32).collect();
        let sequences = (0..TEXTS)
            .map(|_| self.open_sequence())
            .collect::<Outcome<Vec<_>>>()?;
        let (mut seen, mut x, mut logits) = (Seen::default(), Vec::new(), Vec::new());
        for position in 0..tokens as u32 {
            self.head.embed(&now, &mut x)?;
            let spans: Vec<_> = sequences.iter().map(|s| (s.clone(), position, 1)).collect();
            // The first position of a text has unusual rows.
            let mut first = Seen::default();
            let into = if position == 0 { &mut first } else { &mut seen };
            into.ids.extend(&now);
            self.run(&spans, &mut x, into)?;
            seen.leaving.clear();
            self.head.logits(&x, &mut logits)?;
            let each = logits.chunks_exact(vocab as usize);
            now = each.map(|logits| chance.draw(logits)).collect();
        }
        for sequence in sequences {
            for (piece, seq) in self.pieces.iter_mut().zip(sequence) {
                piece.close(seq);
            }
        }
        Ok(seen)
    }

    /// Rows of texts, without the first position of each.
    fn read(&mut self, texts: &[Vec<u32>]) -> Outcome<Seen> {
        let mut all = Seen::default();
        for ids in texts {
            let seen = self.run_text(ids)?;
            all.ids.extend(&ids[1..]);
            all.rows.resize(DEPTHS.len(), Vec::new());
            all.leaving.resize(LAST.len(), Vec::new());
            for (all, rows) in all
                .rows
                .iter_mut()
                .chain(&mut all.leaving)
                .zip(seen.rows.iter().chain(&seen.leaving))
            {
                all.extend_from_slice(&rows[self.width..]);
            }
        }
        Ok(all)
    }

    fn likeliest(&self, rows: &[f32]) -> Outcome<Vec<usize>> {
        let mut logits = Vec::new();
        let mut out = Vec::new();
        for row in rows.chunks_exact(self.width) {
            self.head.logits(row, &mut logits)?;
            out.extend((0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])));
        }
        Ok(out)
    }

    /// Ranks all tokens by distance to each row.
    fn rank(&self, rows: &[f32]) -> Ranks {
        // Several rows at a time, so that the table is read less often.
        let rows = rows.par_chunks(16 * self.width);
        let (angle, distance): (Vec<_>, Vec<_>) = rows.map(|rows| self.nearest(rows, 5)).unzip();
        Ranks([angle.concat(), distance.concat()])
    }

    /// Nearest tokens of rows, by angle and by distance.
    fn nearest(&self, rows: &[f32], most: usize) -> (Nearest, Nearest) {
        let mut scores = vec![(Vec::new(), Vec::new()); rows.len() / self.width];
        for (entry, norm) in self.table.chunks_exact(self.width).zip(&self.norms) {
            for (row, (angle, distance)) in rows.chunks_exact(self.width).zip(&mut scores) {
                let product = dot(row, entry);
                angle.push(product / norm.max(1e-9));
                distance.push(product - norm * norm / 2.0);
            }
        }
        let ordered = scores.into_iter();
        let ordered =
            ordered.map(|(angle, distance)| (order(&angle, most), order(&distance, most)));
        ordered.unzip()
    }

    /// Recovers the beginnings of the texts, `tokens` in total, word by word. The likeliest words
    /// of the probe are run through the private layers and compared with the rows that the host
    /// received.
    fn guess(
        &mut self,
        probe: &Probe,
        depth: u32,
        index: usize,
        texts: &[Vec<u32>],
        tokens: usize,
    ) -> Outcome<Guessed> {
        let began = Instant::now();
        let own: Range<usize> = 0..self
            .pieces
            .iter()
            .take_while(|p| p.layers().end <= depth)
            .count();
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
        }
        guessed.took = began.elapsed();
        Ok(guessed)
    }

    fn run_text(&mut self, ids: &[u32]) -> Outcome<Seen> {
        let (mut x, mut seen) = (Vec::new(), Seen::default());
        self.head.embed(ids, &mut x)?;
        let sequence = self.open_sequence()?;
        self.run(&[(sequence, 0, ids.len() as u32)], &mut x, &mut seen)?;
        Ok(seen)
    }

    /// Prints what noise of several strengths hides, and how much it changes the answer.
    fn noise(
        &mut self,
        learned: &Seen,
        seen: &Seen,
        texts: &[Vec<u32>],
        guess: usize,
    ) -> Outcome<()> {
        println!(
            "| noise | probe, first of 1 | nearest of {NEAREST} guesses: words right | likeliest next token changed |"
        );
        println!("|---|---|---|---|");
        let own = self.likeliest(&seen.leaving[0])?;
        let mut chance = Chance(0x2545_f491_4f6c_dd1d);
        for strength in NOISE {
            let mut rows = learned.rows[NOISY].clone();
            chance.disturb(&mut rows, self.width, strength);
            let probe = Probe::learn(&rows, &learned.ids, &self.table);
            let mut rows = seen.rows[NOISY].clone();
            chance.disturb(&mut rows, self.width, strength);
            let first = self.rank(&probe.map(&rows)).best(&seen.ids);
            let mut answer = Vec::new();
            let (mut right, mut words) = (0, 0);
            for ids in texts {
                let (sent, leaving) = self.disturbed(ids, strength, &mut chance)?;
                answer.extend(self.likeliest(&leaving[self.width..])?);
                let count = ids.len().min(guess.div_ceil(texts.len()));
                right += self.nearest_words(&probe, &ids[..count], &sent)?;
                words += count;
            }
            let changed = own.iter().zip(&answer).filter(|(a, b)| a != b).count();
            println!(
                "| {}% | {:.1}% | {right} of {words} | {:.1}% |",
                strength * 100.0,
                first * 100.0,
                changed as f64 / own.len() as f64 * 100.0
            );
        }
        Ok(())
    }

    /// Rows that a host receives behind noise, and those that leave the last layer.
    fn disturbed(
        &mut self,
        ids: &[u32],
        strength: f32,
        chance: &mut Chance,
    ) -> Outcome<(Vec<f32>, Vec<f32>)> {
        let (mut x, mut sent) = (Vec::new(), Vec::new());
        self.head.embed(ids, &mut x)?;
        for piece in &mut self.pieces {
            if piece.layers().start == DEPTHS[NOISY] {
                chance.disturb(&mut x, self.width, strength);
                sent.clone_from(&x);
            }
            let seq = piece.open()?;
            piece.forward(&[Span::new(seq, 0, ids.len() as u32)], &mut x)?;
            piece.close(seq);
        }
        Ok((sent, x))
    }

    /// Number of words that are found: for each, the guess whose row is nearest to the one that was
    /// sent.
    fn nearest_words(&mut self, probe: &Probe, ids: &[u32], sent: &[f32]) -> Outcome<usize> {
        let width = self.width;
        let depth = DEPTHS[NOISY];
        let own = 0..self
            .pieces
            .iter()
            .take_while(|p| p.layers().end <= depth)
            .count();
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
        for (piece, seq) in self.pieces.iter_mut().zip(prefix) {
            piece.close(seq);
        }
        Ok(right)
    }

    /// Runs words through the private layers. Returns the one whose row `pick` chooses, and appends it
    /// to the prefix.
    fn try_words(
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
struct Guessed {
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

/// Nearest tokens of every row, by angle and by distance.
struct Ranks([Nearest; 2]);

impl Ranks {
    fn within(&self, most: usize, ids: &[u32]) -> f64 {
        let share = |ranks: &Nearest| {
            let pairs = ranks.iter().zip(ids);
            let hits = pairs.filter(|(rank, id)| rank.iter().take(most).any(|r| r == *id));
            hits.count() as f64 / ids.len().max(1) as f64
        };
        self.0.iter().map(share).fold(0.0, f64::max)
    }

    fn best(&self, ids: &[u32]) -> f64 {
        self.within(1, ids)
    }
}

/// Indices of the `most` best scores, best first.
fn order(scores: &[f32], most: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    let better = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]);
    if most < ids.len() {
        ids.select_nth_unstable_by(most, better);
        ids.truncate(most);
    }
    ids.sort_unstable_by(better);
    ids
}

fn is_same(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Random numbers, the same in every run.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Adds random signs to rows. `strength`: their norm as a part of the row's.
    fn disturb(&mut self, rows: &mut [f32], width: usize, strength: f32) {
        for row in rows.chunks_exact_mut(width) {
            let size = strength * dot(row, row).sqrt() / (width as f32).sqrt();
            for value in row {
                *value += if self.next().is_multiple_of(2) {
                    size
                } else {
                    -size
                };
            }
        }
    }

    /// Draws a token by its logit.
    fn draw(&mut self, logits: &[f32]) -> u32 {
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from((l - most).exp())).sum();
        let mut left = (self.next() >> 11) as f64 / (1u64 << 53) as f64 * sum;
        for (id, logit) in (0u32..).zip(logits) {
            left -= f64::from((logit - most).exp());
            if left <= 0.0 {
                return id;
            }
        }
        0
    }
}
