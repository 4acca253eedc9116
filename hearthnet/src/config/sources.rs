//! Sources of settings: one TOML file and `--set` flags. Maps an error to its file, line and key.
//!
//! Each setting of a source is checked by itself, so that an error names its key and is never
//! reported for another source: first that there is such a key, then that the value has the type
//! of the default, then the rule of the setting (`rules.rs`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hearthnet_platform::files::is_character_device;
use hearthnet_platform::regular_file;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::files::EXAMPLE;
use super::schema::Config;
use crate::cli::{Failure, failure};

/// Longest configuration in bytes: about 60 times the commented example.
const MAX_BYTES: u64 = 1 << 20;

/// Smallest similarity (normalised edit distance) of a key that is suggested. Below one half a
/// suggestion only confuses.
const ALIKE: f64 = 0.5;

/// Other names of keys, and the keys.
const ALIASES: [(&str, &str); 2] = [
    (
        "research.distributed_inference.host.shard_max_vram_mb",
        "research.distributed_inference.host.memory_budget_mb",
    ),
    // Beside the other limits of a host.
    (
        "research.distributed_inference.host.niceness",
        "manners.niceness",
    ),
];

/// Setting that is a table of names that the user chooses. It is one setting, whatever it holds: such
/// a name may have dots.
const TABLE_OF_NAMES: &str = "http.aliases";

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
    pub(super) fn new(key: &str, why: impl Into<String>) -> Self {
        Self {
            key: key.to_owned(),
            why: why.into(),
            hint: None,
        }
    }

    /// Converts to a failure; `at` is the place, followed by a colon and a space.
    pub(super) fn failure(&self, at: &str) -> Failure {
        let hint = "`hearthnet config show` lists every key and its default";
        failure!(Config, "{at}{} {}", self.key, self.why).hint(self.hint.as_deref().unwrap_or(hint))
    }

    /// Error for an unknown key; suggests a similar one.
    fn unknown(key: &str) -> Self {
        let mut known = Vec::new();
        flatten("", &defaults(), &mut |key, _| known.push(key.to_owned()));
        let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
        let elsewhere = known
            .iter()
            .find(|known| known.rsplit('.').next() == Some(name));
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

/// Defaults of all keys: the commented example.
fn defaults() -> Table {
    let table = EXAMPLE.parse();
    debug_assert!(table.is_ok(), "the example is no TOML: {table:?}");
    table.unwrap_or_default()
}

/// Merges tables over the defaults; later tables override earlier ones.
pub(super) fn over_defaults<'a>(tables: impl IntoIterator<Item = &'a Table>) -> Table {
    let mut all = defaults();
    for table in tables {
        merge(&mut all, table.clone());
    }
    all
}

/// Checks each setting of a source, and replaces an alias by its key. Returns all invalid
/// settings, under the names used in the source.
fn read_source(table: &Table) -> (Table, Vec<ConfigError>) {
    let (mut read, mut wrong) = (Table::new(), Vec::new());
    let defaults = defaults();
    flatten("", table, &mut |key, value| {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == key);
        let name = alias.map_or(key, |(_, name)| *name);
        let twice = name != key && lookup(table, name).is_some();
        match check_setting(&defaults, key, name, value) {
            Err(error) => wrong.push(error),
            Ok(()) if twice => wrong.push(ConfigError::new(
                key,
                format!("is an alias of {name}; set only one"),
            )),
            Ok(()) => merge(&mut read, nested(name, value.clone())),
        }
    });
    (read, wrong)
}

