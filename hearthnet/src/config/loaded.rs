//! The configuration of a run, with the origin of each value.

use std::path::Path;

use super::files::default_path;
use super::schema::Config;
use super::sources::{FileText, Flag, flatten, lookup, over_defaults};
use crate::cli::failure::{Failure, Kind};

#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// Effective values: `policy.research.enable` is off if the module's own switch,
    /// `research.distributed_inference.enabled`, is off.
    pub(crate) config: Config,
    /// Values as written.
    written: Config,
    file: Option<FileText>,
    flags: Vec<Flag>,
}

impl Loaded {
    /// Reads the file (`explicit`, or the user's own when it exists) and applies `--set` flags.
    pub(crate) fn load(explicit: Option<&Path>, sets: &[String]) -> Result<Self, Failure> {
        let path = match explicit {
            Some(path) => Some(path.to_owned()),
            None => default_path().filter(|p| p.exists()),
        };
        let file = path.map(|path| FileText::read(&path)).transpose()?;
        let flags = sets.iter().map(|set| Flag::parse(set));
        let flags = flags.collect::<Result<Vec<Flag>, Failure>>()?;
        let tables = file.iter().map(|file| &file.table);
        let written = over_defaults(tables.chain(flags.iter().map(|flag| &flag.table)))
            // Each source was valid by itself.
            .map_err(|e| Failure::new(Kind::Config, e.message()))?;
        if let Err(wrong) = written.validate() {
            let flag = flags.iter().rev().find(|flag| flag.sets(&wrong.key));
            return Err(match (flag, &file) {
                (Some(flag), _) => flag.failure(&wrong),
                (None, Some(file)) => file.failure(&wrong),
                (None, None) => wrong.failure(""),
            });
        }
        let mut config = written.clone();
        config.policy.research.enable &= config.research.distributed_inference.enabled;
        Ok(Self {
            config,
            written,
            file,
            flags,
        })
    }

    /// Whether the research switch is on, but the module's own switch is off.
    pub(crate) fn module_is_off(&self) -> bool {
        self.written.policy.research.enable && !self.config.policy.research.enable
    }

    /// Path of the file, if one was read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Every key with its value and the origin of the value.
    pub(crate) fn explain(&self) -> Result<Vec<(String, String, String)>, Failure> {
        let all = toml::Table::try_from(&self.written).map_err(Failure::internal)?;
        let mut rows = Vec::new();
        flatten("", &all, &mut |key, value| {
            let origin = match &self.file {
                _ if self.flags.iter().any(|flag| flag.sets(key)) => "--set".to_owned(),
                Some(file) if lookup(&file.table, key).is_some() => file.place(key),
                _ => "default".to_owned(),
            };
            rows.push((key.to_owned(), value.to_string(), origin));
        });
        Ok(rows)
    }
}

/// Checks a configuration text; `path` is only used in errors.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), Failure> {
    let file = FileText::of(path, text)?;
    let config = over_defaults([&file.table])
        .map_err(|e| Failure::new(Kind::Config, format!("{}: {}", path.display(), e.message())))?;
    config.validate().map_err(|wrong| file.failure(&wrong))
}
