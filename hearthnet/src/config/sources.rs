//! Where settings are written: one TOML file and `--set` flags, and how an error finds back to
//! its file, line and key.
//!
//! Each source is checked by itself first, so that what is wrong in one is never said of the
//! other; what depends on several keys is checked on all of them together, and looked up here.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::Config;
use crate::failure::{Failure, Kind};

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
        if let Some(rest) = message.strip_prefix("unknown field `") {
            let name = rest.split('`').next().unwrap_or_default();
            return Self::unknown(key, name);
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

    /// A key that no setting has; `name` is the part of it that is not known.
    fn unknown(key: &str, name: &str) -> Self {
        let known = known_keys();
        let table = match key.rsplit_once('.') {
            Some((table, last)) if last == name => format!("{table}."),
            _ => String::new(),
        };
        let leaf = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
        let elsewhere = known.iter().find(|known| leaf(known) == name);
        let alike = known
            .iter()
            .filter(|known| known.starts_with(&table))
            .map(|known| (strsim::normalized_levenshtein(known, key), known))
            .filter(|(alike, _)| *alike >= ALIKE)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, known)| known);
        let hint = match (elsewhere, alike) {
            (Some(meant), _) | (None, Some(meant)) => format!("did you mean {meant}?"),
            (None, None) => "`hearthnet config show` lists every key and its default".to_owned(),
        };
        Self {
            hint: Some(hint),
            ..Self::new(key, "is no setting")
        }
    }
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

/// All keys, with their tables.
fn known_keys() -> Vec<String> {
    let mut keys = Vec::new();
    let all = toml::Table::try_from(Config::default()).unwrap_or_default();
    flatten("", &all, &mut |key, _| keys.push(key.to_owned()));
    keys
}

/// M26's name of a key, and ours.
const ALIASES: [(&str, &str); 1] = [(
    "research.distributed_inference.host.shard_max_vram_mb",
    "research.distributed_inference.host.memory_budget_mb",
)];

/// Gives keys their names here. A key that stands under both names is refused.
fn rename(table: &mut toml::Table) -> Result<(), Wrong> {
    for (theirs, ours) in ALIASES {
        let (Some((path, old)), Some((_, new))) = (theirs.rsplit_once('.'), ours.rsplit_once('.'))
        else {
            continue;
        };
        let mut inner = Some(&mut *table);
        for part in path.split('.') {
            inner = inner.and_then(|t| t.get_mut(part)?.as_table_mut());
        }
        let Some(inner) = inner else { continue };
        if let Some(value) = inner.remove(old)
            && inner.insert(new.to_owned(), value).is_some()
        {
            let why = format!("is M26's name for {ours}: write one of them");
            return Err(Wrong::new(theirs, &why));
        }
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
        let text = std::fs::read_to_string(path).map_err(|e| {
            Failure::new(Kind::Config, format!("cannot read {}: {e}", path.display()))
                .hint("check --config, or leave it out to use the defaults")
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
            let at = file.at(e.span().map_or(1, |span| file.line(&span)));
            Failure::new(Kind::Config, format!("{at}this is not TOML: {}", e.message()))
                .hint("write KEY = VALUE below a [TABLE], and text in \"quotes\"; compare with config/hearthnet.toml")
        })?;
        if let Err(error) = toml::from_str::<Config>(text) {
            let span = error.span().unwrap_or_default();
            let key = key_at(text, &span).unwrap_or_default();
            let at = file.at(file.line(&span));
            return Err(Wrong::of(&key, error.message()).failure(&at));
        }
        rename(&mut file.table).map_err(|wrong| file.failure(&wrong))?;
        Ok(file)
    }

    /// The failure of a setting in this file.
    pub(super) fn failure(&self, wrong: &Wrong) -> Failure {
        wrong.failure(&format!("{}: ", self.place(&wrong.key)))
    }

    /// `FILE:LINE` of a key, or of the innermost table of it that is there.
    pub(super) fn place(&self, key: &str) -> String {
        let theirs = ALIASES.iter().find(|(_, ours)| *ours == key);
        let span = span_of(&self.text, key)
            .or_else(|| span_of(&self.text, theirs?.0))
            .or_else(|| span_of(&self.text, key.rsplit_once('.')?.0));
        match span {
            Some(span) => format!("{}:{}", self.path.display(), self.line(&span)),
            None => self.path.display().to_string(),
        }
    }

    fn at(&self, line: usize) -> String {
        format!("{}:{line}: ", self.path.display())
    }

    /// The line in which a part begins, from 1.
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..span.start).unwrap_or_default();
        1 + before.iter().filter(|&&b| b == b'\n').count()
    }
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
        let mut value = Some(value);
        let mut table = toml::Table::new();
        for part in key.rsplit('.') {
            if part.is_empty() {
                return Err(wrong());
            }
            let inner = value.take().unwrap_or(toml::Value::Table(table));
            table = toml::Table::from_iter([(part.to_owned(), inner)]);
        }
        let mut flag = Self {
            text: set.to_owned(),
            key: key.to_owned(),
            table,
        };
        if let Err(error) = flag.table.clone().try_into::<Config>() {
            return Err(flag.failure(&Wrong::of(key, error.message())));
        }
        rename(&mut flag.table).map_err(|wrong| flag.failure(&wrong))?;
        Ok(flag)
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

/// The key whose name or value lies at a place of the text: the innermost one.
fn key_at(text: &str, span: &Range<usize>) -> Option<String> {
    let table = DeTable::parse(text).ok()?;
    let mut found = None;
    walk("", table.get_ref(), &mut |key, name, value| {
        let holds = |part: &Range<usize>| {
            part.start <= span.start && span.start < part.end.max(part.start + 1)
        };
        if holds(&name) || holds(&value) {
            found = Some(key.to_owned());
        }
    });
    found
}

/// Where the name of a key stands in the text.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    let table = DeTable::parse(text).ok()?;
    let mut found = None;
    walk("", table.get_ref(), &mut |at, name, _| {
        if at == key {
            found = Some(name);
        }
    });
    found
}

/// Hears a key with its tables, and where its name and its value stand.
type EachKey<'a> = dyn FnMut(&str, Range<usize>, Range<usize>) + 'a;

/// Visits every key, tables before what is in them, with the places of its name and value.
fn walk(prefix: &str, table: &DeTable<'_>, each: &mut EachKey<'_>) {
    for (name, value) in table {
        let mut key = String::from(prefix);
        if !prefix.is_empty() {
            key.push('.');
        }
        let _ = write!(key, "{}", name.get_ref());
        each(&key, name.span(), value.span());
        if let DeValue::Table(inner) = value.get_ref() {
            walk(&key, inner, each);
        }
    }
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

pub(super) fn flatten(prefix: &str, table: &toml::Table, each: &mut dyn FnMut(&str, &toml::Value)) {
    for (key, value) in table {
        let path = if prefix.is_empty() {
            key.clone()
        } else {
            format!("{prefix}.{key}")
        };
        match value {
            toml::Value::Table(inner) => flatten(&path, inner, each),
            other => each(&path, other),
        }
    }
}
