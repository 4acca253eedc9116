//! `hearthnet model verify`.

use std::path::Path;

use hearthnet_files::manifest::{FileState, Pinned, file_state};
use hearthnet_hub::catalogue::{Catalogue, ModelEntry};

use crate::cli::{Failure, Progress, print_result};
use crate::models::catalogue::pin;
use crate::models::open_file::{changed, open_file};

pub(super) fn verify(
    catalogue: &Catalogue,
    path: &Path,
    accept: bool,
    json: bool,
) -> Result<(), Failure> {
    let pin = pin(catalogue, path)?;
    let file = open_file(path)?;
    let known = file_state(path) != FileState::Unverified;
    let what = "reading all of the model";
    let (manifest, compared) = match (pin, accept) {
        (None, true) => (Progress::during(what, |set| file.accept(set)), "accepted"),
        (pin, _) => {
            let manifest =
                Progress::during(what, |set| file.verify(pin.map(ModelEntry::expected), set));
            let manifest = manifest.map_err(|e| changed(&e))?;
            let compared = match (pin, known) {
                (Some(pin), _) if pin.pinned == Pinned::FirstPull => "first_pull",
                (Some(_), _) => "catalogue",
                (None, true) => "record",
                (None, false) => "nothing",
            };
            (manifest, compared)
        }
    };
    let len = file.gguf().file_bytes();
    let weights = manifest.weights_id();
    let found = serde_json::json!({
        "path": path.to_string_lossy(), "bytes": len, "weights": weights, "compared_with": compared,
    });
    let what = match compared {
        "catalogue" => "they match the catalogue",
        "first_pull" => "they match the first pull on this machine",
        "record" => "they match the hash of the first use",
        "accepted" => "accepted as they are now",
        _ => "no reference hash is known; this hash is recorded and checked from now on",
    };
    print_result(json, &found, || {
        let path = path.display();
        format!("{path}\n  bytes    {len} read: {what}\n  weights  {weights}\n")
    })
}
