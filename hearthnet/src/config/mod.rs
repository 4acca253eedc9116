//! The configuration: defaults, one TOML file, and `--set` on top.
//!
//! Defaults are the values of the commented example, `config/hearthnet.toml`. Values are merged as
//! TOML tables before they become a [`Config`], so that unknown keys are refused in every source,
//! and `config show` can name the origin of each value.

mod context;
mod files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod loaded;
mod rules;
mod schema;
mod sources;

pub(crate) use self::context::Context;
pub(crate) use self::files::{default_path, starter, xdg};
pub(crate) use self::loaded::{Loaded, check};
pub(crate) use self::rules::{QuietHours, parse_quiet_hours};
pub(crate) use self::schema::{Config, Host, Manners};

#[cfg(test)]
mod tests;
