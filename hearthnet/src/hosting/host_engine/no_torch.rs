//! Stand-in for libtorch's engine in a program built without it: every use is an error with build
//! instructions.

use std::path::Path;

use hearthnet_engine::bench::{BenchOptions, EngineBench};
use hearthnet_files::ModelFile;
use hearthnet_shard::{Place, RunningHost, ShardConfig, StartError, StartProgress};

use crate::cli::args::TorchArgs;
use crate::cli::{Failure, Kind};

/// Engine without values.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Torch {}

fn not_built() -> Failure {
    Failure::new(
        Kind::Config,
        "this program was built without libtorch, which the engine `torch` computes with",
    )
    .code("backend_not_built")
    .hint(
        "fetch libtorch and build one with it: LIBTORCH=DIRECTORY cargo build --release --features torch \
         (docs/graphics-cards.md); without it `--backend exact` computes on the processor",
    )
}

impl Torch {
    pub(super) fn of(_: &str, _: &str) -> Result<Self, Failure> {
        Err(not_built())
    }

    #[allow(clippy::unused_async, reason = "same signature as with libtorch")]
    pub(super) async fn start(
        &self,
        _: ShardConfig,
        _: Place<'_>,
        _: impl FnMut(StartProgress) + Send,
    ) -> Result<RunningHost, StartError> {
        match *self {}
    }

    pub(super) fn layer_bytes(&self, _: &ModelFile) -> Result<Vec<u64>, Failure> {
        match *self {}
    }

    pub(super) fn is_on_card(&self, _: &ModelFile) -> Result<bool, Failure> {
        match *self {}
    }
}

/// Always fails.
pub(crate) fn bench(
    _: &Path,
    _: &TorchArgs,
    _: &BenchOptions,
    _: &mut dyn FnMut(&str),
) -> Result<EngineBench, Failure> {
    Err(not_built())
}
