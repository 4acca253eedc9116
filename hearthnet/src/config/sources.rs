//! Where settings are written: one TOML file and `--set` flags, and how an error finds back to
//! its file, line and key.
//!
//! Each source is checked by itself first, so that what is wrong in one is never said of the
//! other; what depends on several keys is checked on all of them together, and looked up here.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use hearthnet_bus::regular_file;
use toml::de::{DeTable, DeValue};

use super::{Config, EXAMPLE};
use crate::failure::{Failure, Kind};

/// Longest configuration that is read, in bytes: some 60 times the commented example.
const MAX_BYTES: u64 = 1 << 20;

/// How alike a known key must be to be meant, by normalised edit distance: half of its letters
/// may be wrong before a guess only confuses.
const ALIKE: f64 = 0.5;

/// A setting that cannot be, and why.
#[derive(Debug, Clone)]
pub(super) struct Wrong {
    /// The key with its tables, as `engine.threads`.
    pub(super) key: String,
    why: String,
    hint: Option<String>,
}

impl Wrong {
    /// `why` continues the sentence that begins with the key.
    pub(super) fn new(key: &str, why: &str) -> Self {
        Self {
            key: key.to_owned(),
            why: why.to_owned(),
            hint: None,
        }
    }

    /// The failure; `at` says where it is written, with a colon and a space behind.
    pub(super) fn failure(&self, at: &str) -> Failure {
        let hint = "`hearthnet config show` lists every key and its default";
        Failure::new(Kind::Config, format!("{at}{} {}", self.key, self.why))
            .hint(self.hint.as_deref().unwrap_or(hint))
    }

    /// What serde found wrong with a key, in words for people.
    fn of(key: &str, message: &str) -> Self {
        if message.starts_with("unknown field `") {
            return Self::unknown(key);
        }
        let why = match message.split_once(", expected ") {
            Some((found, expected)) => match found
                .strip_prefix("invalid type: ")
                .or_else(|| found.strip_prefix("invalid value: "))
            {
                Some(found) => format!("must be {}, not {}", people(expected), people(found)),
                None => message.to_owned(),
            },
            None => message.to_owned(),
        };
        Self::new(key, &why)
    }

    /// A key that no setting has.
    fn unknown(key: &str) -> Self {
        let mut known = Vec::new();
        flatten("", &defaults(), &mut |key, _| known.push(key.to_owned()));
        let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
        let elsewhere = known.iter().find(|known| leaf(known) == name);
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
            ..Self::new(key, "is no setting")
        }
    }
}