/// Checks one setting, which is called `key` in its source.
fn check_setting(
    defaults: &Table,
    key: &str,
    name: &str,
    value: &Value,
) -> Result<(), ConfigError> {
    // Any part of the key may be the one that is unknown, or no table.
    let ends = name.match_indices('.').map(|(end, _)| end);
    for part in ends.filter_map(|end| name.get(..end)) {
        match lookup(defaults, part) {
            Some(Value::Table(_)) => {}
            Some(default) => {
                let why = wrong_type(&Value::Table(Table::new()), default);
                return Err(ConfigError::new(part, why.unwrap_or_default()));
            }
            None => return Err(ConfigError::unknown(part)),
        }
    }
    let default = lookup(defaults, name).ok_or_else(|| ConfigError::unknown(key))?;
    if let Some(why) = wrong_type(value, default) {
        return Err(ConfigError::new(key, why));
    }
    let mut alone = defaults.clone();
    merge(&mut alone, nested(name, value.clone()));
    let read: Result<Config, _> = alone.try_into();
    read.map(drop)
        .map_err(|error| ConfigError::new(key, error.message()))
}

/// Why a value has another type than the default; `None` if it has not.
fn wrong_type(value: &Value, default: &Value) -> Option<String> {
    let expected = match (default, value) {
        (Value::String(_), Value::String(_))
        | (Value::Boolean(_), Value::Boolean(_))
        | (Value::Integer(_), Value::Integer(0..))
        | (Value::Float(_), Value::Float(_) | Value::Integer(_))
        | (Value::Table(_), Value::Table(_)) => return None,
        (Value::Array(_), Value::Array(items)) => {
            let text = Value::String(String::new());
            return items.iter().find_map(|item| wrong_type(item, &text));
        }
        (Value::String(_), _) => "text in quotes",
        (Value::Integer(_), _) => "a whole number, 0 or more",
        (Value::Boolean(_), _) => "true or false",
        (Value::Array(_), _) => "a list, for example [\"a\", \"b\"]",
        (Value::Table(_), _) => "a table of settings",
        (Value::Float(_) | Value::Datetime(_), _) => "a number",
    };
    let found = match value {
        Value::String(text) => format!("the text {text:?}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        other => other.to_string(),
    };
    Some(format!("must be {expected}, not {found}"))
}

/// Table with one nested key.
fn nested(key: &str, value: Value) -> Table {
    match key.split_once('.') {
        None => Table::from_iter([(key.to_owned(), value)]),
        Some((head, rest)) => {
            let inner = Value::Table(nested(rest, value));
            Table::from_iter([(head.to_owned(), inner)])
        }
    }
}

/// Source of settings, each valid by itself: a file, or one `--set KEY=VALUE`.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// Path of the file; `None` for a flag.
    pub(super) path: Option<PathBuf>,
    text: String,
    pub(super) table: Table,
}

