//! How a directory of `sentence-transformers` makes the vector of a text: `modules.json`, and the
//! configuration of its pooling.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::directory::{read, read_json};
use super::error::ImportError;
use crate::pooling::Pooling;

const MODULES: &str = "modules.json";
const MAX_BYTES: u64 = 1 << 20;

/// Step from a text to its vector.
#[derive(Deserialize)]
struct Module {
    /// Python class.
    #[serde(rename = "type")]
    class: String,
    /// Folder of its files.
    #[serde(default)]
    path: String,
}

/// Way of the directory; `None` if it is not one of `sentence-transformers`.
pub(super) fn pooling(directory: &Path) -> Result<Option<Pooling>, ImportError> {
    let Some(text) = read(directory, MODULES, MAX_BYTES)? else {
        return Ok(None);
    };
    let modules: Vec<Module> = serde_json::from_slice(&text)
        .map_err(|error| ImportError::Unsound(format!("{MODULES} cannot be read: {error}")))?;
    let mut found = None;
    for module in modules {
        match module.class.rsplit('.').next() {
            Some("Transformer" | "Normalize") => {}
            Some("Pooling") => {
                let name = format!("{}/config.json", module.path);
                let plain = Path::new(&module.path).file_name();
                if plain.is_none_or(|plain| plain != module.path.as_str()) {
                    return Err(ImportError::Unsound(format!(
                        "{MODULES}: {:?} is not a folder in this directory",
                        module.path
                    )));
                }
                let config = read_json(directory, &name, MAX_BYTES)?.ok_or_else(|| {
                    ImportError::Unsound(format!("{name} is missing: {MODULES} names it"))
                })?;
                found = Some(way(&config, &name)?);
            }
            _ => {
                return Err(ImportError::Unsound(format!(
                    "{MODULES}: the step {:?} of the model is not supported; transformer, pooling and \
                     normalisation are",
                    module.class
                )));
            }
        }
    }
    Ok(found)
}

fn way(config: &Map<String, Json>, name: &str) -> Result<Pooling, ImportError> {
    let is = |flag: &str| {
        config
            .get(&format!("pooling_mode_{flag}"))
            .and_then(Json::as_bool)
    };
    let named = config.get("pooling_mode").and_then(Json::as_str);
    let ways = [
        ("mean_tokens", "mean", Pooling::Mean),
        ("cls_token", "cls", Pooling::First),
        ("lasttoken", "lasttoken", Pooling::Last),
    ];
    let mut chosen = ways
        .iter()
        .filter(|(flag, mode, _)| is(flag) == Some(true) || named == Some(mode));
    match (chosen.next(), chosen.next()) {
        (Some((_, _, way)), None) => Ok(*way),
        _ => Err(ImportError::Unsound(format!(
            "{name}: this way of pooling is not supported; the mean, the first and the last token are"
        ))),
    }
}
