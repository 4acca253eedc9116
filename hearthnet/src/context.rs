//! What every command is given.

use crate::args::Global;
use crate::config::Config;

/// The flags that all commands have, and the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) global: Global,
    pub(crate) config: Config,
}