impl Source {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let bytes = contents(path).map_err(|e| {
            failure!(Config, "cannot read {}: {e}", path.display())
                .hint("check --config, or leave it out to use the defaults")
        })?;
        let text = String::from_utf8(bytes).map_err(|e| {
            let sound = e.as_bytes().get(..e.utf8_error().valid_up_to());
            let line = line_after(sound.unwrap_or_default());
            failure!(Config, "{}:{line}: this line is not UTF-8", path.display()).hint(
                "save the file as UTF-8: `iconv -f latin1 -t utf8 FILE` converts one in Latin-1",
            )
        })?;
        Self::of_file(path, &text)
    }

    pub(super) fn of_file(path: &Path, text: &str) -> Result<Self, Failure> {
        let table: Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| line_of(text, &span));
            failure!(Config, "{}:{line}: this is not TOML: {}", path.display(), e.message())
                .hint("write KEY = VALUE below a [TABLE], and text in \"quotes\"; compare with config/hearthnet.toml")
        })?;
        Self::checked(Some(path.to_owned()), text, &table)
    }

    /// Reads a flag. A value that is not TOML is treated as text.
    pub(super) fn of_flag(set: &str) -> Result<Self, Failure> {
        let wrong = || {
            failure!(Config, "--set {set:?} is not KEY=VALUE")
                .hint("for example: --set policy.research.enable=true")
        };
        let (key, value) = set.split_once('=').ok_or_else(wrong)?;
        let key = key.trim();
        let value = value.trim();
        let value = format!("v = {value}")
            .parse::<Table>()
            .ok()
            .and_then(|mut t| t.remove("v"))
            .unwrap_or_else(|| Value::String(value.to_owned()));
        if key.split('.').any(str::is_empty) {
            return Err(wrong());
        }
        Self::checked(None, set, &nested(key, value))
    }

    /// Checks each setting. The error is that of the first invalid one.
    fn checked(path: Option<PathBuf>, text: &str, table: &Table) -> Result<Self, Failure> {
        let (read, wrong) = read_source(table);
        let source = Self {
            path,
            text: text.to_owned(),
            table: read,
        };
        let first = |wrong: &ConfigError| source.span(&wrong.key).map(|span| span.start);
        match wrong.into_iter().min_by_key(first) {
            Some(wrong) => Err(source.failure(&wrong)),
            None => Ok(source),
        }
    }

    /// Whether the source sets this key or a table that contains it.
    pub(super) fn sets(&self, key: &str) -> bool {
        lookup(&self.table, key).is_some()
    }

    /// Failure of a setting in this source. That of a flag names at least the key of the flag.
    pub(super) fn failure(&self, wrong: &ConfigError) -> Failure {
        let key = self.text.split('=').next().unwrap_or_default().trim();
        let mut named = wrong.clone();
        if self.path.is_none() && !wrong.key.starts_with(key) {
            named.key = key.to_owned();
        }
        named.failure(&format!("{}: ", self.place(&wrong.key)))
    }

    /// `FILE:LINE` of a key, or of its innermost table in the file; for a flag, the flag.
    pub(super) fn place(&self, key: &str) -> String {
        let Some(path) = &self.path else {
            return format!("--set {}", self.text);
        };
        let span = self
            .span(key)
            .or_else(|| span_of(&self.text, key.rsplit_once('.')?.0));
        match span {
            Some(span) => format!("{}:{}", path.display(), line_of(&self.text, &span)),
            None => path.display().to_string(),
        }
    }

    /// Position of a key or of its alias in a file.
    fn span(&self, key: &str) -> Option<Range<usize>> {
        self.path.as_ref()?;
        let alias = ALIASES.iter().find(|(_, name)| *name == key);
        let by_alias = || span_of(&self.text, alias?.0);
        span_of(&self.text, key).or_else(by_alias)
    }
}

/// Reads a configuration file: a regular file, or a device that ends, as `/dev/null`.
fn contents(path: &Path) -> io::Result<Vec<u8>> {
    if is_character_device(path)? {
        return regular_file::all_of(File::open(path)?, MAX_BYTES);
    }
    regular_file::read(path, MAX_BYTES)
}

/// Line number of a span, from 1.
fn line_of(text: &str, span: &Range<usize>) -> usize {
    debug_assert!(span.start <= text.len(), "a part of another text");
    line_after(text.as_bytes().get(..span.start).unwrap_or_default())
}

/// Number of the line, from 1, that contains the byte after `before`.
fn line_after(before: &[u8]) -> usize {
    1 + before.iter().filter(|&&b| b == b'\n').count()
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
fn merge(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(over)) => merge(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

fn lookup<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((head, rest)) => lookup(table.get(head)?.as_table()?, rest),
    }
}

/// Calls `each` for every setting: a key that is no table, or an empty one, or [`TABLE_OF_NAMES`].
pub(super) fn flatten(prefix: &str, table: &Table, each: &mut dyn FnMut(&str, &Value)) {
    for (key, value) in table {
        let path = match prefix {
            "" => key.clone(),
            prefix => format!("{prefix}.{key}"),
        };
        match value {
            Value::Table(inner) if !inner.is_empty() && path != TABLE_OF_NAMES => {
                flatten(&path, inner, each);
            }
            other => each(&path, other),
        }
    }
}
