//! For tests: an observer that checks the requests and answers of a pipeline.

use std::fmt;
use std::sync::Arc;

/// Event of a pipeline. `layers` are the first and the last layer of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // For tests.
pub enum Told {
    /// The pipeline asks a host for a stream.
    Asked { layers: (u32, u32), epoch: u32 },
    /// The pipeline takes an answer that names this epoch.
    Taken {
        layers: (u32, u32),
        epoch: u32,
        position: u32,
    },
}

/// Observer of a pipeline.
#[derive(Clone)]
pub struct Watch(Arc<dyn Fn(Told) + Send + Sync>);

impl Watch {
    pub fn new(observer: impl Fn(Told) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observer))
    }

    pub(super) fn tell(&self, told: Told) {
        (self.0)(told);
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
