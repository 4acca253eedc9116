//! Opens model files. Errors of model files, for the user.

use std::path::Path;

use hearthnet_engine::LoadError;
use hearthnet_files::manifest::ChangedError;
use hearthnet_files::part::open_model;
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{ModelError, ModelFile};
use hearthnet_orchestrator::placement::runs_text;
use hearthnet_platform::regular_file;

use crate::cli::{Failure, Kind, failure, no_thread};

pub(crate) fn open_file(path: &Path) -> Result<ModelFile, Failure> {
    open_model(path).map_err(|e| match e.is_out_of_memory() {
        true => out_of_memory(&format!("{}: {e}", path.display())),
        false => model_failure(path, e),
    })
}

/// The model with this format of keys and values; a part has that of its adoption.
pub(crate) fn with_cache(
    model: &str,
    file: ModelFile,
    cache: CacheDtype,
) -> Result<ModelFile, Failure> {
    let width = file.spec().block(0).key_width();
    file.with_cache(cache).map_err(|error| {
        failure!(
            BadRequest,
            "{model} cannot keep keys and values as {cache}: {error} (its keys have {width} values)"
        )
        .hint(
            "choose f16: `--cache f16`, or the setting research.distributed_inference.cache_dtype",
        )
    })
}

/// Refuses layers of which a part lacks weights. The model has them.
pub(crate) fn require_layers(
    model: &str,
    file: &ModelFile,
    (lo, hi): (u32, u32),
) -> Result<(), Failure> {
    if file.holds_layers(lo, hi) {
        return Ok(());
    }
    Err(failure!(
        Model,
        "layers {lo}-{hi} of {model} are not all on this machine, which has {}",
        held(file)
    )
    .hint(format!(
        "`hearthnet up` fetches the layers that this machine should serve; `hearthnet model pull {model} \
         --layers {lo}-{hi}` fetches these, while no node runs here"
    )))
}

/// Refuses a part that lacks weights of its model.
pub(crate) fn require_whole(model: &str, file: &ModelFile) -> Result<(), Failure> {
    if file.is_whole() {
        return Ok(());
    }
    let last = file.spec().layers.saturating_sub(1);
    let head = match file.holds_head() {
        true => "",
        false => ", and not its embedding",
    };
    Err(failure!(
        Model,
        "only a part of {model} is on this machine: {}{head}",
        held(file)
    )
    .hint(format!(
        "`hearthnet model pull {model} --layers 0-{last}` fetches all layers while no node runs here, and \
         `hearthnet up` what chats need beside them"
    )))
}

/// Layers that a part holds, in words.
fn held(file: &ModelFile) -> String {
    match file.held_layers().as_slice() {
        [] => "no whole layer".to_owned(),
        layers => format!("layers {}", runs_text(layers)),
    }
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
        LoadError::Model(ModelError::NotHeld(_)) => failure!(Model, "{}: {error}", path.display())
            .hint(
                "`hearthnet up` fetches what this machine needs; `hearthnet model pull NAME --layers LO-HI` \
                 fetches layers of an adopted model",
            ),
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
