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

mod calibrate;
mod lies;
mod page;
mod texts;

use std::fmt;
use std::time::SystemTime;

use hearthnet_engine::{EngineError, EngineOptions, Span};
use hearthnet_files::magnitude::{Band, magnitude};
use hearthnet_files::{BoundaryDtype, ModelFile};
use hearthnet_testkit::FullModel;
use hearthnet_tokens::{Special, Tokenizer};
use serde::Serialize;
use strum::VariantArray as _;

pub(crate) use calibrate::measured_bands;
pub use calibrate::{Bands, calibrate, hash_of};
pub use lies::{Lie, Scope};

use crate::{HarnessError, Result};
use calibrate::width;
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

/// Model, and the checks of its boundaries.
struct Subject<'a> {
    model: FullModel,
    layers: u32,
    width: usize,
    boundary: BoundaryDtype,
    bands: &'a [Band],
}

/// The course of one text under a lie.
#[derive(Clone, Default)]
struct Outcome {
    /// Rows after the latest layer. `None` if a row was not finite, or made a block overflow: such a
    /// text ends there, in a chat as well.
    rows: Option<Vec<f32>>,
    /// Whether a row differs from what the engine computed.
    audited: bool,
    checked: u64,
    refused: u64,
}

impl<'a> Subject<'a> {
    fn open(file: &ModelFile, bands: &'a [Band]) -> Result<Self> {
        let spec = file.spec();
        Ok(Self {
            model: FullModel::load(file, &EngineOptions::default(), &mut |_, _| {})?,
            layers: spec.layers,
            width: width(file)?,
            boundary: spec.boundary,
            bands,
        })
    }

