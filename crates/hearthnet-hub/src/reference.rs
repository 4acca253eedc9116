//! Model references: an id of the catalogue, a file, a file on the hub, or an address.
//!
//! | text | model |
//! |---|---|
//! | `smollm2-135m-instruct` | an id of the catalogue |
//! | `m.gguf`, `dir/m.gguf`, `~/m.gguf` | a file of this machine |
//! | `./dir`, `dir/`, `~/dir` | a Hugging Face directory of this machine |
//! | `hf:owner/repo/file.gguf`, `hf:owner/repo@revision/dir/file.gguf` | a file on the hub |
//! | `https://host/path/file.gguf` | a file elsewhere; `http://` on this machine only |
//!
//! A fetched file of the last two kinds lies in the directory of models, under a name derived from
//! the reference, so that the same reference finds it again.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use crate::source::{CONFIG, MAX_CHARS, Source, fetched_file};

/// A model as the user named it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ModelRef {
    /// Id in the catalogue.
    Id(String),
    /// File or Hugging Face directory on this machine; a leading `~/` is the home directory.
    Path(PathBuf),
    /// File of that name on the hub ([`Source::Hf`]), or at an address ([`Source::Url`]).
    Remote(Source),
}

/// The text is no model reference.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?}: {reason}")]
pub struct ParseModelRefError {
    /// Beginning of the text.
    text: String,
    reason: &'static str,
}

const HUB: &str =
    "write hf:OWNER/REPOSITORY/FILE.gguf, optionally with @REVISION after the repository";
const URL: &str = "write https://HOST/PATH/FILE.gguf; http:// is for this machine only (127.0.0.1)";

impl FromStr for ModelRef {
    type Err = ParseModelRefError;

    fn from_str(text: &str) -> Result<Self, ParseModelRefError> {
        let fail = |reason| ParseModelRefError {
            text: text.chars().take(80).collect(),
            reason,
        };
        if text.is_empty() || text.len() > MAX_CHARS || text.contains('\0') {
            return Err(fail(
                "name an id of the catalogue, a .gguf file, hf:OWNER/REPOSITORY/FILE.gguf or an https address",
            ));
        }
        if let Some(rest) = text.strip_prefix("hf:") {
            return hub(rest).ok_or_else(|| fail(HUB));
        }
        if text.contains("://") {
            let url = text.to_owned();
            return match fetched_file(text) {
                Some(_) => Ok(Self::Remote(Source::Url { url })),
                None => Err(fail(URL)),
            };
        }
        let path = Path::new(text);
        let is_path = path.extension().is_some_and(|e| e == "gguf")
            || path.components().count() > 1
            || text.ends_with('/')
            || path.is_absolute();
        Ok(match is_path {
            true => Self::Path(expand_home(path)),
            false => Self::Id(text.to_owned()),
        })
    }
}

fn hub(rest: &str) -> Option<ModelRef> {
    let source = hub_file(rest)?;
    let is_model = matches!(&source, Source::Hf { file, .. } if file.ends_with(".gguf"));
    is_model.then_some(ModelRef::Remote(source))
}

fn hub_file(rest: &str) -> Option<Source> {
    let mut parts = rest.splitn(3, '/');
    let (owner, name, file) = (parts.next()?, parts.next()?, parts.next()?);
    let (name, revision) = match name.split_once('@') {
        Some((name, revision)) => (name, revision),
        None => (name, "main"),
    };
    let source = Source::Hf {
        repository: format!("{owner}/{name}"),
        revision: revision.to_owned(),
        file: file.to_owned(),
    };
    source.check().is_ok().then_some(source)
}

/// Source that an adoption states: a model file as in [`ModelRef::Remote`], or a Hugging Face
/// directory as `hf:owner/repo@revision/config.json` or `https://host/path/config.json`.
pub fn adopted_source(text: &str) -> Option<Source> {
    if let Ok(ModelRef::Remote(source)) = text.parse() {
        return Some(source);
    }
    let source = match text.strip_prefix("hf:") {
        Some(rest) => hub_file(rest)?,
        None => Source::Url {
            url: text.to_owned(),
        },
    };
    (text.len() <= MAX_CHARS && source.is_directory()).then_some(source)
}

/// Text for an adoption of the directory of a repository on the hub.
pub fn directory_on_hub(repository: &str, revision: &str) -> Option<String> {
    let text = format!("hf:{repository}@{revision}/{CONFIG}");
    adopted_source(&text).map(|source| ModelRef::Remote(source).to_string())
}

/// Expands a leading `~/`, if the home directory is known.
pub fn expand_home(path: &Path) -> PathBuf {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_owned(),
    }
}

