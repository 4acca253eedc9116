//! Opens model files. Errors of model files, for the user.

use std::path::Path;

use hearthnet_engine::LoadError;
use hearthnet_files::ModelFile;
use hearthnet_files::manifest::ChangedError;
use hearthnet_files::part::open_model;
use hearthnet_platform::regular_file;

use crate::cli::{Failure, Kind, failure, no_thread};

pub(crate) fn open_file(path: &Path) -> Result<ModelFile, Failure> {
    open_model(path).map_err(|e| match e.is_out_of_memory() {
        true => out_of_memory(&format!("{}: {e}", path.display())),
        false => model_failure(path, e),
    })
}

/// Error for a file that changed since it was pinned or first used.
pub(crate) fn changed(error: &ChangedError) -> Failure {
    let path = error.path.display();
    let hint = match error.pinned {
        true => "`hearthnet model pull` of its id fetches it again".to_owned(),
        false => format!(
            "restore it from a copy or fetch it again (`hearthnet model pull --force`); \
             `hearthnet model verify {path} --accept` accepts it as it is now"
        ),
    };
    Failure::new(Kind::Model, error.to_string())
        .code("model_changed")
        .hint(hint)
}

/// Error for weights that cannot be loaded.
pub(crate) fn load_failure(path: &Path, error: &LoadError) -> Failure {
    match error {
        LoadError::OutOfMemory(_) => out_of_memory(&format!("{}: {error}", path.display())),
        LoadError::Threads(error) => no_thread(error),
        _ => model_failure(path, error),
    }
}

pub(crate) fn model_failure(path: &Path, error: impl std::fmt::Display) -> Failure {
    let closed = regular_file::open(path)
        .is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
    let hint = match closed {
        // A daemon's sandbox denies other folders (`daemon/isolation.rs`).
        true => {
            "a daemon reads models in the folder of `hearthnet model list` and the one that it was started \
             with: copy the file there, or start the daemon with --model FILE"
        }
        false => {
            "`hearthnet model inspect FILE` shows what a file holds; a fresh `hearthnet model pull` \
             replaces a broken one"
        }
    };
    failure!(Model, "{}: {error}", path.display()).hint(hint)
}

/// Error if this machine has too little free memory for a model.
pub(crate) fn out_of_memory(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Kind::Host, error.to_string())
        .code("out_of_memory")
        .hint(
            "end other programs, take a smaller model (`hearthnet model list` shows which fit), serve \
             fewer layers, or raise the limit: `ulimit -v` shows that of this process, MemoryMax= is \
             that of a systemd unit",
        )
}
