//! Sources of settings: one TOML file and `--set` flags. Maps an error to its file, line and key.
//!
//! Each source is checked by itself first, so that an error of one is never reported for the other.
//! Constraints between keys are checked on the merged configuration, and located here.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use hearthnet_bus::regular_file;
use toml::de::{DeTable, DeValue};

use super::files::EXAMPLE;
use super::schema::Config;
use crate::cli::failure::{Failure, Kind};

/// Longest configuration in bytes: about 60 times the commented example.
const MAX_BYTES: u64 = 1 << 20;

/// Smallest similarity (normalised edit distance) of a key that is suggested. Below one half a
/// suggestion only confuses.
const ALIKE: f64 = 0.5;

/// Invalid setting, with the reason.
#[derive(Debug, Clone)]
pub(super) struct ConfigError {
    /// Full key, as `engine.threads`.
    pub(super) key: String,
    why: String,
    hint: Option<String>,
}

impl ConfigError {
    /// `why` continues the sentence that begins with the key.
    pub(super) fn new(key: &str, why: &str) -> Self {
        Self {
            key: key.to_owned(),
            why: why.to_owned(),
            hint: None,
        }
    }

    /// Converts to a failure; `at` is the place, followed by a colon and a space.
    pub(super) fn failure(&self, at: &str) -> Failure {
        let hint = "`hearthnet config show` lists every key and its default";
        Failure::new(Kind::Config, format!("{at}{} {}", self.key, self.why))
            .hint(self.hint.as_deref().unwrap_or(hint))
    }

    /// Rewords serde's message for the user.
    fn of(key: &str, message: &str) -> Self {
        if message.starts_with("unknown field `") {
            return Self::unknown(key);
        }
        let why = match message.split_once(", expected ") {
            Some((found, expected)) => match found
                .strip_prefix("invalid type: ")
                .or_else(|| found.strip_prefix("invalid value: "))
            {
                Some(found) => format!(
                    "must be {}, not {}",
                    describe_type(expected),
                    describe_type(found)
                ),
                None => message.to_owned(),
            },
            None => message.to_owned(),
        };
        Self::new(key, &why)
    }

    /// Error for an unknown key; suggests a similar one.
    fn unknown(key: &str) -> Self {
        let mut known = Vec::new();
        flatten("", &defaults(), &mut |key, _| known.push(key.to_owned()));
        let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
        let elsewhere = known.iter().find(|known| last_segment(known) == name);
        let alike = known
            .iter()
            .filter(|known| known.starts_with(table))
            .map(|known| (strsim::normalized_levenshtein(known, key), known))
            .filter(|(alike, _)| *alike >= ALIKE)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, known)| known);
        Self {
            hint: elsewhere
                .or(alike)
                .map(|meant| format!("did you mean {meant}?")),
            ..Self::new(key, "is not a setting")
        }
    }
}

fn last_segment(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// Rewords serde's name of a type or a value.
fn describe_type(text: &str) -> String {
    let kinds = [
        ("string ", "the text "),
        ("integer ", ""),
        ("floating point ", ""),
        ("boolean ", ""),
    ];
    for (kind, said) in kinds {
        if let Some(value) = text.strip_prefix(kind) {
            return format!("{said}{}", value.trim_matches('`'));
        }
    }
    match text {
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number, 0 or more".to_owned(),
        "i64" | "i32" | "isize" => "a whole number".to_owned(),
        "f64" | "f32" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a string" => "text in quotes".to_owned(),
        "a sequence" => "a list, for example [\"a\", \"b\"]".to_owned(),
        "sequence" => "a list".to_owned(),
        "map" => "a table".to_owned(),
        other if other.starts_with("struct ") => "a table of settings".to_owned(),
        other => other.to_owned(),
    }
}

/// Defaults of all keys: the commented example.
fn defaults() -> toml::Table {
    let table = EXAMPLE.parse();
    debug_assert!(table.is_ok(), "the example is no TOML: {table:?}");
    table.unwrap_or_default()
}

/// Merges tables over the defaults; later tables override earlier ones.
pub(super) fn over_defaults<'a>(
    tables: impl IntoIterator<Item = &'a toml::Table>,
) -> Result<Config, toml::de::Error> {
    let mut all = defaults();
    for table in tables {
        merge(&mut all, table.clone());
    }
    all.try_into()
}

