//! How a directory of `sentence-transformers` makes the vector of a text: `modules.json`, and the
//! configurations of its pooling and of the matrices behind it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::directory::{Files, read, read_json};
use super::error::ImportError;
use super::json::present;
use crate::pooling::Pooling;

const MODULES: &str = "modules.json";
const MAX_BYTES: u64 = 1 << 20;
/// Folders of the matrices behind the pooled state, and the names of their sizes in a model file.
pub(super) const DENSE: [(&str, &str); 2] = [("2_Dense", "dense_2"), ("3_Dense", "dense_3")];
/// Files of such a folder.
pub(super) const DENSE_WEIGHTS: &str = "model.safetensors";
pub(super) const DENSE_CONFIG: &str = "config.json";

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

/// Steps of a directory of `sentence-transformers`.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// `None` if the directory is not one of `sentence-transformers`.
    pub(super) pooling: Option<Pooling>,
    /// Inputs and outputs of the matrices of [`DENSE`]; empty if there are none.
    pub(super) dense: Vec<(u32, u32)>,
}

impl Modules {
    /// Reads the steps. `projects`: whether the class may have matrices behind the pooled state.
    pub(super) fn read(files: &(impl Files + ?Sized), projects: bool) -> Result<Self, ImportError> {
        let mut found = Self::default();
        let Some(text) = read(files, MODULES, MAX_BYTES)? else {
            return Ok(found);
        };
        let modules: Vec<Module> = serde_json::from_slice(&text)
            .map_err(|error| ImportError::Unsound(format!("{MODULES} cannot be read: {error}")))?;
        let config = |module: &Module| {
            let name = format!("{}/config.json", module.path);
            let plain = Path::new(&module.path).file_name();
            if plain.is_none_or(|plain| plain != module.path.as_str()) {
                return Err(ImportError::Unsound(format!(
                    "{MODULES}: {:?} is not a folder in this directory",
                    module.path
                )));
            }
            let config = read_json(files, &name, MAX_BYTES)?.ok_or_else(|| {
                ImportError::Unsound(format!("{name} is missing: {MODULES} names it"))
            })?;
            Ok((config, name))
        };
        for module in modules {
            match module.class.rsplit('.').next() {
                Some("Transformer" | "Normalize") => {}
                Some("Pooling") => {
                    let (config, name) = config(&module)?;
                    found.pooling = Some(way(&config, &name)?);
                }
                Some("Dense") if projects => {
                    let expected = DENSE.get(found.dense.len()).map(|(folder, _)| *folder);
                    if expected != Some(module.path.as_str()) {
                        return Err(ImportError::Unsound(format!(
                            "{MODULES}: the matrices behind the pooled state must be in 2_Dense and 3_Dense, \
                             not {:?}",
                            module.path
                        )));
                    }
                    let (config, name) = config(&module)?;
                    found.dense.push(sizes(&config, &name)?);
                }
                _ => {
                    return Err(ImportError::Unsound(format!(
                        "{MODULES}: the step {:?} of the model is not supported; transformer, pooling and \
                         normalisation are, and two dense layers behind EmbeddingGemma",
                        module.class
                    )));
                }
            }
        }
        match found.dense.len() {
            0 | 2 => Ok(found),
            _ => Err(ImportError::Unsound(format!(
                "{MODULES}: one matrix behind the pooled state is not supported; two are"
            ))),
        }
    }
}

/// Inputs and outputs of a matrix behind the pooled state.
fn sizes(config: &Map<String, Json>, name: &str) -> Result<(u32, u32), ImportError> {
    let activation = present(config, "activation_function").and_then(Json::as_str);
    let identity = activation.is_some_and(|name| name.ends_with(".Identity"));
    let plain = identity && present(config, "bias") == Some(&Json::Bool(false));
    let size = |key: &str| {
        let size = config.get(key).and_then(Json::as_u64);
        size.and_then(|size| u32::try_from(size).ok())
    };
    match (size("in_features"), size("out_features")) {
        (Some(inputs), Some(outputs)) if plain => Ok((inputs, outputs)),
        _ => Err(ImportError::Unsound(format!(
            "{name}: a dense layer must have in_features and out_features, no bias, and the identity as \
             activation_function"
        ))),
    }
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
