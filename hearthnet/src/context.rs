//! Input of every command.

use crate::args::Global;
use crate::config::Config;

/// Global flags and the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) global: Global,
    pub(crate) config: Config,
}