    /// Runs texts; `lie` may change the row of a layer.
    fn run(
        &mut self,
        texts: &[Vec<u32>],
        mut lie: impl FnMut(u32, &mut [f32]),
    ) -> Result<Vec<Outcome>> {
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            let mut rows = Vec::new();
            self.model.head().embed(text, &mut rows)?;
            all.push(Outcome {
                rows: Some(rows),
                ..Outcome::default()
            });
        }
        for layer in 0..self.layers {
            self.layer(layer, &mut all)?;
            if layer >= PRIVATE {
                for text in &mut all {
                    self.boundary(layer, text, &mut lie)?;
                }
            }
        }
        Ok(all)
    }

    /// Runs a layer on all texts that have not ended.
    fn layer(&mut self, layer: u32, texts: &mut [Outcome]) -> Result<()> {
        let (width, engine) = (self.width, self.model.engine_mut());
        loop {
            let mut live: Vec<&mut Outcome> = texts.iter_mut().collect();
            live.retain(|text| text.rows.is_some());
            let parts: Vec<&[f32]> = live
                .iter()
                .filter_map(|text| text.rows.as_deref())
                .collect();
            if parts.is_empty() {
                return Ok(());
            }
            let (mut spans, mut x) = (Vec::with_capacity(parts.len()), parts.concat());
            for rows in &parts {
                let count = u32::try_from(rows.len() / width)?;
                spans.push(Span::new(engine.open()?, 0, count));
            }
            let done = engine.forward_layers(layer..layer + 1, &spans, &mut x);
            for span in &spans {
                engine.close(span.seq);
            }
            match done {
                Ok(()) => {
                    let mut rest = x.as_slice();
                    for rows in live.iter_mut().filter_map(|text| text.rows.as_mut()) {
                        let (own, others) = rest.split_at(rows.len());
                        rows.copy_from_slice(own);
                        rest = others;
                    }
                    return Ok(());
                }
                // The text with this row ends; the others run again.
                Err(EngineError::BoundaryOverflow { row, .. }) => {
                    let mut before = 0;
                    let has_row = |text: &&mut &mut Outcome| {
                        before += text.rows.as_ref().map_or(0, Vec::len) / width;
                        row < before
                    };
                    if let Some(text) = live.iter_mut().find(has_row) {
                        text.end();
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Passes the rows of a text on, as a host that lies would, and checks them.
    fn boundary(
        &self,
        layer: u32,
        text: &mut Outcome,
        lie: &mut impl FnMut(u32, &mut [f32]),
    ) -> Result<()> {
        let Some(rows) = &mut text.rows else {
            return Ok(());
        };
        let (mut honest, mut sent) = (Vec::new(), Vec::new());
        self.boundary.encode(rows, &mut honest);
        rows.chunks_exact_mut(self.width)
            .for_each(|row| lie(layer, row));
        self.boundary.encode(rows, &mut sent);
        text.audited |= honest != sent;
        rows.clear();
        self.boundary.decode(&sent, rows)?;
        let band = self.bands.get(layer as usize);
        let mut finite = true;
        for row in rows.chunks_exact(self.width) {
            let is_finite = row.iter().all(|value| value.is_finite());
            let fits = |band: &Band| band.contains(magnitude(row));
            text.checked += 1;
            text.refused += u64::from(!is_finite || !band.is_none_or(fits));
            finite &= is_finite;
        }
        if !finite {
            text.end();
        }
        Ok(())
    }

    /// Likeliest next token at each position of the texts; none for a text that has ended.
    fn likeliest(&self, texts: &[Outcome], lengths: &[Vec<u32>]) -> Result<Vec<Option<usize>>> {
        let (mut all, mut logits) = (Vec::new(), Vec::new());
        for (text, ids) in texts.iter().zip(lengths) {
            let Some(rows) = &text.rows else {
                all.extend(ids.iter().map(|_| None));
                continue;
            };
            for row in rows.chunks_exact(self.width) {
                self.model.head().logits(row, &mut logits)?;
                let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
                all.push(best.map(|(token, _)| token));
            }
        }
        Ok(all)
    }
}

impl Outcome {
    /// The text ends at a row that no host computes on.
    fn end(&mut self) {
        self.rows = None;
        self.audited = true;
        self.refused = self.refused.max(1);
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
    file: &ModelFile,
    bands: &[Band],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Sensitivity> {
    let spec = file.spec();
    if bands.len() != spec.layers as usize {
        return Err(HarnessError::usage(format!(
            "the model has {} layers, and bands for {}: measure them with `hearthnet adversarial \
             calibrate`",
            spec.layers,
            bands.len()
        )));
    }
    let mut subject = Subject::open(file, bands)?;
    let tokenizer = Tokenizer::from_gguf(file.gguf())?;
    let texts = in_tokens(&tokenizer)?;
    let honest = subject.run(&texts, |_, _| {})?;
    let expected = subject.likeliest(&honest, &texts)?;

    let all: Vec<(Lie, f64, Scope, Scope)> = every_point().collect();
    let (mut points, total) = (Vec::new(), all.len() + 1);
    for (lie, strength, values, layers) in all {
        progress(points.len(), total);
        let mut random = Random::new(7);
        let middle = (PRIVATE + subject.layers) / 2;
        let lied = subject.run(&texts, |layer, row| {
            if layers == Scope::All || layer == middle {
                lie.apply(row, strength, values, &mut random);
            }
        })?;
        let tokens = subject.likeliest(&lied, &texts)?;
        points.push(Point {
            lie,
            strength,
            values,
            layers,
            refused: share(lied.iter().map(|text| text.refused > 0)),
            audited: share(lied.iter().map(|text| text.audited)),
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
    let lies = Lie::VARIANTS.iter();
    let curves = lies.flat_map(move |lie| scopes.clone().map(move |s| (*lie, s)));
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
    texts: &[Outcome],
) -> Result<FalseAlarms> {
    let (mut rows, mut refused) = (0, 0);
    let mut add = |texts: &[Outcome]| {
        rows += texts.iter().map(|text| text.checked).sum::<u64>();
        refused += texts.iter().map(|text| text.refused).sum::<u64>();
        rows >= HONEST_ROWS
    };
    let mut enough = add(texts);
    for source in texts::sources() {
        let ids = tokenizer.encode_document(source, Special::Plain)?;
        for part in ids.chunks(LONGEST_HONEST) {
            if enough {
                break;
            }
            enough = add(&subject.run(&[part.to_vec()], |_, _| {})?);
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
    fn bands(file: &ModelFile) -> Vec<Band> {
        let tokenizer = Tokenizer::from_gguf(file.gguf()).unwrap();
        let texts = in_tokens(&tokenizer).unwrap();
        let mut bands = vec![
            Band {
                lo: f32::MAX,
                hi: 0.0
            };
            4
        ];
        let mut subject = Subject::open(file, &[]).unwrap();
        let measure = |layer: u32, row: &mut [f32]| {
            let (size, band) = (magnitude(row), &mut bands[layer as usize]);
            (band.lo, band.hi) = (band.lo.min(size / 4.0), band.hi.max(size * 4.0));
        };
        subject.run(&texts, measure).unwrap();
        bands
    }

    #[test]
    fn a_strong_lie_is_refused_and_every_lie_that_changes_a_bit_is_found_by_an_audit() {
        let folder = tempfile::tempdir().unwrap();
        let tiny = TinyLlama {
            layers: 4,
            ..TinyLlama::default()
        };
        let file = ModelFile::open(&tiny.write(folder.path())).unwrap();
        let bands = bands(&file);
        let mut steps = 0;
        let result = sensitivity(&file, &bands, &mut |done, _| steps = done).unwrap();
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
        assert!(sensitivity(&file, &bands[1..], &mut |_, _| {}).is_err());
    }
}