/// Invalid keys of a table with serde's message.
fn wrong_keys(table: &toml::Table) -> Vec<(String, String)> {
    let mut wrong = Vec::new();
    flatten("", table, &mut |key, value| {
        if let Err(error) = over_defaults([&nested(key, value.clone())]) {
            let message = error.message().to_owned();
            let unknown = message.strip_prefix("unknown field `");
            let name = unknown.and_then(|rest| rest.split('`').next());
            // The unknown name may be one of the tables in the key.
            let end = name.and_then(|name| Some(key.find(name)? + name.len()));
            let key = end.and_then(|end| key.get(..end)).unwrap_or(key);
            wrong.push((key.to_owned(), message));
        }
    });
    wrong
}

/// Table with one nested key.
fn nested(key: &str, value: toml::Value) -> toml::Table {
    match key.split_once('.') {
        None => toml::Table::from_iter([(key.to_owned(), value)]),
        Some((head, rest)) => {
            let inner = toml::Value::Table(nested(rest, value));
            toml::Table::from_iter([(head.to_owned(), inner)])
        }
    }
}

pub(super) const HOST: &str = "research.distributed_inference.host";

/// Alias of a key, and the key.
const ALIAS: &str = "research.distributed_inference.host.shard_max_vram_mb";
const ALIASED_KEY: &str = "research.distributed_inference.host.memory_budget_mb";

/// Replaces the alias by the key. Refuses a table that has both.
fn rename(table: &mut toml::Table) -> Result<(), ConfigError> {
    let mut inner = Some(&mut *table);
    for part in HOST.split('.') {
        inner = inner.and_then(|table| table.get_mut(part)?.as_table_mut());
    }
    if let Some(inner) = inner
        && let Some(value) = inner.remove(last_segment(ALIAS))
        && inner
            .insert(last_segment(ALIASED_KEY).to_owned(), value)
            .is_some()
    {
        let why = format!("is an alias of {ALIASED_KEY}; set only one");
        return Err(ConfigError::new(ALIAS, &why));
    }
    Ok(())
}

/// Configuration file in which each value is valid by itself.
#[derive(Debug, Clone)]
pub(super) struct FileText {
    pub(super) path: PathBuf,
    text: String,
    pub(super) table: toml::Table,
}

impl FileText {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let bytes = contents(path).map_err(|e| {
            Failure::new(Kind::Config, format!("cannot read {}: {e}", path.display()))
                .hint("check --config, or leave it out to use the defaults")
        })?;
        let text = String::from_utf8(bytes).map_err(|e| {
            let sound = e.as_bytes().get(..e.utf8_error().valid_up_to());
            let line = line_after(sound.unwrap_or_default());
            Failure::new(
                Kind::Config,
                format!("{}:{line}: this line is not UTF-8", path.display()),
            )
            .hint("save the file as UTF-8: `iconv -f latin1 -t utf8 FILE` converts one in Latin-1")
        })?;
        Self::of(path, &text)
    }

    pub(super) fn of(path: &Path, text: &str) -> Result<Self, Failure> {
        let mut file = Self {
            path: path.to_owned(),
            text: text.to_owned(),
            table: toml::Table::new(),
        };
        file.table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| file.line(&span));
            Failure::new(Kind::Config, format!("{}:{line}: this is not TOML: {}", path.display(), e.message()))
                .hint("write KEY = VALUE below a [TABLE], and text in \"quotes\"; compare with config/hearthnet.toml")
        })?;
        rename(&mut file.table).map_err(|wrong| file.failure(&wrong))?;
        let wrong = wrong_keys(&file.table).into_iter();
        match wrong.min_by_key(|(key, _)| file.span(key).map(|span| span.start)) {
            Some((key, message)) => Err(file.failure(&ConfigError::of(&key, &message))),
            None => Ok(file),
        }
    }

    /// Failure of a setting in this file, under the name used there.
    pub(super) fn failure(&self, wrong: &ConfigError) -> Failure {
        let key = match wrong.key == ALIASED_KEY && span_of(&self.text, ALIASED_KEY).is_none() {
            true => ALIAS.to_owned(),
            false => wrong.key.clone(),
        };
        let named = ConfigError {
            key,
            ..wrong.clone()
        };
        named.failure(&format!("{}: ", self.place(&wrong.key)))
    }

    /// `FILE:LINE` of a key, or of its innermost table in the file.
    pub(super) fn place(&self, key: &str) -> String {
        let span = self
            .span(key)
            .or_else(|| span_of(&self.text, key.rsplit_once('.')?.0));
        match span {
            Some(span) => format!("{}:{}", self.path.display(), self.line(&span)),
            None => self.path.display().to_string(),
        }
    }

    /// Position of a key or of its alias.
    fn span(&self, key: &str) -> Option<Range<usize>> {
        let by_alias = || span_of(&self.text, ALIAS).filter(|_| key == ALIASED_KEY);
        span_of(&self.text, key).or_else(by_alias)
    }

    /// Line number of a span, from 1.
    fn line(&self, span: &Range<usize>) -> usize {
        debug_assert!(span.start <= self.text.len(), "a part of another text");
        line_after(self.text.as_bytes().get(..span.start).unwrap_or_default())
    }
}

