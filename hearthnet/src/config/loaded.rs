//! The configuration of a run, with the origin of each value.

use std::net::SocketAddr;
use std::path::Path;

use super::files::default_path;
use super::schema::Config;
use super::sources::{ConfigError, Source, flatten, over_defaults};
use crate::cli::Failure;

#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// Effective values: `policy.research.enable` is off if the module's own switch,
    /// `research.distributed_inference.enabled`, is off.
    pub(crate) config: Config,
    /// Values as written, over the defaults.
    written: toml::Table,
    /// Whether the research switch is on, but the module's own switch is off.
    pub(crate) module_is_off: bool,
    /// The file, if one was read, and the flags. Each overrides those before it.
    sources: Vec<Source>,
}

impl Loaded {
    /// Reads the file (`explicit`, or the user's own when it exists) and applies `--set` flags.
    pub(crate) fn load(explicit: Option<&Path>, sets: &[String]) -> Result<Self, Failure> {
        let path = match explicit {
            Some(path) => Some(path.to_owned()),
            None => default_path().filter(|p| p.exists()),
        };
        let file = path.iter().map(|path| Source::read(path));
        let flags = sets.iter().map(|set| Source::of_flag(set));
        let sources = file.chain(flags).collect::<Result<Vec<_>, _>>()?;
        let written = over_defaults(sources.iter().map(|source| &source.table));
        let mut config = valid(&written).map_err(|wrong| {
            let mut last_first = sources.iter().rev();
            match last_first.find(|source| source.path.is_some() || source.sets(&wrong.key)) {
                Some(source) => source.failure(&wrong),
                None => wrong.failure(""),
            }
        })?;
        let asked = config.policy.research.enable;
        config.policy.research.enable &= config.research.distributed_inference.enabled;
        Ok(Self {
            module_is_off: asked && !config.policy.research.enable,
            config,
            written,
            sources,
        })
    }

    /// Path of the file, if one was read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.sources.first()?.path.as_deref()
    }

    /// Every key with its value and the origin of the value.
    pub(crate) fn explain(&self) -> Vec<(String, String, String)> {
        let mut rows = Vec::new();
        flatten("", &self.written, &mut |key, value| {
            let origin = match self.sources.iter().rev().find(|source| source.sets(key)) {
                Some(file) if file.path.is_some() => file.place(key),
                Some(_) => "--set".to_owned(),
                None => "default".to_owned(),
            };
            rows.push((key.to_owned(), value.to_string(), origin));
        });
        rows
    }
}

/// Checks a configuration text; `path` is only used in errors.
pub(crate) fn check(path: &Path, text: &str) -> Result<(), Failure> {
    let file = Source::of_file(path, text)?;
    let checked = valid(&over_defaults([&file.table]));
    checked.map(drop).map_err(|wrong| file.failure(&wrong))
}

/// Configuration with valid settings. Checks the constraints between settings.
fn valid(table: &toml::Table) -> Result<Config, ConfigError> {
    let read: Result<Config, _> = table.clone().try_into();
    // Each source was valid by itself.
    let config = read.map_err(|error| ConfigError::new("the configuration", error.message()))?;
    for (key, listen) in [
        ("http.listen", &config.http.listen),
        ("metrics.listen", &config.metrics.listen),
    ] {
        let address = listen.parse::<SocketAddr>().ok();
        let is_local = address.is_none_or(|address| address.ip().is_loopback());
        if config.http.api_key_file.is_empty() && !is_local {
            let why = "can be reached by other machines, so a key is needed: name a file that holds one \
                       with http.api_key_file, or listen on 127.0.0.1 only";
            return Err(ConfigError::new(key, why));
        }
    }
    let http = &config.http;
    let certificate = ("tls_certificate_file", &http.tls_certificate_file);
    let private_key = ("tls_key_file", &http.tls_key_file);
    for ((key, file), (other_key, other)) in
        [(private_key, certificate), (certificate, private_key)]
    {
        if file.is_empty() && !other.is_empty() {
            let why =
                format!("is needed with http.{other_key}: TLS takes a certificate and its key");
            return Err(ConfigError::new(&format!("http.{key}"), why));
        }
    }
    match config.transport().validate() {
        Ok(()) => Ok(config),
        Err(why) => Err(ConfigError::new(
            "transport",
            format!("is not valid: {why}"),
        )),
    }
}
