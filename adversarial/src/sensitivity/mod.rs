//! `hearthnet adversarial sensitivity`: how strong a lie about rows must be to be found, and to
//! change the answer (cases 33 to 38).
//!
//! ```text
//! texts -> layer 0 -> ... -> layer L -> [lie] -> boundary -> ... -> likeliest next tokens
//!                                         |          |
//!                                         |          +- refused: not finite, or outside of the band
//!                                         +- found by an audit: the bits that are sent differ
//! ```
//!
//! The engine, the bands and the rounding at a boundary are those of the product. Rows go through
//! one process, since a network changes no number.

mod lies;
mod page;
mod texts;

use std::fmt;
use std::path::Path;
use std::time::SystemTime;

use hearthnet_engine::{EngineOptions, Span};
use hearthnet_files::magnitude::{Band, magnitude};
use hearthnet_files::{BoundaryDtype, ModelFile};
use hearthnet_testkit::FullModel;
use hearthnet_tokens::{Special, Tokenizer};
use serde::Serialize;

pub use lies::{Lie, Scope};

use crate::{HarnessError, Result};
use lies::Random;

/// Longest text with lies, in tokens. All texts together are one batch.
const LONGEST: usize = 64;
/// Longest honest text, in tokens.
const LONGEST_HONEST: usize = 256;
/// Honest rows to check, over all boundaries.
const HONEST_ROWS: u64 = 250_000;
/// First layer whose rows a host returns: the caller runs the ones before it.
const PRIVATE: u32 = 2;
/// Share of answers that are audited by default.
const AUDIT_SHARE: f64 = 0.05;

/// Effect and detection of a lie of one strength.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point {
    pub lie: Lie,
    pub strength: f64,
    /// Changed values of each row.
    pub values: Scope,
    /// Layers whose rows are changed: the middle one, or all that hosts run.
    pub layers: Scope,
    /// Share of the texts with a row that the checks refuse.
    pub refused: f64,
    /// Share of the texts with a row that differs in a bit, as an audit finds it.
    pub audited: f64,
    /// Share of the positions at which the likeliest next token is another one.
    pub changed: f64,
}

/// Honest rows that the checks refuse.
#[derive(Clone, Debug, Serialize)]
pub struct FalseAlarms {
    pub rows: u64,
    pub refused: u64,
    /// Names of the kinds of texts.
    pub texts: Vec<&'static str>,
}

/// Result of a sweep.
#[derive(Clone, Debug, Serialize)]
pub struct Sensitivity {
    version: &'static str,
    date: String,
    model: String,
    /// Texts with lies, and their positions.
    texts: usize,
    positions: usize,
    pub points: Vec<Point>,
    pub false_alarms: FalseAlarms,
}

impl Sensitivity {
    /// Page with plots.
    pub fn page(&self) -> String {
        page::page(self)
    }
}

/// Model, and the checks of its boundaries.
struct Subject<'a> {
    model: FullModel,
    layers: u32,
    width: usize,
    boundary: BoundaryDtype,
    bands: &'a [Band],
}

/// What happens to a batch of texts.
struct Outcome {
    /// Of each text, whether a row was refused.
    refused: Vec<bool>,
    /// Of each text, whether a row differs from what the engine computed.
    audited: Vec<bool>,
    rows: u64,
    refused_rows: u64,
    /// Rows after the last layer.
    last: Vec<f32>,
}

impl<'a> Subject<'a> {
    fn open(file: &ModelFile, bands: &'a [Band]) -> Result<Self> {
        let spec = file.spec();
        Ok(Self {
            model: FullModel::load(file, &EngineOptions::default(), &mut |_, _| {})?,
            layers: spec.layers,
            width: spec.width as usize,
            boundary: spec.boundary,
            bands,
        })
    }

    /// Runs a batch of texts; `lie` may change the row of a layer.
    fn run(&mut self, texts: &[&[u32]], mut lie: impl FnMut(u32, &mut [f32])) -> Result<Outcome> {
        let mut x = Vec::new();
        self.model.head().embed(&texts.concat(), &mut x)?;
        let mut outcome = Outcome {
            refused: vec![false; texts.len()],
            audited: vec![false; texts.len()],
            rows: 0,
            refused_rows: 0,
            last: Vec::new(),
        };
        let (mut honest, mut sent) = (Vec::new(), Vec::new());
        for layer in 0..self.layers {
            let engine = self.model.engine_mut();
            let mut spans = Vec::with_capacity(texts.len());
            for text in texts {
                spans.push(Span::new(engine.open()?, 0, u32::try_from(text.len())?));
            }
            engine.forward_layers(layer..layer + 1, &spans, &mut x)?;
            for span in &spans {
                engine.close(span.seq);
            }
            if layer < PRIVATE {
                continue;
            }
            honest.clear();
            self.boundary.encode(&x, &mut honest);
            x.chunks_exact_mut(self.width)
                .for_each(|row| lie(layer, row));
            sent.clear();
            self.boundary.encode(&x, &mut sent);
            x.clear();
            self.boundary.decode(&sent, &mut x)?;
            let band = self.bands.get(layer as usize);
            let bytes = self.width * self.boundary.bytes_per_value();
            let of_text = (0..)
                .zip(texts)
                .flat_map(|(n, text)| std::iter::repeat_n(n, text.len()));
            let rows = x.chunks_exact(self.width);
            let bits = honest.chunks_exact(bytes).zip(sent.chunks_exact(bytes));
            for ((text, row), (honest, sent)) in of_text.zip(rows).zip(bits) {
                let finite = row.iter().all(|value| value.is_finite());
                let refused =
                    !finite || band.is_some_and(|band: &Band| !band.contains(magnitude(row)));
                outcome.rows += 1;
                outcome.refused_rows += u64::from(refused);
                mark(&mut outcome.refused, text, refused);
                mark(&mut outcome.audited, text, honest != sent);
            }
        }
        outcome.last = x;
        Ok(outcome)
    }

