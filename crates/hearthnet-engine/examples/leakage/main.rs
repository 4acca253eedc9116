//! Measures how much a host can read of a chat: words recovered from the rows that enter and leave
//! its layers.
//!
//! ```text
//! cargo run --release -p hearthnet-engine --example leakage -- [OPTION]...
//!
//! --train TOKENS  tokens that the attacker learns from (32768)
//! --guess TOKENS  words to guess and check (96)
//! --random TOKENS replaces each text by so many random tokens
//! --noise 1       measures noise that the caller adds to rows
//! --dump FOLDER   writes rows for tests/measure/inverter.py, and measures nothing
//! ```
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
//!
//! With `--random`, texts are random tokens. This models a secret beginning that a caller puts before
//! its conversation. `noise.rs` describes `--noise`, and `dump.rs` describes `--dump`.

#![allow(
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measurement: it prints, and its own shapes are its own"
)]

mod chance;
mod dump;
mod guess;
mod noise;
mod probe;

use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;

use hearthnet_engine::{Engine, EngineOptions, Head, SeqId, Span};
use hearthnet_files::{BoundaryDtype, ModelFile};
use hearthnet_tokens::{Special, Tokenizer};
use rayon::prelude::*;

use self::chance::Chance;
use self::probe::Probe;

const TEXT: &str = include_str!("texts.txt");
/// Numbers of private first layers.
const DEPTHS: [u32; 7] = [0, 1, 2, 4, 8, 15, 22];
/// Deepest of them at which words are guessed: a guess runs all private layers.
const GUESSED: u32 = 8;
/// Numbers of private last layers.
const LAST: [u32; 5] = [0, 1, 2, 4, 8];
/// Texts that the model writes for the attacker in parallel.
const TEXTS: usize = 64;
/// Nearest tokens of every row, the nearest first.
type Nearest = Vec<Vec<u32>>;
type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let (mut train, mut guess, mut random) = (32_768usize, 96usize, 0usize);
    let (mut noise, mut folder) = (0usize, None);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or("a value is missing")?;
        match flag.as_str() {
            "--train" => train = value.parse()?,
            "--guess" => guess = value.parse()?,
            "--random" => random = value.parse()?,
            "--noise" => noise = value.parse()?,
            "--dump" => folder = Some(PathBuf::from(value)),
            _ => return Err(format!("unknown: {flag}").into()),
        }
    }
    let file = ModelFile::open(&hearthnet_testkit::smollm2())?;
    let mut lab = Lab::open(&file)?;
    say(&format!(
        "having the model write {train} tokens to learn from"
    ));
    let mut learned = lab.write(train / TEXTS)?;
    if let Some(folder) = folder {
        return lab.dump(learned, &folder);
    }
    let texts = lab.encode(TEXT.split("\n\n"))?;
    let (mut chance, vocab) = (Chance(0x51a7_0b5c_93d1_e2f4), lab.norms.len());
    let texts: Vec<Vec<u32>> = match random {
        0 => texts,
        _ => texts.iter().map(|_| chance.tokens(random, vocab)).collect(),
    };
    let seen = lab.read(&texts)?;
    say(&format!(
        "{} tokens of {} texts to recover",
        seen.ids.len(),
        texts.len()
    ));
    if noise > 0 {
        return lab.noise(&learned, &texts, guess);
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
    boundary: BoundaryDtype,
    /// Embeddings of all tokens, as they enter layer 0.
    table: Vec<f32>,
    /// Norms of the embeddings.
    norms: Vec<f32>,
}

/// Rows of some tokens.
#[derive(Default)]
struct Seen {
    ids: Vec<u32>,
    /// Number of each token's text.
    texts: Vec<u32>,
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
            boundary: file.spec().boundary,
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

    fn encode<'a>(&self, texts: impl Iterator<Item = &'a str>) -> Outcome<Vec<Vec<u32>>> {
        texts
            .map(|text| Ok(self.tokenizer.encode(text.trim(), Special::Plain)?))
            .collect()
    }

    fn open_sequence(&mut self) -> Outcome<Vec<SeqId>> {
        let pieces = self.pieces.iter_mut();
        Ok(pieces.map(Engine::open).collect::<Result<_, _>>()?)
    }

    fn close(&mut self, sequence: Vec<SeqId>) {
        for (piece, seq) in self.pieces.iter_mut().zip(sequence) {
            piece.close(seq);
        }
    }

    /// Text of the model's own: [`TEXTS`] texts of `tokens` tokens, at temperature 1.
    fn write(&mut self, tokens: usize) -> Outcome<Seen> {
        let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
        let mut now = chance.tokens(TEXTS, self.norms.len());
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
            into.texts.extend(0..TEXTS as u32);
            self.run(&spans, &mut x, into)?;
            seen.leaving.clear();
            self.head.logits(&x, &mut logits)?;
            let each = logits.chunks_exact(self.norms.len());
            now = each.map(|logits| chance.draw(logits)).collect();
        }
        for sequence in sequences {
            self.close(sequence);
        }
        Ok(seen)
    }

    /// Rows of texts, without the first position of each.
    fn read(&mut self, texts: &[Vec<u32>]) -> Outcome<Seen> {
        let mut all = Seen::default();
        for (number, ids) in (0u32..).zip(texts) {
            let seen = self.run_text(ids)?;
            all.ids.extend(&ids[1..]);
            all.texts.extend(ids[1..].iter().map(|_| number));
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

    fn run_text(&mut self, ids: &[u32]) -> Outcome<Seen> {
        let (mut x, mut seen) = (Vec::new(), Seen::default());
        self.head.embed(ids, &mut x)?;
        let sequence = self.open_sequence()?;
        let spans = [(sequence, 0, ids.len() as u32)];
        self.run(&spans, &mut x, &mut seen)?;
        let [(sequence, ..)] = spans;
        self.close(sequence);
        Ok(seen)
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
