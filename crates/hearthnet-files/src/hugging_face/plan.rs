//! Tensors of a model as its directory's `config.json` and headers imply them.

use super::config::Config;
use super::directory::{Files, read};
use super::error::ImportError;
use super::finder::Finder;
use super::modules::{DENSE, DENSE_WEIGHTS, Modules};
use super::planned::Planned;
use super::rope::Rope;
use super::shards::Shards;
use crate::families::{CORRECTION, Family, OUTPUT};
use crate::gguf::writer::{WriteError, Writer};
use crate::gguf::{Gguf, TensorType, Value};

pub(super) const CONFIG: &str = "config.json";
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Checked hyperparameters and tensor shapes of a directory.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) config: Config,
    pub(super) rope: Rope,
    pub(super) shards: Shards,
    pub(super) modules: Modules,
    /// In the order of the family.
    pub(super) tensors: Vec<Planned>,
}

impl Plan {
    /// Reads `config.json` and the headers of the weights. `whole`: also how the directory makes
    /// vectors of texts; and an output matrix that is tied to the embedding is compared with it.
    pub(super) fn read(files: &(impl Files + ?Sized), whole: bool) -> Result<Self, ImportError> {
        let none = || {
            let path = files.path().display();
            ImportError::Unsound(format!("{path} is no model: it has no config.json"))
        };
        let config = read(files, CONFIG, MAX_CONFIG_BYTES)?;
        let config = Config::parse(&config.ok_or_else(none)?)?;
        let rope = Rope::read(&config)?;
        let modules = match whole || config.class.projection {
            true => Modules::read(files, config.class.projection)?,
            false => Modules::default(),
        };
        let mut shards = Shards::open(files)?;
        for (folder, _) in DENSE.iter().take(modules.dense.len()) {
            shards.add_folder(files, folder, DENSE_WEIGHTS)?;
        }
        let finder = Finder::new(&shards, config.class)?;
        let (family, spec) = {
            let gguf = probe(&config, &rope, &modules, &finder)?;
            let family = Family::of(&gguf)?;
            (family, family.spec(&gguf)?)
        };
        config.check_layers(&spec)?;
        if whole {
            finder.check_output(&config)?;
        }
        let mut computed = rope.tensors.clone();
        computed.extend(config.qk_norms()?);
        let tensors = finder.plan(family, &spec, &computed, config.prediction()?)?;
        Ok(Self {
            config,
            rope,
            shards,
            modules,
            tensors,
        })
    }
}

/// GGUF header with the metadata, and with the names that distinguish variants of the family, so
/// that the family reads the hyperparameters as from a model file.
fn probe(
    config: &Config,
    rope: &Rope,
    modules: &Modules,
    finder: &Finder<'_>,
) -> Result<Gguf, ImportError> {
    let mut writer = Writer::new();
    config.write(&mut writer)?;
    config.write_modules(modules, &mut writer)?;
    rope.write(config, &mut writer)?;
    if !config.class.vocab_size {
        let key = format!("{}.vocab_size", config.class.architecture);
        writer.set(&key, Value::U32(config.vocab()?))?;
    }
    let (bias, norm) = ("blk.0.attn_q.bias", "blk.0.attn_q_norm.weight");
    let corrected = config.class.correction;
    let names = (rope.tensors.iter().map(|(name, _)| *name))
        .chain(Some(OUTPUT).filter(|_| finder.has_output()))
        .chain([bias, norm].into_iter().filter(|name| finder.has(name)))
        .chain(Some(CORRECTION).filter(|_| corrected));
    // Some families have blocks without values.
    let blocks = (0..).take_while(|block| finder.has(&format!("blk.{block}.attn_norm.weight")));
    let values = blocks.map(|block: u32| format!("blk.{block}.attn_v.weight"));
    let values: Vec<String> = values.filter(|name| finder.has(name)).collect();
    for name in names.chain(values.iter().map(String::as_str)) {
        writer.tensor(name, &[1], TensorType::I8)?;
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes, |_, out| {
        out.write_all(&[0]).map_err(WriteError::Io)
    })?;
    Gguf::from_bytes(bytes).map_err(|error| ImportError::Model(error.into()))
}