fn leaf(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// The words of serde for a type or a value, as people say them.
fn people(text: &str) -> String {
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

/// Every key with its default: the commented example.
fn defaults() -> toml::Table {
    let table = EXAMPLE.parse();
    debug_assert!(table.is_ok(), "the example is no TOML: {table:?}");
    table.unwrap_or_default()
}

/// The configuration that tables say, a later one over those before, and all of them over the defaults.
pub(super) fn over_defaults<'a>(
    tables: impl IntoIterator<Item = &'a toml::Table>,
) -> Result<Config, toml::de::Error> {
    let mut all = defaults();
    for table in tables {
        merge(&mut all, table.clone());
    }
    all.try_into()
}

/// The keys of a table that cannot be used, or not with their values, and what serde says of them.
fn wrong_keys(table: &toml::Table) -> Vec<(String, String)> {
    let mut wrong = Vec::new();
    flatten("", table, &mut |key, value| {
        if let Err(error) = over_defaults([&nested(key, value.clone())]) {
            let message = error.message().to_owned();
            let unknown = message.strip_prefix("unknown field `");
            let name = unknown.and_then(|rest| rest.split('`').next());
            // It may be one of the tables that is not known.
            let end = name.and_then(|name| Some(key.find(name)? + name.len()));
            let key = end.and_then(|end| key.get(..end)).unwrap_or(key);
            wrong.push((key.to_owned(), message));
        }
    });
    wrong
}

/// The table in which this key has this value, and nothing else.
fn nested(key: &str, value: toml::Value) -> toml::Table {
    match key.split_once('.') {
        None => toml::Table::from_iter([(key.to_owned(), value)]),
        Some((head, rest)) => {
            let inner = toml::Value::Table(nested(rest, value));
            toml::Table::from_iter([(head.to_owned(), inner)])
        }
    }
}

/// M26's name of a key, and ours.
const THEIRS: &str = "research.distributed_inference.host.shard_max_vram_mb";
const OURS: &str = "research.distributed_inference.host.memory_budget_mb";

/// Gives M26's key its name here. A key that stands under both names is refused.
fn rename(table: &mut toml::Table) -> Result<(), Wrong> {
    let mut inner = Some(&mut *table);
    for part in super::HOST.split('.') {
        inner = inner.and_then(|table| table.get_mut(part)?.as_table_mut());
    }
    if let Some(inner) = inner
        && let Some(value) = inner.remove(leaf(THEIRS))
        && inner.insert(leaf(OURS).to_owned(), value).is_some()
    {
        let why = format!("is M26's name for {OURS}: write one of them");
        return Err(Wrong::new(THEIRS, &why));
    }
    Ok(())
}

/// A configuration file, whose every value can be used by itself.
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
            Some((key, message)) => Err(file.failure(&Wrong::of(&key, &message))),
            None => Ok(file),
        }
    }

    /// The failure of a setting in this file, under the name that it has there.
    pub(super) fn failure(&self, wrong: &Wrong) -> Failure {
        let key = match wrong.key == OURS && span_of(&self.text, OURS).is_none() {
            true => THEIRS.to_owned(),
            false => wrong.key.clone(),
        };
        let named = Wrong {
            key,
            ..wrong.clone()
        };
        named.failure(&format!("{}: ", self.place(&wrong.key)))
    }

    /// `FILE:LINE` of a key, or of the innermost table of it that is there.
    pub(super) fn place(&self, key: &str) -> String {
        let span = self
            .span(key)
            .or_else(|| span_of(&self.text, key.rsplit_once('.')?.0));
        match span {
            Some(span) => format!("{}:{}", self.path.display(), self.line(&span)),
            None => self.path.display().to_string(),
        }
    }

    /// Where a key stands, under one name or the other.
    fn span(&self, key: &str) -> Option<Range<usize>> {
        let theirs = || span_of(&self.text, THEIRS).filter(|_| key == OURS);
        span_of(&self.text, key).or_else(theirs)
    }

    /// The line in which a part begins, from 1.
    fn line(&self, span: &Range<usize>) -> usize {
        debug_assert!(span.start <= self.text.len(), "a part of another text");
        line_after(self.text.as_bytes().get(..span.start).unwrap_or_default())
    }
}

/// What is in a configuration file: a regular one, or a device that ends, as `/dev/null`.
fn contents(path: &Path) -> io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.file_type().is_char_device() {
        return regular_file::all_of(File::open(path)?, MAX_BYTES);
    }
    regular_file::read(path, MAX_BYTES)
}

/// The number, from 1, of the line in which the byte after these stands.
fn line_after(before: &[u8]) -> usize {
    1 + before.iter().filter(|&&b| b == b'\n').count()
}

/// One `--set KEY=VALUE`, which can be used by itself.
#[derive(Debug, Clone)]
pub(super) struct Flag {
    text: String,
    key: String,
    pub(super) table: toml::Table,
}

impl Flag {
    /// A value that is not TOML is taken as text.
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
            Err(error) => Err(flag.failure(&Wrong::of(key, error.message()))),
        }
    }

    /// Whether it sets this key, or the table that holds it.
    pub(super) fn sets(&self, key: &str) -> bool {
        lookup(&self.table, key).is_some()
    }

    pub(super) fn failure(&self, wrong: &Wrong) -> Failure {
        let named = Wrong {
            key: match wrong.key.starts_with(&self.key) {
                true => wrong.key.clone(),
                false => self.key.clone(),
            },
            ..wrong.clone()
        };
        named.failure(&format!("--set {}: ", self.text))
    }
}

/// Where the name of a key stands in the text.
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

/// Lays `over` on `base`, table by table.
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

/// Visits every key that is no table, or an empty one.
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