impl ModelRef {
    /// Path of the fetched file below the directory of models. `None` for ids, whose path the
    /// catalogue has, and for local paths.
    pub fn place(&self) -> Option<PathBuf> {
        match self {
            Self::Remote(Source::Hf {
                repository,
                revision,
                file,
            }) => {
                // Two revisions are two files.
                let repository = match revision.as_str() {
                    "main" => repository.clone(),
                    revision => format!("{repository}@{revision}"),
                };
                Some(Path::new("hf").join(repository).join(file))
            }
            Self::Remote(Source::Url { url }) => {
                // The digest covers the whole address, because two queries are two files.
                let mut short = hex::encode(Sha256::digest(url.as_bytes()));
                short.truncate(16);
                Some(Path::new("url").join(short).join(fetched_file(url)?))
            }
            _ => None,
        }
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => f.write_str(id),
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Remote(Source::Hf {
                repository,
                revision,
                file,
            }) => match revision.as_str() {
                "main" => write!(f, "hf:{repository}/{file}"),
                revision => write!(f, "hf:{repository}@{revision}/{file}"),
            },
            Self::Remote(source) => source.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_testkit::rows;

    use super::*;

    #[test]
    fn a_model_is_named_by_id_path_hub_file_or_address() {
        let id = |s: &str| ModelRef::Id(s.to_owned());
        let path = |s: &str| ModelRef::Path(PathBuf::from(s));
        let hub = |r: &str, v: &str, f: &str| {
            ModelRef::Remote(Source::Hf {
                repository: r.to_owned(),
                revision: v.to_owned(),
                file: f.to_owned(),
            })
        };
        let url = |s: &str| ModelRef::Remote(Source::Url { url: s.to_owned() });
        for (text, meant) in [
            ("smollm2-135m-instruct", id("smollm2-135m-instruct")),
            ("m.gguf", path("m.gguf")),
            ("./m", path("./m")),
            ("m/", path("m/")),
            ("/models/m.bin", path("/models/m.bin")),
            ("hf:o/r/f.gguf", hub("o/r", "main", "f.gguf")),
            ("hf:o/r@v1.2/d/f.gguf", hub("o/r", "v1.2", "d/f.gguf")),
        ] {
            assert_eq!(text.parse(), Ok(meant), "{text}");
        }
        for text in [
            "https://example.org/a/f.gguf?download=true",
            "http://127.0.0.1:8080/f.gguf",
        ] {
            assert_eq!(text.parse(), Ok(url(text)));
        }
    }

    #[test]
    fn a_reference_that_could_leave_its_place_or_its_machine_is_refused() {
        for text in [
            "",
            "a\0b.gguf",
            "hf:o/r",
            "hf:o/r/f.bin",
            "hf:../r/f.gguf",
            "hf:o/r/../../f.gguf",
            "hf:o/r@../f.gguf",
            "hf:o/r//f.gguf",
            "hf:o/r/-f.gguf",
            "hf:o/r?x/f.gguf",
            "http://example.org/f.gguf",
            "http://127.0.0.1.example.org/f.gguf",
            "http://localhost@example.org/f.gguf",
            "https://user:secret@example.org/f.gguf",
            "https://example.org/",
            "https://example.org/f.bin",
            "https://example.org/..gguf/..",
            "https:///f.gguf",
            "https://example.org/a b.gguf",
            "ftp://example.org/f.gguf",
            "file:///etc/passwd.gguf",
        ] {
            assert!(text.parse::<ModelRef>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_fetched_file_is_found_only_by_its_reference() {
        let place = |s: &str| s.parse::<ModelRef>().unwrap().place();
        assert_eq!(place("hf:o/r/d/f.gguf"), Some("hf/o/r/d/f.gguf".into()));
        assert_eq!(place("hf:o/r@v1/f.gguf"), Some("hf/o/r@v1/f.gguf".into()));
        let a = place("https://example.org/f.gguf?a").unwrap();
        let b = place("https://example.org/f.gguf?b").unwrap();
        assert_ne!(a, b);
        assert!(a.ends_with("f.gguf") && a.starts_with("url"));
        assert_eq!(place("m.gguf"), None);
    }

    #[test]
    fn a_reference_reads_as_it_was_written() {
        for text in [
            "id",
            "hf:o/r/f.gguf",
            "hf:o/r@v1/f.gguf",
            "https://e.org/f.gguf",
        ] {
            assert_eq!(text.parse::<ModelRef>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_adoption_may_name_a_directory_which_is_no_model_reference() {
        for (text, beside) in rows! {
            "hf:o/r/config.json" => "https://hub/o/r/resolve/main/m.safetensors";
            "hf:o/r@v1/d/config.json" => "https://hub/o/r/resolve/v1/d/m.safetensors";
            "https://e.org/d/config.json" => "https://e.org/d/m.safetensors";
            "https://e.org/config.json?x=/y" => "https://e.org/m.safetensors?x=/y";
        } {
            assert!(text.parse::<ModelRef>().is_err(), "{text}");
            let source = adopted_source(text).unwrap();
            assert!(source.is_directory() && source.is_public(), "{text}");
            let found = source.beside("m.safetensors").unwrap();
            assert_eq!(found.address("https://hub").unwrap(), beside);
            for name in ["", "../m", "a/b", "m?x", ".m", "m%2f"] {
                assert_eq!(source.beside(name), None, "{name}");
            }
        }
        let file = adopted_source("hf:o/r/f.gguf").unwrap();
        assert!(!file.is_directory());
        for text in [
            "config.json",
            "hf:o/config.json",
            "hf:o/r/model.safetensors",
            "http://example.org/config.json",
            "https://example.org/model.safetensors",
        ] {
            assert_eq!(adopted_source(text), None, "{text}");
        }
        let named = directory_on_hub("o/r", "0123abcd");
        assert_eq!(named.as_deref(), Some("hf:o/r@0123abcd/config.json"));
        assert_eq!(directory_on_hub("o/r", "-x"), None);
    }
}