    /// Likeliest next token at each position.
    fn likeliest(&self, rows: &[f32]) -> Result<Vec<usize>> {
        // Not finite rows have no logits, and no likeliest token.
        let (mut all, mut logits) = (Vec::new(), Vec::new());
        for row in rows.chunks_exact(self.width) {
            if !row.iter().all(|value| value.is_finite()) {
                all.push(usize::MAX);
                continue;
            }
            self.model.head().logits(row, &mut logits)?;
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            all.push(best.map_or(usize::MAX, |(token, _)| token));
        }
        Ok(all)
    }
}

fn mark(flags: &mut [bool], at: usize, set: bool) {
    if let Some(flag) = flags.get_mut(at) {
        *flag |= set;
    }
}

fn share(flags: impl ExactSizeIterator<Item = bool>) -> f64 {
    let all = flags.len().max(1) as f64;
    flags.filter(|flag| *flag).count() as f64 / all
}

/// Tries every lie in every strength on a model with these bands, and checks honest rows.
/// `progress` receives the steps that are done, and all.
///
/// # Errors
/// If the model has no bands, or cannot be run.
pub fn sensitivity(
    path: &Path,
    bands: &[Band],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Sensitivity> {
    let file = ModelFile::open(path)?;
    let spec = file.spec();
    if bands.len() != spec.layers as usize {
        return Err(HarnessError::usage(format!(
            "the model has {} layers and bands for {}: measure its bands first",
            spec.layers,
            bands.len()
        )));
    }
    let mut subject = Subject::open(&file, bands)?;
    let tokenizer = Tokenizer::from_gguf(file.gguf())?;
    let texts = in_tokens(&tokenizer)?;
    let batch: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let honest = subject.run(&batch, |_, _| {})?;
    let expected = subject.likeliest(&honest.last)?;

    let all: Vec<(Lie, f64, Scope, Scope)> = every_point().collect();
    let (mut points, total) = (Vec::new(), all.len() + 1);
    for (lie, strength, values, layers) in all {
        progress(points.len(), total);
        let mut random = Random(7);
        let middle = (PRIVATE + subject.layers) / 2;
        let lied = subject.run(&batch, |layer, row| {
            if layers == Scope::All || layer == middle {
                lie.apply(row, strength, values, &mut random);
            }
        })?;
        let tokens = subject.likeliest(&lied.last)?;
        points.push(Point {
            lie,
            strength,
            values,
            layers,
            refused: share(lied.refused.into_iter()),
            audited: share(lied.audited.into_iter()),
            changed: share(tokens.iter().zip(&expected).map(|(a, b)| a != b)),
        });
    }
    progress(points.len(), total);
    let false_alarms = false_alarms(&mut subject, &tokenizer, &honest)?;
    progress(total, total);
    Ok(Sensitivity {
        version: env!("CARGO_PKG_VERSION"),
        date: httpdate::fmt_http_date(SystemTime::now()),
        model: file.manifest(&mut |_, _| {}).weights_id().to_string(),
        texts: texts.len(),
        positions: expected.len(),
        points,
        false_alarms,
    })
}

/// Texts with lies.
fn in_tokens(tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let texts = texts::LANGUAGES.iter().map(|(_, text)| {
        let mut ids = tokenizer.encode_document(text, Special::Plain)?;
        ids.truncate(LONGEST);
        Ok(ids)
    });
    texts.collect()
}

fn every_point() -> impl Iterator<Item = (Lie, f64, Scope, Scope)> {
    let scopes = Scope::BOTH.into_iter();
    let scopes = scopes.flat_map(|values| Scope::BOTH.map(|layers| (values, layers)));
    let curves = Lie::ALL
        .into_iter()
        .flat_map(move |lie| scopes.clone().map(move |s| (lie, s)));
    curves.flat_map(|(lie, (values, layers))| {
        let strengths = lie.strengths().iter();
        strengths.map(move |strength| (lie, *strength, values, layers))
    })
}

/// Checks honest rows: those of the texts with lies, and of source code, until there are
/// [`HONEST_ROWS`].
fn false_alarms(
    subject: &mut Subject<'_>,
    tokenizer: &Tokenizer,
    texts: &Outcome,
) -> Result<FalseAlarms> {
    let (mut rows, mut refused) = (texts.rows, texts.refused_rows);
    for source in texts::sources() {
        let ids = tokenizer.encode_document(source, Special::Plain)?;
        for part in ids.chunks(LONGEST_HONEST) {
            if rows >= HONEST_ROWS {
                break;
            }
            let outcome = subject.run(&[part], |_, _| {})?;
            (rows, refused) = (rows + outcome.rows, refused + outcome.refused_rows);
        }
    }
    let languages = texts::LANGUAGES.iter().map(|(name, _)| *name);
    Ok(FalseAlarms {
        rows,
        refused,
        texts: languages.chain(["Rust with comments"]).collect(),
    })
}

/// Requests of which one is audited with 95% probability if this share of them is.
fn requests_to_detection(audited: f64) -> Option<u64> {
    let share = AUDIT_SHARE * audited;
    (share > 0.0).then(|| (0.05f64.ln() / (1.0 - share).ln()).ceil() as u64)
}

/// Table for people.
impl fmt::Display for Sensitivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = |scope| match scope {
            Scope::One => "one",
            Scope::All => "all",
        };
        writeln!(
            f,
            "{:<10} {:>8}  {:<6}  {:<6}  {:>8}  {:>14}  {:>14}  requests to 95% detection",
            "lie", "strength", "values", "layers", "refused", "found by audit", "tokens changed"
        )?;
        for point in &self.points {
            let requests = match requests_to_detection(point.audited) {
                _ if point.refused >= 1.0 => "1".to_owned(),
                Some(requests) => requests.to_string(),
                None => "never".to_owned(),
            };
            writeln!(
                f,
                "{:<10} {:>8}  {:<6}  {:<6}  {:>7.0}%  {:>13.0}%  {:>13.1}%  {requests}",
                point.lie.name(),
                point.strength,
                scope(point.values),
                scope(point.layers),
                100.0 * point.refused,
                100.0 * point.audited,
                100.0 * point.changed,
            )?;
        }
        let FalseAlarms {
            rows,
            refused,
            texts,
        } = &self.false_alarms;
        writeln!(
            f,
            "\n{refused} of {rows} honest rows refused ({})",
            texts.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearthnet_testkit::TinyLlama;

    #[test]
    fn requests_until_an_audit_finds_a_lie_follow_from_the_audited_share() {
        assert_eq!(requests_to_detection(1.0), Some(59));
        assert_eq!(requests_to_detection(0.5), Some(119));
        assert_eq!(requests_to_detection(0.0), None);
    }

    /// Four times the range of the texts' rows.
    fn bands(path: &Path) -> Vec<Band> {
        let file = ModelFile::open(path).unwrap();
        let tokenizer = Tokenizer::from_gguf(file.gguf()).unwrap();
        let texts = in_tokens(&tokenizer).unwrap();
        let batch: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let mut bands = vec![
            Band {
                lo: f32::MAX,
                hi: 0.0
            };
            4
        ];
        let mut subject = Subject::open(&file, &[]).unwrap();
        let measure = |layer: u32, row: &mut [f32]| {
            let (size, band) = (magnitude(row), &mut bands[layer as usize]);
            (band.lo, band.hi) = (band.lo.min(size / 4.0), band.hi.max(size * 4.0));
        };
        subject.run(&batch, measure).unwrap();
        bands
    }

    #[test]
    fn a_strong_lie_is_refused_and_every_lie_that_changes_a_bit_is_found_by_an_audit() {
        let folder = tempfile::tempdir().unwrap();
        let tiny = TinyLlama {
            layers: 4,
            ..TinyLlama::default()
        };
        let path = tiny.write(folder.path());
        let bands = bands(&path);
        let mut steps = 0;
        let result = sensitivity(&path, &bands, &mut |done, _| steps = done).unwrap();
        assert_eq!(steps, every_point().count() + 1);
        assert_eq!(result.points.len(), 4 * (9 + 9 + 12));
        let FalseAlarms { rows, refused, .. } = result.false_alarms;
        assert!(rows >= HONEST_ROWS && refused == 0, "{refused} of {rows}");
        let find = |lie, strength| {
            let mut all = result.points.iter();
            let scopes = (Scope::All, Scope::All);
            let of = |p: &&Point| (p.values, p.layers) == scopes && p.strength == strength;
            *all.find(|p| p.lie == lie && of(p)).unwrap()
        };
        let strong = find(Lie::Scaling, 100.0);
        assert_eq!((strong.refused, strong.audited), (1.0, 1.0));
        let weak = find(Lie::Noise, 0.01);
        assert_eq!((weak.refused, weak.audited), (0.0, 1.0));
        assert!(find(Lie::Noise, 1.0).changed > weak.changed);
        let (table, page) = (result.to_string(), result.page());
        assert!(table.contains(" honest rows refused (English, "), "{table}");
        assert_eq!(page.matches("<svg").count(), 12);
        assert!(page.ends_with("</html>\n"));
        assert!(sensitivity(&path, &bands[1..], &mut |_, _| {}).is_err());
    }
}
