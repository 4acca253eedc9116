//! Input of every command.

use super::schema::Config;
use crate::cli::args::Global;

/// Global flags and the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) global: Global,
    pub(crate) config: Config,
}
