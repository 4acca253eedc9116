//! For tests: what a pipeline tells an observer that checks it.

use std::fmt;
use std::sync::Arc;

/// What a pipeline does. Layers are the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // For tests.
pub enum Told {
    /// It asks a host for a stream.
    Asked { layers: (u32, u32), epoch: u32 },
    /// It takes an answer, which names this epoch.
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