/// Reads a configuration file: a regular file, or a device that ends, as `/dev/null`.
fn contents(path: &Path) -> io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.file_type().is_char_device() {
        return regular_file::all_of(File::open(path)?, MAX_BYTES);
    }
    regular_file::read(path, MAX_BYTES)
}

/// Number of the line, from 1, that contains the byte after `before`.
fn line_after(before: &[u8]) -> usize {
    1 + before.iter().filter(|&&b| b == b'\n').count()
}

/// One `--set KEY=VALUE`, valid by itself.
#[derive(Debug, Clone)]
pub(super) struct Flag {
    text: String,
    key: String,
    pub(super) table: toml::Table,
}

impl Flag {
    /// A value that is not TOML is treated as text.
    pub(super) fn parse(set: &str) -> Result<Self, Failure> {
        let wrong = || {
            Failure::new(Kind::Config, format!("--set {set:?} is not KEY=VALUE"))
                .hint("for example: --set policy.research.enable=true")
        };
        let (key, value) = set.split_once('=').ok_or_else(wrong)?;
        let key = key.trim();
        let value = value.trim();
        let value = format!("v = {value}")
            .parse::<toml::Table>()
            .ok()
            .and_then(|mut t| t.remove("v"))
            .unwrap_or_else(|| toml::Value::String(value.to_owned()));
        if key.split('.').any(str::is_empty) {
            return Err(wrong());
        }
        let mut flag = Self {
            text: set.to_owned(),
            key: key.to_owned(),
            table: nested(key, value),
        };
        rename(&mut flag.table).map_err(|wrong| flag.failure(&wrong))?;
        match over_defaults([&flag.table]) {
            Ok(_) => Ok(flag),
            Err(error) => Err(flag.failure(&ConfigError::of(key, error.message()))),
        }
    }

    /// Whether the flag sets this key or a table that contains it.
    pub(super) fn sets(&self, key: &str) -> bool {
        lookup(&self.table, key).is_some()
    }

    pub(super) fn failure(&self, wrong: &ConfigError) -> Failure {
        let named = ConfigError {
            key: match wrong.key.starts_with(&self.key) {
                true => wrong.key.clone(),
                false => self.key.clone(),
            },
            ..wrong.clone()
        };
        named.failure(&format!("--set {}: ", self.text))
    }
}

/// Position of a key's name in the text.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    fn find(table: &DeTable<'_>, key: &str) -> Option<Range<usize>> {
        let (head, rest) = key
            .split_once('.')
            .map_or((key, None), |(h, r)| (h, Some(r)));
        let (name, value) = table.get_key_value(head)?;
        match (rest, value.get_ref()) {
            (None, _) => Some(name.span()),
            (Some(rest), DeValue::Table(inner)) => find(inner, rest),
            _ => None,
        }
    }
    find(DeTable::parse(text).ok()?.get_ref(), key)
}

/// Merges `over` into `base`, table by table.
pub(super) fn merge(base: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(over)) => merge(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

pub(super) fn lookup<'a>(table: &'a toml::Table, key: &str) -> Option<&'a toml::Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((head, rest)) => lookup(table.get(head)?.as_table()?, rest),
    }
}

/// Calls `each` for every key that is no table, or an empty one.
pub(super) fn flatten(prefix: &str, table: &toml::Table, each: &mut dyn FnMut(&str, &toml::Value)) {
    for (key, value) in table {
        let path = if prefix.is_empty() {
            key.clone()
        } else {
            format!("{prefix}.{key}")
        };
        match value {
            toml::Value::Table(inner) if !inner.is_empty() => flatten(&path, inner, each),
            other => each(&path, other),
        }
    }
}
